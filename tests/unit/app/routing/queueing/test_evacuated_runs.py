"""Tests of `kvlane.app.routing.queueing.evacuation`: the runs that leave a worker, and when."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.routing.queueing.evacuation import RETRY_MS, Evacuation
from kvlane.app.routing.queueing.worker_capacity import WorkerCapacity
from kvlane.app.routing.state.active_load import ActiveLoad, WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchRuns
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.request_state import RequestState, RunId, RunStatus
from kvlane.streams.records import Cordon, Phase, RequestOffset, Tombstone
from kvlane.streams.request import AnswerParsing, Hints, Request
from tests.harness.routing_harness import TOKENS, RoutingHarness

RUN = RunId(0, "aggregated", "w1", 0)
NOW_MS = 2000
ORIGIN = RequestOffset(topic="requests", partition=0, offset=0)


class EvacuationHarness:
    """Workers `w1`, which is evacuated, and `w2`, with room for two runs."""

    def __init__(self, routing: RoutingHarness) -> None:
        self.routing, self.unconfirmed = routing, ActiveLoad()
        routing.worker("w1")
        routing.worker("w2", max_runs=2)
        routing.registry(Cordon(worker="w1", evacuates=True))
        ledger = LedgerState(1000)
        capacity = WorkerCapacity(routing.fleet, ledger, self.unconfirmed, BatchRuns())
        self.evacuation = Evacuation(
            routing.fleet, ledger, routing.pools, capacity, self.unconfirmed
        )

    def due(self, request_id: str = "a", now_ms: int = NOW_MS, **over: Any) -> RunId | None:
        phase: Phase = over.pop("phase", "aggregated")
        run_id = RunId(0, phase, "w1", 0)
        run = RunStatus(over.pop("state", "started"), 0, WorkerRank("w1", 0), **over)
        state = RequestState(runs={run_id: run}, origin=ORIGIN)
        return self.evacuation.due(request_id, state, now_ms)

    def can_leave(self, state: RequestState | None = None, **over: Any) -> bool:
        request = Request(id="a", model="m", token_ids=TOKENS, **over)
        return self.evacuation.can_leave(request, state or RequestState(origin=ORIGIN), NOW_MS)


@pytest.fixture
def harness(routing: RoutingHarness) -> EvacuationHarness:
    return EvacuationHarness(routing)


def test_open_runs_of_an_evacuated_worker_are_due(harness: EvacuationHarness) -> None:
    assert harness.due() == harness.due(state="assigned") == RUN
    assert harness.due(state="prefilled", phase="decode") is not None
    assert harness.evacuation.workers == ["w1"]


@pytest.mark.parametrize(
    "run",
    [
        {"state": "stop"},
        {"is_preemptible": False},
        {"phase": "prefill"},
        {"phase": "decode", "state": "started"},
    ],
)
def test_other_runs_stay(harness: EvacuationHarness, run: dict[str, Any]) -> None:
    assert harness.due(**run) is None


@pytest.mark.parametrize("order", [Cordon(worker="w1"), Tombstone(key="cordon/w1")])
def test_no_run_is_due_after_another_order(
    harness: EvacuationHarness, routing: RoutingHarness, order: Any
) -> None:
    routing.registry(order)
    assert harness.due() is None


def test_runs_that_move_and_decisions_take_the_room_of_other_workers(
    harness: EvacuationHarness,
) -> None:
    moving = harness.evacuation.moving
    with moving("x", RUN) as first, moving("y", RUN) as second:
        assert first
        assert second
        assert harness.due() is None
        with moving("z", RUN) as third:
            assert not third
    assert harness.due() == RUN
    harness.unconfirmed.add(WorkerRank("w2", 1), WorkerLoad(2, 10))
    assert harness.due() is None


def test_run_is_due_again_after_a_time_or_with_another_fleet(harness: EvacuationHarness) -> None:
    harness.evacuation.stay("a", RUN, NOW_MS + RETRY_MS)
    harness.evacuation.stay("b", RUN)
    assert (harness.due("a"), harness.due("b"), harness.due("c")) == (None, None, RUN)
    assert harness.due("a", NOW_MS + RETRY_MS) == RUN
    harness.evacuation.on_fleet_changed()
    assert (harness.due("a"), harness.due("b")) == (RUN, None)
    harness.evacuation.forget("b")
    assert harness.due("b") == RUN


def test_only_requests_that_another_worker_may_take_can_leave(
    harness: EvacuationHarness, routing: RoutingHarness
) -> None:
    assert harness.can_leave()
    assert not harness.can_leave(hints=Hints(allowed_worker_ids=("w1",)))
    routing.registry(Cordon(worker="w2"))
    assert not harness.can_leave()
    assert harness.due() is None


def test_request_without_a_known_record_stays(harness: EvacuationHarness) -> None:
    run = RunStatus("started", 0, WorkerRank("w1", 0))
    assert harness.evacuation.due("a", RequestState(runs={RUN: run}), NOW_MS) is None


def test_no_request_leaves_for_a_worker_without_token_ids(
    harness: EvacuationHarness, routing: RoutingHarness
) -> None:
    routing.worker("w2", engine={"gives_tokens": False})
    assert not harness.can_leave()
    routing.worker("w3")
    assert harness.can_leave()


def test_parsed_answer_leaves_only_for_a_worker_with_its_parser(
    harness: EvacuationHarness, routing: RoutingHarness
) -> None:
    parsing = AnswerParsing(tools="hermes", version=1)
    routing.worker("w2", parser_version=2)
    assert not harness.can_leave(parsing=parsing)
    assert harness.can_leave()
    routing.worker("w3", parser_version=1)
    assert harness.can_leave(parsing=parsing)


def test_no_request_leaves_for_a_worker_that_has_failed_it(harness: EvacuationHarness) -> None:
    failed = frozenset({"w2"})
    assert not harness.can_leave(RequestState(failures=1, failed_workers=failed))
    evacuated_before = RequestState(failed_workers=failed)
    assert harness.can_leave(evacuated_before)
