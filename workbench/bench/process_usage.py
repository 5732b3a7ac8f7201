"""CPU time and memory of a child process, as Linux counts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class ChildProcess(Protocol):
    @property
    def pid(self) -> int: ...


def cpu_time_s(process: ChildProcess) -> float:
    """The time of all threads, counted in 10 ms; nan where /proc has no entry."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text("ascii")
    except OSError:
        return float("nan")
    fields = stat.rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(process: ChildProcess) -> int:
    """The resident memory; 0 where /proc has no entry, or after the process has ended."""
    try:
        pages = Path(f"/proc/{process.pid}/statm").read_text("ascii").split()
    except OSError:
        return 0
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0
