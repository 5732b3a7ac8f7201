"""Prefill and decode on workers of their own, simulated with the shipped code.

Round robin validates the simulation: its figures are those of the offline replay of NVIDIA Dynamo
(ai-dynamo-runtime 1.6.1) of the same trace, engine and fleet, without time for the transfer. The
thresholds of our policy are the figures of that replay's KV router. A row of whole requests on as
many workers stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from app.bench.bench_environment import PrintLine
from app.bench.report import Report, Threshold, at_most
from app.bench.routing.policy_scenarios import (
    OWN_POLICY,
    PUBLISHED_TOLERANCE,
    REQUESTS,
    max_deviation,
)
from app.bench.routing.policy_simulation import TraceSet, published_trace, run_timed
from app.simulation.run_metrics import RunMetrics
from app.simulation.simulation_runs import SimulationRun, result_row
from app.simulation.trace_requests import ArrivalRate
from indexer.precompile import compile_all


class KvRouterFigures(NamedTuple):
    """Published figures of the KV router, in ms."""

    ttft_mean: float
    e2e_mean: float
    itl_p99: float


class SplitFleet(NamedTuple):
    """A fleet, the speed of the trace, and the published figures."""

    prefill_workers: int
    decode_workers: int
    speed: float
    round_robin: RunMetrics
    kv_router: KvRouterFigures

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.prefill_workers}+{self.decode_workers} x{self.speed:g}"

    def run_of(self, policy: str, *, is_split: bool = True) -> SimulationRun:
        """The run of a policy, with roles or on as many workers without."""
        workers = self.prefill_workers + self.decode_workers
        prefill_workers = self.prefill_workers if is_split else 0
        return SimulationRun(
            policy, workers, ArrivalRate(self.speed), prefill_workers=prefill_workers
        )


FLEETS = (
    SplitFleet(
        4, 4, 1.0,
        RunMetrics(REQUESTS, 0.084, 499.0, 349.0, 2456.0, 7.78, 3155.0, 10399.0, 14.2),
        KvRouterFigures(385.0, 2981.0, 11.6),
    ),
    SplitFleet(
        6, 2, 1.0,
        RunMetrics(REQUESTS, 0.081, 386.0, 249.0, 2154.0, 10.37, 3927.0, 13413.0, 19.7),
        KvRouterFigures(289.0, 3782.0, 17.4),
    ),
    SplitFleet(
        5, 3, 4.0,
        RunMetrics(REQUESTS, 0.086, 750.0, 473.0, 3418.0, 26.21, 9703.0, 31438.0, 33.3),
        KvRouterFigures(436.0, 9537.0, 31.4),
    ),
    SplitFleet(
        8, 8, 8.0,
        RunMetrics(REQUESTS, 0.083, 1065.0, 700.0, 4775.0, 18.41, 7355.0, 23014.0, 28.9),
        KvRouterFigures(368.0, 6583.0, 22.0),
    ),
)  # fmt: skip
QUICK = FLEETS[:2]


async def bench_disagg(
    fleets: tuple[SplitFleet, ...],
    trace_file: Path | None,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Simulate all fleets. Raises InvalidTrace."""
    trace = published_trace(TraceSet(trace_file), print_line)
    rows: list[dict[str, object]] = []
    bars: list[Threshold] = []
    if trace is not None:
        compile_all()

    def arrived(requests: int) -> None:
        progress(requests / (3 * len(fleets) * REQUESTS))

    for fleet in fleets:
        runs = (
            fleet.run_of("round_robin"),
            fleet.run_of(OWN_POLICY),
            fleet.run_of(OWN_POLICY, is_split=False),
        )
        done = [] if trace is None else [run_timed(trace, run, arrived) for run in runs]
        rows += [result_row(*each) for each in done]
        bars += thresholds(fleet, *[each.figures for each in done[:2]])
    return Report("disagg", rows, bars)


def thresholds(
    fleet: SplitFleet, round_robin: RunMetrics | None = None, own: RunMetrics | None = None
) -> Iterator[Threshold]:
    """The bars of a fleet; without figures they count as failed."""
    nan = float("nan")
    away = nan if round_robin is None else max_deviation(round_robin, fleet.round_robin)
    yield at_most(
        f"{fleet.name}: round robin, largest deviation from the published figures",
        away * 100, "%", PUBLISHED_TOLERANCE * 100,
    )  # fmt: skip
    for name, label in (
        ("ttft_mean", "mean TTFT"), ("e2e_mean", "mean E2E"), ("itl_p99", "p99 ITL"),
    ):  # fmt: skip
        ms = nan if own is None else round(getattr(own, name), 1)  # as it is published
        most = getattr(fleet.kv_router, name)
        yield at_most(f"{fleet.name}: {label} to that of the KV router", ms / most, "x", 1.0)
