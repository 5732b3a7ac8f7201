"""Reports of simulations: tables, the same as JSON, the plot of policies, and counterfactuals."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvlane.app.commands import audit_commands
from kvlane.app.commands import console as screen
from kvlane.app.simulation.counterfactual import (
    CapturedPeriod,
    CaptureReader,
    PolicyRegret,
    counterfactual,
    policy_regret,
    recorded_metrics,
    simulate_recorded,
)
from kvlane.app.simulation.simulated_router import NetworkConditions
from kvlane.app.simulation.simulation_runs import RunMetrics, metrics_of
from kvlane.indexer.precompile import compile_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_IN = 9.0
"""Inches."""


def plot_policies(
    rows: Sequence[Mapping[str, Any]], trace: str, created_on: date, file: Path
) -> None:
    """Write the plot of `policy_figure`; an `.html` file is a self-contained page with it."""
    figure = policy_figure(rows, trace, created_on)
    if file.suffix == ".html":
        file.write_text(screen.plot_page("kvlane simulate", figure), "utf-8")
    else:
        figure.savefig(file, dpi=120)


def policy_figure(rows: Sequence[Mapping[str, Any]], trace: str, created_on: date) -> Figure:
    """Results of simulations that differ in policy and seed: a diagram per figure, a bar per
    policy, a dot per seed. `trace`: its name."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["policy"] for row in rows))
    height_in = 1.2 + len(POLICY_FIGURES) * (0.65 + 0.25 * len(names))
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    diagrams = figure.subplots(len(POLICY_FIGURES), 1)
    shown: dict[str, Any] = {}
    for ax, (title, (unit, value)) in zip(diagrams, POLICY_FIGURES.items(), strict=True):
        for place, name in enumerate(names):
            found = [value(row) for row in rows if row["policy"] == name]
            mean = sum(found) / len(found)
            bars = ax.barh(place, mean, height=0.7, color="tab:blue", alpha=0.6)
            if len(found) > 1:
                [dots] = ax.plot(found, [place] * len(found), ".", color="black", markersize=4)
                shown = {f"mean of {len(found)} runs": bars, "one run": dots}
            else:
                shown = {"one run": bars}
            text = f"{mean:,.0f} {unit}" if mean >= 100 else f"{mean:.3g} {unit}"
            ax.text(1.01, place, text, transform=ax.get_yaxis_transform(), va="center")
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.set_title(f"{title}, {unit}", loc="left", fontsize="medium")
        ax.grid(axis="x", alpha=0.3)
    first = rows[0]
    speed = "" if first["speed"] == 1 else f", {first['speed']:g} times its rate"
    conditions = f"; {first['conditions']}" if first["conditions"] else ""
    figure.suptitle(
        f"Routing policies on {trace}{speed}\n{first['requests']} requests, "
        f"{first['workers']} workers{conditions}"
    )
    figure.legend([*shown.values()], [*shown], loc="outside lower right", ncols=2)
    figure.text(0.01, 0.01, f"kvlane {version('kvlane')}, {created_on}", fontsize="small")
    return figure


POLICY_FIGURES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], float]]] = {
    "Time to the first token, mean": ("ms", lambda row: row["ttft_ms"]["mean"]),
    "Time to the first token, 99th percentile": ("ms", lambda row: row["ttft_ms"]["p99"]),
    "Time between tokens, mean": ("ms", lambda row: row["itl_ms"]["mean"]),
    "Time to the last token, mean": ("ms", lambda row: row["e2e_ms"]["mean"]),
    "Prompt tokens found in a cache": ("%", lambda row: 100 * row["reuse"]),
}
"""Units and values, by title."""


_PARTS = " / "
"""Between figures that share a column."""


def machine_info() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of rows with equal keys; the figures of a mapping share a column."""
    table = Table(box=None, pad_edge=False)
    for name, value in rows[0].items() if rows else ():
        parts = f" {_PARTS.join(value)}" if isinstance(value, dict) else ""
        table.add_column(name + parts, no_wrap=True)
    for row in rows:
        table.add_row(*(_shown(v) for v in row.values()))
    return table


def rows_report(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON of rows: a report of a benchmark without thresholds."""
    report = {"bench": "simulate", "rows": rows, "thresholds": [], "machine": machine_info()}
    return {**report, "lines": []}


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return _PARTS.join(map(_shown, value.values()))
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return str(value)


