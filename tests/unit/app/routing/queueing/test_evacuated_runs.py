"""Tests of `kvlane.app.routing.queueing.evacuation`: the runs that leave a worker, and when."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from kvlane.app.routing.queueing.evacuation import MOVE_MS, Evacuation
from kvlane.app.routing.queueing.herd_avoidance import HerdAvoidance
from kvlane.app.routing.queueing.worker_capacity import WorkerCapacity
from kvlane.app.routing.state.active_load import ActiveLoad, WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchRuns
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.request_state import RequestState, RunId, RunStatus
from kvlane.streams.records import Cordon, LogRecord, Phase, RequestOffset, Tombstone
from kvlane.streams.request import AnswerParsing, Hints, Request
from tests.harness.routing_harness import TOKENS, RoutingHarness, to_assigned

RUN = RunId(0, "aggregated", "w1", 0)
NOW_MS = 2000
ORIGIN = RequestOffset(topic="requests", partition=0, offset=0)


class EvacuationHarness:
    """Workers `w1`, which is evacuated, and `w2`, with room for two runs."""

    def __init__(self, routing: RoutingHarness) -> None:
        self.routing, self.unconfirmed = routing, ActiveLoad()
        routing.worker("w1", parser_version=1, versions={"vllm": "0.32.0"})
        routing.worker("w2", max_runs=2)
        routing.registry(Cordon(worker="w1", evacuates=True))
        ledger = LedgerState(1000)
        capacity = WorkerCapacity(routing.fleet, ledger, self.unconfirmed, BatchRuns())
        self.herd_avoidance = HerdAvoidance("r1")
        self.evacuation = Evacuation(
            routing.fleet, ledger, routing.pools, capacity, self.unconfirmed, self.herd_avoidance
        )

    def state(self, **over: Any) -> RequestState:
        phase: Phase = over.pop("phase", "aggregated")
        worker = over.pop("worker", "w1")
        run_id = RunId(0, phase, worker, self.routing.epochs[worker])
        place = WorkerRank(worker, run_id.epoch)
        run = RunStatus(over.pop("state", "started"), 0, place, **over)
        return RequestState(runs={run_id: run}, origin=ORIGIN)

    def due(self, request_id: str = "a", now_ms: int = NOW_MS, **over: Any) -> RunId | None:
        return self.evacuation.due(request_id, self.state(**over), now_ms)

    def moving(self, request_id: str, **over: Any) -> AbstractContextManager[bool]:
        state = self.state(**over)
        return self.evacuation.moving(request_id, next(iter(state.runs)), state, NOW_MS)

    def can_leave(
        self, request_id: str = "a", state: RequestState | None = None, **over: Any
    ) -> bool:
        request = Request(id=request_id, model="m", token_ids=TOKENS, **over)
        return self.evacuation.take_room(request, state or self.state(), NOW_MS)


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
    with harness.moving("x") as first, harness.moving("y") as second:
        assert first
        assert second
        assert harness.due() is None
        with harness.moving("z") as third:
            assert not third
    assert harness.due() == RUN
    harness.unconfirmed.add(WorkerRank("w2", 1), WorkerLoad(2, 10))
    assert harness.due() is None


def test_batch_runs_that_move_take_no_room_of_interactive_ones(harness: EvacuationHarness) -> None:
    with harness.moving("x", service_class="batch"), harness.moving("y", service_class="batch"):
        assert harness.due(service_class="batch") is None
        assert harness.due() == RUN


def test_moves_of_another_model_take_no_room(
    harness: EvacuationHarness, routing: RoutingHarness
) -> None:
    routing.worker("v1", model="x")
    routing.worker("v2", model="x", max_runs=2)
    routing.registry(Cordon(worker="v1", evacuates=True))
    with harness.moving("x", worker="v1"), harness.moving("y", worker="v1"):
        assert harness.due(worker="v1") is None
        assert harness.due() == RUN


def test_move_that_waits_for_long_takes_no_room(harness: EvacuationHarness) -> None:
    with harness.moving("x"), harness.moving("y"):
        assert harness.due(now_ms=NOW_MS + MOVE_MS - 1) is None
        assert harness.due(now_ms=NOW_MS + MOVE_MS) == RUN
        assert harness.due() == RUN


def test_as_many_requests_leave_as_workers_that_may_take_them_have_room_for(
    harness: EvacuationHarness, routing: RoutingHarness
) -> None:
    routing.worker("w3", max_runs=1)
    only_w3 = Hints(allowed_worker_ids=("w3",))
    with harness.moving("x"), harness.moving("y"), harness.moving("z"):
        assert harness.can_leave("x", hints=only_w3)
        assert not harness.can_leave("y", hints=only_w3)
        assert harness.can_leave("y")
        assert harness.can_leave("z", hints=Hints(allowed_worker_ids=("w2",)))


def test_waiting_places_of_a_worker_are_no_room(
    harness: EvacuationHarness, routing: RoutingHarness
) -> None:
    routing.worker("w2", max_runs=10, engine={"max_num_seqs": 1})
    with harness.moving("x"):
        assert harness.due() is None


def test_routers_share_the_room_of_other_workers(
    harness: EvacuationHarness, routing: RoutingHarness
) -> None:
    decision = to_assigned(routing.chosen(), router="another")
    harness.herd_avoidance.on_record(LogRecord(0, NOW_MS, decision))
    with harness.moving("x") as first:
        assert first
        assert harness.due() is None


def test_pause_of_a_run_that_stays_doubles_and_outlasts_changes_of_the_fleet(
    harness: EvacuationHarness,
) -> None:
    now_ms = NOW_MS
    for pause_s in (5, 10, 20, 40, 60, 60):
        harness.evacuation.stay_for_now("a", RUN, now_ms)
        harness.evacuation.on_fleet_changed()
        assert harness.due("a", now_ms + 1000 * pause_s - 1) is None
        now_ms += 1000 * pause_s
        assert harness.due("a", now_ms) == RUN
    harness.evacuation.forget("a")
    harness.evacuation.stay_for_now("a", RUN, now_ms)
    assert harness.due("a", now_ms + 5000) == RUN


def test_run_stays_to_its_end_or_that_of_the_order(
    harness: EvacuationHarness, routing: RoutingHarness
) -> None:
    harness.evacuation.stay("a", RUN)
    assert harness.due("a", 10**9) is None
    for order in (Cordon(worker="w1"), Cordon(worker="w1", evacuates=True)):
        routing.registry(order)
        harness.evacuation.on_fleet_changed()
    assert harness.due("a") == RUN


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
    routing.worker("w3", parser_version=1, versions={"vllm": "0.32.1"})
    assert harness.can_leave(parsing=parsing)
    parsing = AnswerParsing(tools="glm45", version=1)
    assert not harness.can_leave(parsing=parsing), "another release of vLLM may read it otherwise"
    routing.worker("w4", parser_version=1, versions={"vllm": "0.32.0"})
    assert harness.can_leave(parsing=parsing)


def test_no_request_leaves_for_a_worker_that_has_failed_it(harness: EvacuationHarness) -> None:
    failed = frozenset({"w2"})
    assert not harness.can_leave(state=RequestState(failures=1, failed_workers=failed))
    evacuated_before = RequestState(failed_workers=failed)
    assert harness.can_leave(state=evacuated_before)
