"""Prefill and decode on workers of their own, simulated with the shipped code.

Round robin validates the simulation: its figures are those of the offline replay of NVIDIA Dynamo
(ai-dynamo-runtime 1.6.1) of the same trace, engine and fleet, without time for the transfer. The
thresholds of our policy with fixed roles, where all prompts are handed over, are the figures of
that replay's KV router.

With free roles each request stays whole or is handed over, whichever costs less, on as many workers
that do both. Their thresholds are the figures of whole requests: by default the means must not be
higher, and with objective throughput the slowest steps must be shorter. A generated trace with
long prompts beside short ones has transfers that take time.

Free roles are also compared on engines of each other profile. These have their curves on the cards:
without, routers hand no prompt over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvlane.app.perf_curves import PROFILES
from kvlane.app.routing.selection.handover_rules import DEFAULT_RULES
from kvlane.app.routing.selection.routing_config import TransferSpeed
from kvlane.app.simulation.simulated_router import NetworkConditions
from kvlane.app.simulation.simulation_runs import (
    PreparedTrace,
    RunMetrics,
    SimulationRun,
    result_row,
    run_timed,
)
from kvlane.app.simulation.synthetic_traces import LONG_PROMPTS, NAME_PREFIX
from kvlane.app.simulation.trace_requests import ArrivalRate
from kvlane.indexer.precompile import compile_all
from workbench.bench.bench_environment import PrintLine
from workbench.bench.report import Report, Threshold, at_most
from workbench.bench.routing.policy_scenarios import (
    CONVERSATION,
    OTHER_PROFILES,
    OWN_POLICY,
    PUBLISHED_TOLERANCE,
    REQUESTS,
    max_deviation,
    profile_of,
)
from workbench.bench.routing.policy_simulation import TraceSet, published_trace

STEADY_LIMIT = 0.8
LONG_PROMPT_RUN = SimulationRun(
    OWN_POLICY, 8, ArrivalRate(6.0), conditions=NetworkConditions(transfer=TransferSpeed())
)
"""Five requests a second and a worker: 0.3 of its time is prefill."""


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
    found: list[Threshold] = []
    if trace is not None:
        compile_all()

    runs_of_fleet = 5 + 3 * len(OTHER_PROFILES)

    def arrived(requests: int) -> None:
        progress(requests / (runs_of_fleet * len(fleets) * REQUESTS))

    def run(of: PreparedTrace | None, name: str, runs: Sequence[SimulationRun]) -> list[RunMetrics]:
        done = [] if of is None else [run_timed(of, each, arrived) for each in runs]
        rows.extend(
            {"trace": name, "profile": profile_of(each.run.curves), **result_row(*each)}
            for each in done
        )
        return [each.figures for each in done]

    for fleet in fleets:
        whole = fleet.run_of(OWN_POLICY, is_split=False)
        split = run(trace, CONVERSATION, (fleet.run_of("round_robin"), fleet.run_of(OWN_POLICY)))
        found += thresholds(fleet, *split)
        for name, runs in free_runs_by_profile(fleet.name, whole):
            found += free_thresholds(name, *run(trace, CONVERSATION, runs))
    if trace is not None:
        long = TraceSet(trace_file)[NAME_PREFIX + LONG_PROMPTS]
        for name, runs in free_runs_by_profile(LONG_PROMPTS, LONG_PROMPT_RUN):
            found += free_thresholds(name, *run(long, LONG_PROMPTS, runs))
    return Report("disagg", rows, found)


def free_runs(whole: SimulationRun) -> tuple[SimulationRun, SimulationRun]:
    """The run with free roles, by default and for steady times between tokens."""
    free = whole._replace(handover_rules=DEFAULT_RULES)
    return free, free._replace(objective="throughput")


def free_runs_by_profile(
    name: str, whole: SimulationRun
) -> Iterator[tuple[str, tuple[SimulationRun, ...]]]:
    """By a name for each profile of engines: the run of whole requests, and those of free roles."""
    yield name, (whole, *free_runs(whole))
    for profile in OTHER_PROFILES:
        other = whole._replace(curves=PROFILES[profile])
        yield f"{name}, {profile}", (other, *free_runs(other))


def free_thresholds(
    name: str,
    whole: RunMetrics | None = None,
    free: RunMetrics | None = None,
    steady: RunMetrics | None = None,
) -> Iterator[Threshold]:
    """The thresholds of free roles; without figures they count as failed."""
    for found, label, metric, limit in (
        (free, "free roles, mean TTFT", "ttft_mean", 1.0),
        (free, "free roles, mean E2E", "e2e_mean", 1.0),
        (steady, "objective throughput, mean E2E", "e2e_mean", 1.0),
        (steady, "objective throughput, p99 ITL", "itl_p99", STEADY_LIMIT),
    ):
        ratio = float("nan")
        if whole is not None and found is not None:
            ratio = getattr(found, metric) / getattr(whole, metric)
        yield at_most(f"{name}: {label} to that of whole requests", ratio, "x", limit)


def thresholds(
    fleet: SplitFleet, round_robin: RunMetrics | None = None, own: RunMetrics | None = None
) -> Iterator[Threshold]:
    """The thresholds of a fleet; without figures they count as failed."""
    nan = float("nan")
    away = nan if round_robin is None else max_deviation(round_robin, fleet.round_robin)
    yield at_most(
        f"{fleet.name}: round robin, largest deviation from the published figures",
        away * 100,
        "%",
        PUBLISHED_TOLERANCE * 100,
    )
    for name, label in (
        ("ttft_mean", "mean TTFT"),
        ("e2e_mean", "mean E2E"),
        ("itl_p99", "p99 ITL"),
    ):
        ms = nan if own is None else round(getattr(own, name), 1)  # as it is published
        most = getattr(fleet.kv_router, name)
        yield at_most(f"{fleet.name}: {label} to that of the KV router", ms / most, "x", 1.0)