RECORDED_ROW, REPLAYED_ROW = "as it happened", "decisions taken"
EXPLANATION = (
    f'"{RECORDED_ROW}" is from the log; all other rows are simulated, with caches that are empty '
    f'at first. The difference between it and "{REPLAYED_ROW}" is the error of the simulation. '
    "Regret: the delay of first and last tokens under the decisions taken, compared with a "
    "policy, both simulated, on average over the period; above 0, that policy would have been "
    "better. It is statistical: each decision changes the caches of later requests, so it is not "
    "valid for a single request. After ±: two standard errors, as if requests were independent."
)


def show_counterfactuals(
    source: str,
    policies: Sequence[str],
    seeds: int,
    conditions: NetworkConditions,
    json: Path | None,
) -> None:
    """Print the tables of a file or a period. Raises InvalidTrace, and the errors of
    `capture.read`."""
    reading = CaptureReader()
    audit_commands.read_lines(source, reading.add_line)
    period = reading.build_period()
    compile_all()
    count = len(period.requests)
    rows: list[dict[str, Any]] = [_row(RECORDED_ROW, None, recorded_metrics(period), None)]
    with screen.progress_bar(Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(REPLAYED_ROW, total=(1 + len(policies) * seeds) * count)
        taken = simulate_recorded(period, conditions, lambda n: progress.advance(bar, n))
        rows.append(_row(REPLAYED_ROW, None, metrics_of(taken), None))
        for policy, seed in product(policies, range(seeds)):
            progress.update(bar, description=policy)
            requests = counterfactual(
                period, policy, seed, conditions, lambda n: progress.advance(bar, n)
            )
            rows.append(_row(policy, seed, metrics_of(requests), policy_regret(taken, requests)))
    report = {"model": period.model, "workers": period.workers, "rows": rows}
    report["left_out"] = dict(period.left_out)
    screen.show_result(json, report, lambda: _print(period, rows))


def _row(
    policy: str, seed: int | None, found: RunMetrics, lost: PolicyRegret | None
) -> dict[str, Any]:
    return {
        "policy": policy,
        "seed": seed,
        "figures": found._asdict(),
        "regret": None if lost is None else lost._asdict(),
    }


def _print(period: CapturedPeriod, rows: Sequence[dict[str, Any]]) -> None:
    console, shape = screen.make_console(), period.shape
    console.print(
        f"{len(period.requests)} requests for {period.model or 'any model'}, {period.workers} "
        f"workers of {shape.cache_blocks} blocks of {shape.block_size} tokens"
    )
    columns = ("reuse", "TTFT ms", "p50", "p99", "ITL ms", "E2E ms", "p99 ")
    table = screen.plain_table("", *columns)
    lost_by = screen.plain_table("regret", "TTFT ms", "E2E ms")
    for column in (*table.columns[1:], *lost_by.columns[1:]):
        column.justify = "right"
    several = any(row["seed"] for row in rows)
    for row in rows:
        seed = f", seed {row['seed']}" if several and row["seed"] is not None else ""
        found, lost = RunMetrics(**row["figures"]), row["regret"]
        name = row["policy"] + seed
        times = (
            found.ttft_mean, found.ttft_p50, found.ttft_p99, found.itl_mean, found.e2e_mean,
            found.e2e_p99,
        )  # fmt: skip
        table.add_row(name, f"{found.reuse:.1%}", *(f"{ms:.1f}" for ms in times))
        if lost is not None:
            lost_by.add_row(
                name,
                f"{lost['ttft_ms']:+.1f} ± {lost['ttft_error']:.1f}",
                f"{lost['e2e_ms']:+.1f} ± {lost['e2e_error']:.1f}",
            )
    console.print(table)
    console.print(lost_by)
    for why, count in period.left_out.items():
        console.print(f"left out: {count} requests {why}", style="yellow")
    if period.fleets > 1:
        console.print(
            f"the workers are of {period.fleets} kinds; all are simulated as the most common one",
            style="yellow",
        )
    console.print(EXPLANATION, style="dim")
