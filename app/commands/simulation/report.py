"""Reports of benchmarks and simulations: a table, the same as JSON, and the plot of policies."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

WIDTH_IN = 9.0
"""Inches."""


def plot_policies(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Results of `kvlane simulate`: a diagram per figure, a bar per policy, a dot per seed.

    An `.html` file is a self-contained page with the plot.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["policy"] for row in rows))
    height_in = len(POLICY_FIGURES) * (0.7 + 0.25 * len(names))
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    diagrams = figure.subplots(len(POLICY_FIGURES), 1)
    for ax, (title, value) in zip(diagrams, POLICY_FIGURES.items(), strict=True):
        for place, name in enumerate(names):
            found = [value(row) for row in rows if row["policy"] == name]
            ax.barh(place, sum(found) / len(found), height=0.7, color="tab:blue", alpha=0.6)
            ax.plot(found, [place] * len(found), ".", color="black", markersize=4)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_title(title, loc="left", fontsize="medium")
        ax.grid(axis="x", alpha=0.3)
    first = rows[0]
    figure.suptitle(
        f"{first['requests']} requests, {first['workers']} workers, {first['speed']:g}x speed"
    )
    if file.suffix != ".html":
        figure.savefig(file, dpi=120)
        return
    picture = StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    head = "<!doctype html><meta charset=utf-8><title>kvlane simulate</title>"
    file.write_text(head + svg[svg.index("<svg") :], "utf-8")


POLICY_FIGURES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "time to the first token, mean, ms": lambda row: row["ttft_ms"]["mean"],
    "time to the first token, p99, ms": lambda row: row["ttft_ms"]["p99"],
    "from token to token, mean, ms": lambda row: row["itl_ms"]["mean"],
    "time to the last token, mean, ms": lambda row: row["e2e_ms"]["mean"],
    "prompt tokens found in a cache, %": lambda row: 100 * row["reuse"],
}


_PARTS = " / "
"""Between figures that share a column."""


def machine_info() -> dict[str, Any]:
    """The machine of a run."""
    return {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    """The name of the processor if known, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


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
        table = Table(box=None, pad_edge=False)
        for name, value in self.rows[0].items() if self.rows else ():
            parts = f" {_PARTS.join(value)}" if isinstance(value, dict) else ""
            table.add_column(name + parts, no_wrap=True)
        for row in self.rows:
            table.add_row(*(_shown(v) for v in row.values()))
        console.print(table, highlight=False)
        for line in self.lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        for each in self.thresholds:
            verdict = "[green]passed[/]" if each.passed else "[red]failed[/]"
            wanted = f"({each.threshold}) {verdict}" if each.threshold else ""
            shown = " ".join(filter(None, (f"{each.value:g}", each.unit, wanted)))
            console.print(f"{each.name}: {shown}", highlight=False)

    def write(self, file: Path) -> None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


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


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return _PARTS.join(map(_shown, value.values()))
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return str(value)
