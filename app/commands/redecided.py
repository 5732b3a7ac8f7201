"""What `kvlane simulate --from-ledger` shows: a period as it went, and under other policies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from app.commands import capture, screen
from app.simulation.conditions import Conditions
from app.simulation.figures import Figures, figures
from app.simulation.redecided import (
    Period,
    Reading,
    Regret,
    as_decided,
    as_it_happened,
    redecided,
    regret,
)
from indexer.warm import compile_all

HAPPENED, TAKEN = "as it happened", "decisions taken"
EXPLANATION = (
    f'"{HAPPENED}" is what the log says; all else is simulated, with caches that are empty at '
    f'first. How far "{TAKEN}" is from it is how far the simulation is from your engines. Regret: '
    "how much later first and last tokens come by the decisions taken than under a policy, both "
    "simulated, on average over the period; above 0, that policy would have been better. It is "
    "statistical: each decision changes what later requests find, so it speaks of no single "
    "request. After ±: two standard errors, as if requests were independent."
)


def show(
    source: str, policies: Sequence[str], seeds: int, conditions: Conditions, json: Path | None
) -> None:
    """Print the table of a file or a period. Raises BadTrace, and as `capture.read`."""
    reading = Reading()
    capture.read(source, reading.take)
    period = reading.period()
    compile_all()
    console, count = screen.console(), len(period.requests)
    rows: list[dict[str, Any]] = [_row(HAPPENED, None, as_it_happened(period), None)]
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    ) as progress:  # fmt: skip
        bar = progress.add_task(TAKEN, total=(1 + len(policies) * seeds) * count)
        taken = as_decided(period, conditions, lambda n: progress.advance(bar, n))
        rows.append(_row(TAKEN, None, figures(taken), None))
        for policy, seed in product(policies, range(seeds)):
            progress.update(bar, description=policy)
            lives = redecided(period, policy, seed, conditions, lambda n: progress.advance(bar, n))
            rows.append(_row(policy, seed, figures(lives), regret(taken, lives)))
    _print(period, rows)
    if json is not None:
        told = {"model": period.model, "workers": period.workers, "rows": rows}
        told |= {"left_out": dict(period.left_out)}
        json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")


def _row(policy: str, seed: int | None, found: Figures, lost: Regret | None) -> dict[str, Any]:
    return {
        "policy": policy,
        "seed": seed,
        "figures": found._asdict(),
        "regret": None if lost is None else lost._asdict(),
    }


def _print(period: Period, rows: Sequence[dict[str, Any]]) -> None:
    console, shape = screen.console(), period.shape
    console.print(
        f"{len(period.requests)} requests for {period.model or 'any model'}, {period.workers} "
        f"workers of {shape.blocks} blocks of {shape.block_size} tokens"
    )
    columns = ("reuse", "TTFT mean", "p50", "p99", "ITL mean", "E2E mean", "p99 ")
    table = screen.table("", *columns, "regret TTFT ms", "regret E2E ms")
    for column in table.columns[1:]:
        column.justify = "right"
    several = any(row["seed"] for row in rows)
    for row in rows:
        seed = f", seed {row['seed']}" if several and row["seed"] is not None else ""
        found, lost = Figures(**row["figures"]), row["regret"]
        times = found[2:]
        regrets = ("", "") if lost is None else (
            f"{lost['ttft_ms']:+.1f} ± {lost['ttft_error']:.1f}",
            f"{lost['e2e_ms']:+.1f} ± {lost['e2e_error']:.1f}",
        )  # fmt: skip
        table.add_row(
            row["policy"] + seed, f"{found.reuse:.1%}", *(f"{ms:.1f}" for ms in times), *regrets
        )
    console.print(table)
    for why, count in period.left_out.items():
        console.print(f"left out: {count} requests {why}", style="yellow")
    if period.fleets > 1:
        console.print(
            f"the workers are of {period.fleets} kinds; all are played as the commonest",
            style="yellow",
        )
    console.print(EXPLANATION, style="dim")
