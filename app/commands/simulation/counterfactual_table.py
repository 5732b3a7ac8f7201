"""Output of `kvlane simulate --from-ledger`: a recorded period and its counterfactuals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from kvlane.app.commands import capture_commands
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
from kvlane.app.simulation.run_metrics import RunMetrics, metrics_of
from kvlane.app.simulation.simulated_router import NetworkConditions
from kvlane.indexer.precompile import compile_all

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
    `capture.read`.
    """
    reading = CaptureReader()
    capture_commands.read(source, reading.add_line)
    period = reading.build_period()
    compile_all()
    console, count = screen.make_console(), len(period.requests)
    rows: list[dict[str, Any]] = [_row(RECORDED_ROW, None, recorded_metrics(period), None)]
    with screen.progress_bar(console, transient=True) as progress:
        bar = progress.add_task(REPLAYED_ROW, total=(1 + len(policies) * seeds) * count)
        taken = simulate_recorded(period, conditions, lambda n: progress.advance(bar, n))
        rows.append(_row(REPLAYED_ROW, None, metrics_of(taken), None))
        for policy, seed in product(policies, range(seeds)):
            progress.update(bar, description=policy)
            requests = counterfactual(
                period, policy, seed, conditions, lambda n: progress.advance(bar, n)
            )
            rows.append(_row(policy, seed, metrics_of(requests), policy_regret(taken, requests)))
    _print(period, rows)
    if json is not None:
        report = {"model": period.model, "workers": period.workers, "rows": rows}
        report |= {"left_out": dict(period.left_out)}
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


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
