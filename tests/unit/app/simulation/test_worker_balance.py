"""Balance of equal workers under policy predictive: equal requests that come at once, simulated."""

from __future__ import annotations

from collections import Counter

import pytest

from kvlane.app.simulation.simulated_router import DEFAULT_CONDITIONS, NetworkConditions
from kvlane.app.simulation.simulation_runs import PreparedTrace, SimulationRun, run_requests
from kvlane.app.traces.mooncake_trace import TraceRow

LATE = NetworkConditions(dispatch_delay_ms=2.0, event_delay_ms=5.0, ledger_lag_ms=5.0)
REQUESTS = 100


def shares(
    tokens: int, workers: int, conditions: NetworkConditions, apart_ms: float = 0.0
) -> Counter[str]:
    """Requests by worker."""
    rows = [TraceRow(number * apart_ms, tokens, 50, [number]) for number in range(REQUESTS)]
    run = SimulationRun("predictive", workers, conditions=conditions)
    return Counter(each.worker for each in run_requests(PreparedTrace(rows), run))


@pytest.mark.parametrize("tokens", [1, 80])
@pytest.mark.parametrize(
    "conditions", [DEFAULT_CONDITIONS, LATE, LATE._replace(routers=3)], ids=["1", "late", "3"]
)
def test_equal_short_requests_at_once_are_spread_evenly(
    tokens: int, conditions: NetworkConditions
) -> None:
    for workers in (2, 4):
        found = shares(tokens, workers, conditions)
        even = REQUESTS / workers
        assert len(found) == workers
        assert all(0.9 * even <= count <= 1.1 * even for count in found.values()), found


@pytest.mark.parametrize("apart_ms", [1, 2, 5, 20])
@pytest.mark.parametrize("tokens", [1, 80])
def test_equal_short_requests_in_a_row_are_spread_evenly(tokens: int, apart_ms: float) -> None:
    for conditions in (DEFAULT_CONDITIONS, LATE, LATE._replace(routers=3)):
        found = shares(tokens, 4, conditions, apart_ms)
        assert min(found.values()) >= 22, found
        assert max(found.values()) <= 28, found


def test_workers_without_curves_are_spread_evenly_too() -> None:
    found = shares(80, 4, LATE._replace(publishes_curves=False))
    assert all(22 <= count <= 28 for count in found.values()), found
