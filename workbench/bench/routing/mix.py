"""Interactive requests beside endless batch work, simulated with the shipped code.

Rows, for each profile of engines: the trace alone; with batch work of a class of its own, as
shipped; the same without preemption; and batch work without classes, as one more client with 16
requests a worker. Engines other than the published one have no curves on their cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvlane.app.perf_curves import PROFILES
from kvlane.app.simulation.batch_work import MODES
from kvlane.app.simulation.mixed_runs import (
    Mix,
    MixedMetrics,
    MixedRun,
    mixed_row,
    recomputed_share,
)
from kvlane.app.simulation.synthetic_traces import TraceSize, generate_trace
from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, read_trace
from kvlane.indexer.precompile import compile_all
from workbench.bench.bench_environment import PrintLine
from workbench.bench.report import Report, Threshold, at_least, at_most

MAX_TTFT, MAX_ITL, MIN_IDLE_SHARE, MAX_RECOMPUTED = 1.05, 1.10, 0.85, 0.05


class MixScale(NamedTuple):
    """Amount of work: leading requests of the trace, and batch requests that differ."""

    requests: int
    batch_requests: int
    workers: int = 8


QUICK = MixScale(150, 5_000)
FULL = MixScale(12_031, 50_000)


async def bench_mix(
    scale: MixScale, trace: Path | None, print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """Simulate all rows. Raises InvalidTrace."""
    compile_all()
    rows = read_trace(trace or BUNDLED_TRACE)[: scale.requests]
    print_line(f"{len(rows)} requests for {scale.workers} workers, beside endless batch work")
    batch = generate_trace("offline", TraceSize(scale.batch_requests))
    all_arrivals = len(rows) * (1 + len(MODES)) * len(PROFILES)
    table: list[dict[str, object]] = []
    checked: list[Threshold] = []
    for profile, curves in PROFILES.items():
        run = MixedRun(scale.workers, curves=curves, publishes_curves=profile == "published")
        found = Mix(rows, batch, run).compare(
            MODES, lambda arrivals: progress(arrivals / all_arrivals)
        )
        table += [{"profile": profile, **mixed_row(each)} for each in found]
        checked += thresholds(profile, found)
    return Report("mix", table, checked)


def thresholds(profile: str, found: list[MixedMetrics]) -> Iterator[Threshold]:
    """The bars of a profile: of the row with classes, against that without batch work."""
    alone, mixed = found[0].requests, found[1].requests
    batch = found[1].batch
    assert batch is not None
    pairs = (
        ("mean TTFT", mixed.ttft_mean / alone.ttft_mean, MAX_TTFT),
        ("p99 TTFT", mixed.ttft_p99 / alone.ttft_p99, MAX_TTFT),
        ("ITL", mixed.itl_mean / alone.itl_mean, MAX_ITL),
    )
    for name, ratio, most in pairs:
        yield at_most(f"{profile}: {name} with batch work to that without", ratio, "x", most)
    share = batch.output_tokens / found[1].idle_tokens
    yield at_least(f"{profile}: batch tokens to those of idle capacity", share, "x", MIN_IDLE_SHARE)
    yield at_most(
        f"{profile}: tokens computed again", recomputed_share(batch), "of all", MAX_RECOMPUTED
    )
