"""Plots of benchmark results; matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlane.app.commands.simulation.report import axes

if TYPE_CHECKING:
    from kvlane.app.commands.simulation.report import Threshold
    from workbench.bench.chaos.overload import OverloadResult

ROW_IN, THRESHOLD_IN = 0.5, 0.14
"""Inches."""
TICKS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)


def plot_chaos(rounds: Sequence[Mapping[str, Any]], file: Path) -> None:
    """The gaps of all streams by kind of fault, one dot per gap, on a logarithmic axis.

    `rounds` are the rounds of a log; the suffix of `file` determines the format.
    """
    found: dict[str, list[float]] = {}
    for line in rounds:
        for kind, gaps_ms in line.get("gaps_ms", {}).items():
            found.setdefault(kind, []).extend(gap / 1000 for gap in gaps_ms)
    kinds = sorted(found)
    figure, (ax,) = axes(1, 1 + ROW_IN * max(1, len(kinds)))
    for place, kind in enumerate(kinds):
        gaps = found[kind]
        spread = [place + 0.3 * ((n * 0.618) % 1 - 0.5) for n in range(len(gaps))]
        ax.plot(gaps, spread, ".", markersize=4, alpha=0.4)
    ax.set_yticks(range(len(kinds)), [f"{kind} ({len(found[kind])})" for kind in kinds])
    ax.set_xscale("log")
    ax.set_xticks(TICKS_S, [f"{tick:g}" for tick in TICKS_S])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("longest silence of a running stream, seconds")
    kills = sum(len(line.get("strikes", ())) for line in rounds)
    ax.set_title(f"{kills} kills and stops")
    ax.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=120)


def plot_overload(result: OverloadResult, file: Path) -> None:
    """Memory of every process and outcomes of requests over time."""
    figure, (memory, latency_axis) = axes(2, 8.0)
    began = min(sample.at for sample in result.samples)
    parts: dict[str, tuple[list[float], list[float]]] = {}
    for sample in result.samples:
        times, sizes = parts.setdefault(sample.process, ([], []))
        times.append(sample.at - began)
        sizes.append(sample.rss_bytes / 1024 / 1024)
    for part, (times, sizes) in sorted(parts.items()):
        memory.plot(times, sizes, label=part)
    memory.set_ylabel("memory, MB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small", ncols=3)
    for label, status in (("served: first text", 200), ("refused", 529)):
        own = [a for a in result.outcomes if a.status == status]
        moments = [a.at - began for a in own]
        latency_axis.plot(moments, [1000 * a.ttft_s for a in own], ".", markersize=3, label=label)
    latency_axis.set_yscale("log")
    latency_axis.set_ylabel("milliseconds")
    latency_axis.set_xlabel("seconds")
    latency_axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def plot_thresholds(thresholds: Sequence[Threshold], file: Path) -> None:
    """Ratios: a dot for the figure, a line for its threshold; red: failed."""
    ratios = [each for each in thresholds if each.unit == "x" and math.isfinite(each.value)]
    figure, (ax,) = axes(1, 1 + THRESHOLD_IN * max(1, len(ratios)))
    for place, each in enumerate(ratios):
        ax.plot(
            each.value, place, "o", color="tab:green" if each.passed else "tab:red", markersize=4
        )
        limit = float(each.threshold.split()[-1])
        ax.plot([limit, limit], [place - 0.4, place + 0.4], color="black", linewidth=1)
    ax.set_yticks(
        range(len(ratios)), [f"{each.name} ({each.threshold})" for each in ratios], fontsize=6
    )
    ax.set_ylim(len(ratios) - 0.5, -0.5)
    ax.set_title(
        f"{sum(each.passed for each in ratios)} of {len(ratios)} passed", fontsize="medium"
    )
    ax.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=120)
