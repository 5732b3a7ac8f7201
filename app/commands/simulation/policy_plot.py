"""The plot of `kvlane simulate`; matplotlib is imported when it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

WIDTH_IN = 9.0
"""Inches."""


def plot_policies(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Results of `kvlane simulate`: a diagram per figure, a bar per policy, a dot per seed.

    An `.html` file is a self-contained page with the plot.
    """
    names = list(dict.fromkeys(row["policy"] for row in rows))
    figure, diagrams = axes(len(POLICY_FIGURES), len(POLICY_FIGURES) * (0.7 + 0.25 * len(names)))
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


def axes(rows: int, height_in: float) -> tuple[Any, Sequence[Any]]:
    """A matplotlib figure with diagrams below each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, list(figure.subplots(rows, 1, squeeze=False)[:, 0])
