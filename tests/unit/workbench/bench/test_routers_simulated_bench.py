"""Tests of the bench of several routers: its counts, and its thresholds."""

from __future__ import annotations

import asyncio
import math

import pytest

from kvlane.app.simulation.simulation_runs import RunMetrics
from kvlane.app.simulation.trace_requests import SimulatedRequest, trace_requests
from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, TraceRow
from workbench.bench.routing.routers_simulated import (
    MAX_ROUTERS,
    QUICK,
    RouterDeployment,
    RouterResult,
    bench_simulated_routers,
    collision_share,
    router_thresholds,
)

REQUEST = trace_requests([TraceRow(0, 100, 1, [0])])[0]


def sent(at_ms: float, router: int, worker: str = "w") -> SimulatedRequest:
    return SimulatedRequest(REQUEST, 0.0, router, worker, at_ms)


@pytest.mark.parametrize(
    ("requests", "share"),
    [
        ([sent(0, 0), sent(4, 1)], 1.0),
        ([sent(0, 0), sent(6, 1)], 0.0),
        ([sent(0, 0), sent(4, 0)], 0.0),
        ([sent(0, 0), sent(4, 1, "other")], 0.0),
        ([sent(0, 0), sent(4, 1), sent(50, 0), sent(99, 1)], 0.5),
    ],
)
def test_mutually_unread_decisions_collide(requests: list[SimulatedRequest], share: float) -> None:
    assert collision_share(requests, 5.0) == share


def found(ttft_ms: float, reuse: float = 0.3) -> RouterResult:
    return RouterResult(RunMetrics(1, reuse, ttft_ms, 1.0, 1.0, 1.0, 1.0, 1.0), 0.0)


def test_bars_are_met_at_their_exact_limits() -> None:
    ran = {
        RouterDeployment(1): found(100.0, 0.31),
        RouterDeployment(MAX_ROUTERS): found(105.0, 0.301),
        RouterDeployment(MAX_ROUTERS, 0.0): found(300.0),
        RouterDeployment(MAX_ROUTERS, 0.0, False): found(300.0),
    }
    assert all(each.passed for each in router_thresholds(ran))
    worse = {
        RouterDeployment(1): found(100.0, 0.31),
        RouterDeployment(MAX_ROUTERS): found(106.0, 0.29),
        RouterDeployment(MAX_ROUTERS, 0.0): found(301.0),
        RouterDeployment(MAX_ROUTERS, 0.0, False): found(300.0),
    }
    assert not any(each.passed for each in router_thresholds(worse))


def test_without_a_trace_no_bar_is_met() -> None:
    output: list[str] = []
    report = asyncio.run(bench_simulated_routers(QUICK, None, output.append, lambda _: None))
    assert output
    assert not any(each.passed for each in report.thresholds)
    assert all(math.isnan(each.value) for each in report.thresholds)


def test_row_is_of_every_deployment() -> None:
    report = asyncio.run(
        bench_simulated_routers(QUICK, BUNDLED_TRACE, lambda _: None, lambda _: None)
    )
    assert [(row["routers"], row["know of"]) for row in report.rows] == [
        (1, "all"), (8, "all"), (8, "all"), (8, "their own"),
    ]  # fmt: skip
