"""Several simulated routers with ledger lag, and one router, on a production trace.

As in `policy_simulation.py`: 16 workers, the trace at 8x speed, a lag of 5 ms. Single arrivals, and
bursts as recorded; in bursts also with routers that read only their own decisions, because equal
views may be worse than none: all routers then choose the same worker.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvlane.app.simulation.simulated_router import NetworkConditions
from kvlane.app.simulation.simulation_runs import (
    PreparedTrace,
    RunMetrics,
    SimulationRun,
    metrics_of,
    run_requests,
)
from kvlane.app.simulation.trace_requests import ArrivalRate, SimulatedRequest
from kvlane.app.traces.mooncake_trace import read_trace
from kvlane.indexer.precompile import compile_all
from workbench.bench.bench_environment import PrintLine
from workbench.bench.report import Report, Threshold, at_most
from workbench.bench.routing.policy_scenarios import ARRIVAL_JITTER_S, OWN_POLICY
from workbench.bench.routing.policy_simulation import TRACE_MISSING

WORKERS, SPEED, LAG_MS = 16, 8.0, 5.0
MAX_ROUTERS = 8
TTFT_LIMIT, LOST_REUSE_LIMIT = 1.05, 0.01


class RouterDeployment(NamedTuple):
    """A number of routers, with or without each other's decisions."""

    routers: int
    jitter_s: float = ARRIVAL_JITTER_S
    shares_ledger: bool = True

    @property
    def simulation_run(self) -> SimulationRun:
        conditions = NetworkConditions(
            routers=self.routers, ledger_lag_ms=LAG_MS, shares_ledger=self.shares_ledger
        )
        return SimulationRun(
            OWN_POLICY, WORKERS, ArrivalRate(SPEED, self.jitter_s), conditions=conditions
        )


QUICK = (
    RouterDeployment(1),
    RouterDeployment(MAX_ROUTERS),
    RouterDeployment(MAX_ROUTERS, 0.0),
    RouterDeployment(MAX_ROUTERS, 0.0, False),
)
ROUTER_COUNTS = (1, 2, 4, MAX_ROUTERS)
FULL = (
    *(RouterDeployment(n) for n in ROUTER_COUNTS),
    *(RouterDeployment(n, 0.0) for n in ROUTER_COUNTS),
    *(RouterDeployment(n, 0.0, False) for n in ROUTER_COUNTS[1:]),
)


class RouterResult(NamedTuple):
    """Results of a deployment. `collision_share`: the share of decisions with a concurrent one."""

    figures: RunMetrics
    collision_share: float


async def bench_simulated_routers(
    deployments: Sequence[RouterDeployment],
    trace_file: Path | None,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Simulate all deployments in turn; a coroutine like the other benchmarks."""
    if trace_file is None:
        print_line(TRACE_MISSING)
        return Report("routers", [], router_thresholds({}))
    compile_all()
    trace = PreparedTrace(read_trace(trace_file))
    found: dict[RouterDeployment, RouterResult] = {}
    for each in deployments:
        requests = run_requests(trace, each.simulation_run)
        found[each] = RouterResult(metrics_of(requests), collision_share(requests, LAG_MS))
        progress(1 / len(deployments))
    return Report("routers", [_row(*each) for each in found.items()], router_thresholds(found))


def collision_share(requests: Sequence[SimulatedRequest], lag_ms: float) -> float:
    """The share of decisions within the lag of another router's decision for the same worker."""
    sent: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for simulated in requests:
        sent[simulated.worker].append((simulated.sent_ms, simulated.router))
    met = 0
    for decisions in sent.values():
        decisions.sort()
        for at_ms, router in decisions:
            first = bisect_left(decisions, (at_ms - lag_ms, -1))
            last = bisect_left(decisions, (at_ms + lag_ms, -1))
            met += any(other != router for _, other in decisions[first:last])
    return met / len(requests)


def router_thresholds(results: dict[RouterDeployment, RouterResult]) -> list[Threshold]:
    """Thresholds; nan where their runs are missing."""

    def figure(of: RouterDeployment, name: str) -> float:
        return getattr(results[of].figures, name) if of in results else math.nan

    one, many = RouterDeployment(1), RouterDeployment(MAX_ROUTERS)
    ttft = figure(many, "ttft_mean") / figure(one, "ttft_mean")
    lost = figure(one, "reuse") - figure(many, "reuse")
    bursts = figure(RouterDeployment(MAX_ROUTERS, 0.0), "ttft_mean")
    apart = figure(RouterDeployment(MAX_ROUTERS, 0.0, False), "ttft_mean")
    return [
        at_most(f"1 -> {MAX_ROUTERS} routers: mean TTFT", ttft, "x", TTFT_LIMIT),
        Threshold(f"1 -> {MAX_ROUTERS} routers: reuse lost", lost * 100, "points", "<= 1",
            lost <= LOST_REUSE_LIMIT),
        Threshold(f"{MAX_ROUTERS} routers in bursts: mean TTFT, "
            "against routers without a shared ledger",
            bursts / apart, "x", "<= 1", bursts <= apart),
    ]  # fmt: skip


def _row(of: RouterDeployment, found: RouterResult) -> dict[str, object]:
    known = found.figures
    return {
        "routers": of.routers,
        "arrivals": "one by one" if of.jitter_s else "in bursts",
        "know of": "all" if of.shares_ledger else "their own",
        "lag_ms": LAG_MS,
        "requests": known.requests,
        "reuse": known.reuse,
        "ttft_ms": {"mean": known.ttft_mean, "p50": known.ttft_p50, "p99": known.ttft_p99},
        "e2e_ms": {"mean": known.e2e_mean},
        "collisions %": found.collision_share * 100,
    }
