"""Balance of equal workers under policy predictive, simulated: equal requests that come at once,
and engines whose steps vary."""

from __future__ import annotations

from collections import Counter

import pytest

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.simulation.simulated_router import DEFAULT_CONDITIONS, NetworkConditions
from kvlane.app.simulation.simulated_worker import SimulatedWorker
from kvlane.app.simulation.simulation_runs import PreparedTrace, SimulationRun, run_requests
from kvlane.app.simulation.synthetic_traces import (
    SHORT_BURSTS,
    SHORT_PROMPTS,
    TraceSize,
    generate_trace,
)
from kvlane.app.simulation.trace_requests import SimulatedRequest
from kvlane.app.traces.mooncake_trace import TraceRow
from tests.harness.noisy_engines import Lengthen, noise, vary_steps

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


@pytest.mark.parametrize("apart_ms", [1, 2, 5, 20, 1000])
@pytest.mark.parametrize("tokens", [1, 80])
def test_equal_short_requests_in_a_row_are_spread_evenly(tokens: int, apart_ms: float) -> None:
    for conditions in (DEFAULT_CONDITIONS, LATE, LATE._replace(routers=3)):
        found = shares(tokens, 4, conditions, apart_ms)
        assert min(found.values()) >= 23, found
        assert max(found.values()) <= 27, found


def test_workers_without_curves_are_spread_evenly_too() -> None:
    found = shares(80, 4, LATE._replace(publishes_curves=False))
    assert all(22 <= count <= 28 for count in found.values()), found


TINY = PerfCurves((0.0, 0.01, 8.0), (0.0, 0.0, 2.5), 0.5)
"""About the steps of vLLM with a model of two layers on a processor."""


def run_varied(
    monkeypatch: pytest.MonkeyPatch, lengthen: Lengthen, kind: str, rate: float,
    policy: str = "predictive", requests: int = 400,
) -> list[SimulatedRequest]:  # fmt: skip
    """Requests at three workers that publish no curve."""
    with monkeypatch.context() as during:
        vary_steps(during, lengthen)
        run = SimulationRun(
            policy, 3, conditions=LATE._replace(publishes_curves=False), curves=TINY,
            cache_blocks=256,
        )  # fmt: skip
        rows = generate_trace(kind, TraceSize(requests, rate))
        return run_requests(PreparedTrace(rows), run)


def busiest(found: list[SimulatedRequest]) -> float:
    """Requests at the worker with the most, as a multiple of an equal share."""
    return max(Counter(each.worker for each in found).values()) * 3 / len(found)


def mean_ttft_ms(found: list[SimulatedRequest]) -> float:
    return sum(each.first_token_ms - each.arrived_ms for each in found) / len(found)


@pytest.mark.parametrize(
    ("kind", "rate"), [(SHORT_PROMPTS, 4.0), (SHORT_PROMPTS, 12.0), (SHORT_BURSTS, 12.0)]
)
def test_noise_of_steps_gives_no_worker_more_requests(
    monkeypatch: pytest.MonkeyPatch, kind: str, rate: float
) -> None:
    found = run_varied(monkeypatch, noise(), kind, rate)
    assert busiest(found) <= 1.1
    others = run_varied(monkeypatch, noise(), kind, rate, "least_loaded")
    assert mean_ttft_ms(found) <= 1.1 * mean_ttft_ms(others)


@pytest.mark.parametrize("step", [0, 40])
def test_one_long_step_does_not_keep_requests_away(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The first one of an engine, which compiles, or a later one."""

    def one_long(worker: SimulatedWorker, number: int, _: object) -> float:
        return 250.0 if worker.epoch == 1 and number == step else 1.0

    found = run_varied(monkeypatch, one_long, SHORT_PROMPTS, 4.0)
    later = Counter(each.worker for each in found[40:])
    assert all(0.9 * 120 <= count <= 1.1 * 120 for count in later.values()), later


def test_no_prompt_waits_in_the_router_while_a_worker_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = run_varied(monkeypatch, noise(), SHORT_PROMPTS, 12.0)
    for number, each in enumerate(found):
        busy = {
            before.worker
            for before in found[:number]
            if before.last_token_ms + 10 > each.arrived_ms
        }
        if len(busy) < 3:
            assert each.sent_ms == each.arrived_ms
