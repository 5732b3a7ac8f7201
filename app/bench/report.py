"""The form all benchmark results have: a table for people, and the same as JSON for programs."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

_PARTS = " / "
"""Between figures that share a column."""


def machine() -> dict[str, Any]:
    """What it ran on."""
    return {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    """Its name, where the system tells; at least its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


class Bar(msgspec.Struct, frozen=True):
    """A figure that has to reach something. `bar` says it in words, `met` whether it does.

    Without words it is only told.
    """

    name: str
    value: float
    unit: str
    bar: str
    met: bool


class Report(msgspec.Struct, frozen=True):
    """What one benchmark found, and where."""

    bench: str
    rows: list[dict[str, Any]]
    bars: list[Bar]
    machine: dict[str, Any] = msgspec.field(default_factory=machine)

    @property
    def is_met(self) -> bool:
        """Whether every bar is."""
        return all(bar.met for bar in self.bars)

    def show(self, console: Console) -> None:
        """The rows, then the bars."""
        table = Table(box=None, pad_edge=False)
        for name, value in self.rows[0].items() if self.rows else ():
            parts = f" {_PARTS.join(value)}" if isinstance(value, dict) else ""
            table.add_column(name + parts, no_wrap=True)
        for row in self.rows:
            table.add_row(*(_shown(v) for v in row.values()))
        console.print(table, highlight=False)
        for bar in self.bars:
            verdict = "[green]met[/]" if bar.met else "[red]not met[/]"
            wanted = f"({bar.bar}) {verdict}" if bar.bar else ""
            shown = " ".join(filter(None, (f"{bar.value:g}", bar.unit, wanted)))
            console.print(f"{bar.name}: {shown}", highlight=False)

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return _PARTS.join(map(_shown, value.values()))
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return str(value)
