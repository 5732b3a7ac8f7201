"""Reports of benchmarks: a table, thresholds with their verdicts, and the same as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from kvlane.app.commands.console import write_json
from kvlane.app.commands.simulation.simulation_report import machine_info, rows_table


class Threshold(msgspec.Struct, frozen=True):
    """A figure and its threshold, as text; without a text the figure is only shown."""

    name: str
    value: float
    unit: str
    threshold: str
    passed: bool


class Report(msgspec.Struct, frozen=True):
    """The results of a benchmark and the machine of the run."""

    bench: str
    rows: list[dict[str, Any]]
    thresholds: list[Threshold]
    machine: dict[str, Any] = msgspec.field(default_factory=machine_info)

    lines: list[str] = []
    """Text below the table, of any length."""

    @property
    def is_passed(self) -> bool:
        return all(each.passed for each in self.thresholds)

    def show(self, console: Console) -> None:
        """Print the rows, the lines, then the thresholds."""
        console.print(rows_table(self.rows), highlight=False)
        for line in self.lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        for each in self.thresholds:
            verdict = "[green]passed[/]" if each.passed else "[red]failed[/]"
            wanted = f"({each.threshold}) {verdict}" if each.threshold else ""
            shown = " ".join(filter(None, (f"{each.value:g}", each.unit, wanted)))
            console.print(f"{each.name}: {shown}", highlight=False)

    def write(self, file: Path) -> None:
        write_json(file, self)


def at_most(name: str, value: float, unit: str, limit: float) -> Threshold:
    """A figure with an upper limit."""
    return Threshold(name, value, unit, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Threshold:
    """A figure with a lower limit."""
    return Threshold(name, value, unit, f">= {limit:g}", value >= limit)


def none_of(name: str, count: float, unit: str = "") -> Threshold:
    """A number of faults; none is allowed."""
    return Threshold(name, count, unit, "0", not count)


def figure(name: str, value: float, unit: str) -> Threshold:
    """A figure without a limit."""
    return Threshold(name, value, unit, "", passed=True)
