"""Tests of the orders of waiting requests on a simulated worker."""

from __future__ import annotations

from kvlane.app.routing.policy_names import QueueOrder
from kvlane.app.simulation.simulation_runs import (
    PreparedTrace,
    RunMetrics,
    SimulationRun,
    run_metrics,
)
from kvlane.app.traces.mooncake_trace import TraceRow

TARGETS_MS = (400.0, 4000.0)
PROMPTS = 40
"""All at once, each of 47 ms of prefill: more than are computed in the shorter of the targets."""


def figures(order: QueueOrder) -> RunMetrics:
    rows = [TraceRow(0.0, 2000, 5, [4 * n + k for k in range(4)]) for n in range(PROMPTS)]
    trace = PreparedTrace(rows, TARGETS_MS)
    return run_metrics(trace, SimulationRun("predictive", 1, queue_order=order))


def test_more_requests_meet_their_targets_by_deadline() -> None:
    by_length, by_deadline = figures("sjf"), figures("edf")
    assert by_length.on_time is not None
    assert by_deadline.on_time is not None
    in_time = TARGETS_MS[0] // 47 - 1
    assert by_deadline.on_time * PROMPTS >= PROMPTS / 2 + in_time
    assert by_deadline.on_time > by_length.on_time
    assert by_deadline.requests == PROMPTS, "also those that are late have an answer"


def test_requests_without_targets_have_no_share_on_time() -> None:
    rows = [TraceRow(0.0, 100, 5, [n]) for n in range(3)]
    assert run_metrics(PreparedTrace(rows), SimulationRun("predictive", 1)).on_time is None
