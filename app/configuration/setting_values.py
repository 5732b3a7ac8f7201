"""Names, types and errors of single settings, shared by the areas."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator

from kvlane.app.operator_error import OperatorError

PREFIX = "KVLANE_"


class SettingsError(OperatorError, ValueError):
    """Settings that cannot work. Each line has a variable, the reason, and the correction."""


def variable_name(field: str) -> str:
    return f"{PREFIX}{field.upper()}"


def unique_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("no such file: give the path of a file this process can read")
    if not os.access(path, os.R_OK):
        raise ValueError("the file is not readable for this process: check owner and mode")
    return path


def _upper_case(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


UPPER_CASE = BeforeValidator(_upper_case)
"""For choices in capitals: accepts them in small letters too."""
ReadableFile = Annotated[Path, AfterValidator(_readable)]


def listed(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def are_on_loopback(servers: str) -> bool:
    """Whether all servers, host:port with commas between them, are on this machine."""
    hosts = [part.strip().rpartition(":")[0].strip("[]") for part in servers.split(",") if part]
    return all(host in ("localhost", "::1") or host.startswith("127.") for host in hosts)


def exceeds(settings: BaseModel, smaller: str, larger: str) -> str:
    """The error for two fields of which the first may not be larger than the second."""
    low, high = getattr(settings, smaller), getattr(settings, larger)
    return (
        f"{variable_name(smaller)}={low:.15g} exceeds {variable_name(larger)}={high:.15g}: "
        f"lower the first or raise the second"
    )
