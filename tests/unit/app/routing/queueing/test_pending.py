"""Tests of the order of waiting requests: planned by arrival, sent the shortest first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.policy_names import QueueOrder
from kvlane.app.routing.queueing.fair_share import (
    DEFAULT_CLASS,
    ClassConfig,
    FairQueue,
    QueueKey,
    ShareCost,
)
from kvlane.app.routing.queueing.joint_planning import PlanningContext, plan_together
from kvlane.app.routing.queueing.pending import MAX_WAKEUPS, PendingRequest, ReservedRequests
from kvlane.app.routing.selection.decision import (
    Decision,
    Forecast,
    Placement,
    Rejection,
    Reservation,
    RoutingState,
    Wait,
)
from kvlane.app.routing.selection.eligibility import CandidatePools
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.state.active_load import ActiveLoad
from kvlane.app.routing.state.fleet import Fleet, WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.streams.records import CandidateRows
from kvlane.streams.request import Hints, Request, RouterParams
from tests.harness.routing_harness import SECRET, reserved

W1, W2 = WorkerRank("w1", 1), WorkerRank("w2", 2)

REFUSED = Rejection("none_eligible", "")
FLEET = Fleet()
NO_WORKERS = PlanningContext(
    RoutingState(
        FLEET,
        CandidatePools(FLEET, SilentWorkers(FLEET, 5.0)),
        KvIndexView(SECRET),
        ActiveLoad(),
        ActiveLoad(),
        0,
    ),
    RoutingConfig(),
)
"""Every request is planned alone."""


def planned(place: WorkerRank, prefill_ms: float) -> Reservation:
    return Reservation(place, prefill_ms, hold_until_ms=10_000)


def going(to: Reservation) -> Placement:
    return Placement(
        to.worker_rank, 1, 0, 1, 16, "predictive", {}, 0, CandidateRows(), forecast=Forecast(to)
    )


def wanted(key: str, number: int = 0) -> PendingRequest[str]:
    return PendingRequest(key, number, PromptHashes(Request(id=key)), seed=0, since_ms=0)


def test_shortest_goes_first() -> None:
    held = ReservedRequests[str]()
    for number, (name, prefill_ms) in enumerate([("a", 90.0), ("b", 30.0), ("c", 30.0)]):
        held.add(name, number, 1000, planned(W1, prefill_ms))
    held.add("d", 3, 1000, planned(W2, 1.0))
    assert held.in_dispatch_order([W1]) == ["b", "c", "a"]
    assert held.in_dispatch_order() == ["d", "b", "c", "a"]
    assert (held.next_for(W1), held.next_for(W2), held.next_for(WorkerRank("w3", 3))) == (
        "b",
        "d",
        None,
    )


def test_long_waiting_request_is_no_longer_overtaken() -> None:
    held = ReservedRequests[str]()
    held.add("old", 0, 0, planned(W1, 90.0))
    held.add("new", 1, 800, planned(W1, 45.0))
    assert held.next_for(W1) == "new"
    held.add("newer", 2, 1400, planned(W1, 45.0))
    held.remove("new")
    assert held.next_for(W1) == "old"


@pytest.mark.parametrize(
    ("order", "went"),
    [
        ("sjf", ["strict", "short", "jumped", "first", "long"]),
        ("fcfs", ["strict", "jumped", "first", "long", "short"]),
        ("wspt", ["strict", "jumped", "short", "first", "long"]),
    ],
)
def test_order_of_the_queue_is_a_setting_and_strict_priority_comes_first(
    order: QueueOrder, went: list[str]
) -> None:
    held = ReservedRequests[str](order)
    coming = {
        "first": (60.0, Hints()),
        "long": (90.0, Hints()),
        "jumped": (70.0, Hints(priority_jump=0.8)),
        "short": (20.0, Hints()),
        "strict": (500.0, Hints(strict_priority=2)),
    }
    for number, (key, (prefill_ms, hints)) in enumerate(coming.items()):
        prompt = PromptHashes(Request(id=key, hints=hints))
        held.reserve(PendingRequest(key, number, prompt, 0, 100 * number), planned(W1, prefill_ms))
    assert held.in_dispatch_order() == went


QUEUE = QueueKey("m")


def with_target(
    key: str, number: int, since_ms: int, target_ms: float | None, queue: QueueKey = QUEUE
) -> PendingRequest[str]:
    wishes = None if target_ms is None else RouterParams(ttft_target=target_ms)
    prompt = PromptHashes(Request(id=key, router=wishes))
    return PendingRequest(key, number, prompt, 0, since_ms, queue_key=queue)


def test_earliest_deadline_goes_first_of_all_classes() -> None:
    classes = FairQueue({"chat": ClassConfig(weight=0.1, ttft_target_ms=300.0)})
    held = ReservedRequests[str]("edf", classes)
    coming = [
        with_target("none", 0, 0, None),
        with_target("own", 1, 100, 500.0),
        with_target("class", 2, 200, None, QueueKey("m", "chat")),
        with_target("both", 3, 300, 250.0, QueueKey("m", "chat")),
    ]
    assert held.dispatch_order(coming) == ["class", "both", "own", "none"]
    for each in coming:
        held.reserve(each, planned(W1, 20.0))
    assert held.in_dispatch_order() == ["class", "both", "own", "none"]
    assert held.next_for(W1) == "class"


def test_request_that_cannot_meet_its_target_goes_behind_those_that_can() -> None:
    held = ReservedRequests[str]("edf")
    for number, (key, target_ms) in enumerate((("a", 100.0), ("b", 150.0), ("c", 400.0))):
        held.reserve(with_target(key, number, 0, target_ms), planned(W1, 90.0))
    assert held.pass_time(10) == []
    assert held.in_dispatch_order() == ["a", "b", "c"]
    assert held.pass_time(11) == ["b"], "it is first now"
    assert held.pass_time(61) == ["c"]
    assert held.in_dispatch_order() == ["c", "a", "b"]
    held.reserve(with_target("d", 4, 60, 95.0), planned(W1, 90.0))
    assert held.pass_time(66) == ["c"]
    held.reserve(with_target("a", 0, 0, 100.0), planned(W1, 30.0))
    assert held.in_dispatch_order() == ["a", "c", "b", "d"], "30 ms of prefill are in time again"
    assert held.pass_time(10_000) == ["c", "a"]
    assert held.in_dispatch_order() == ["a", "b", "d", "c"], "by deadline among themselves"


def test_times_of_requests_that_have_gone_are_forgotten() -> None:
    held = ReservedRequests[str]("edf")
    for number in range(1000):
        held.reserve(with_target("a", 0, 0, 1e9), planned(W1, float(number)))
    assert len(held._latest_starts) < 200
    assert held.in_dispatch_order() == ["a"]


def test_least_served_class_goes_first() -> None:
    classes = FairQueue({"batch": ClassConfig(weight=0.5)})
    held, claims = ReservedRequests[str]("fcfs", classes), dict[str, ShareCost]()
    for number, name in enumerate(["b1", "b2", "b3", "o1", "o2", "o3", "o4"]):
        claims[name] = ShareCost(QueueKey("m", "batch" if name[0] == "b" else DEFAULT_CLASS), 100)
        held.add(name, number, number, planned(W1, 10.0), cost=claims[name])
        classes.add_waiting(claims[name].queue, 0)
    expected = ["b1", "o1", "o2", "b2", "o3", "o4", "b3"]
    assert held.in_dispatch_order() == expected
    went = []
    while len(held):
        went.append(name := held.next_for(W1))
        assert name is not None
        classes.charge(claims[name])
        held.remove(name)
    assert went == expected


def test_request_gets_the_reservations_of_all_others() -> None:
    held = ReservedRequests[str]()
    held.add("a", 0, 0, planned(W1, 10.0))
    held.add("b", 1, 0, planned(W2, 20.0))
    held.add("c", 2, 0, planned(W1, 30.0))
    held.add("b", 1, 0, planned(W2, 20.0))
    assert reserved(held.reservations_of_others("a")) == [(W2, 20.0), (W1, 30.0)]
    assert reserved(held.reservations_of_others("b")) == [(W1, 10.0), (W1, 30.0)], "by arrival"
    everything = [(W1, 10.0), (W2, 20.0), (W1, 30.0)]
    assert reserved(held.reservations_of_others("new")) == everything


def test_new_plan_replaces_the_old_one() -> None:
    held = ReservedRequests[str]()
    held.add("a", 0, 0, planned(W1, 10.0))
    held.add("a", 0, 0, planned(W2, 5.0))
    assert reserved(held.reservations_of_others("b")) == [(W2, 5.0)]
    assert held.reserved_rank("a") == W2
    held.remove("a")
    held.remove("a")
    assert (len(held), held.in_dispatch_order(), held.next_for(W2)) == (0, [], None)
    assert held.reserved_rank("a") is None


def test_request_with_a_changed_position_is_woken() -> None:
    held = ReservedRequests[str]()
    a, b, c = (wanted(key, number) for number, key in enumerate("abc"))
    assert held.reserve(a, planned(W1, 50.0)) == []
    assert held.reserve(b, planned(W1, 60.0)) == [], "behind, so nothing changes for a"
    assert held.reserve(c, planned(W1, 40.0)) == ["a"], "no longer first"
    assert held.reserve(c, planned(W1, 45.0)) == []
    assert held.reserve(c, planned(W2, 45.0)) == ["a"], "first again"
    assert held.reserve(a, None) == ["b"]
    assert list(held.reserve(wanted("unknown", 3), None)) == []
    assert held.reserve(b, None) == []


def test_simultaneous_requests_are_planned_by_arrival_and_dispatched_shortest_first() -> None:
    held, seen = ReservedRequests[str](), dict[str, list[float]]()
    lengths = {"long": 90.0, "short": 10.0, "middle": 40.0}

    def alone(each: PendingRequest[str]) -> Decision:
        seen[each.key] = [ms for _, ms in reserved(held.reservations_of_others(each.key))]
        return going(planned(W1, lengths[each.key])) if each.key in lengths else REFUSED

    coming = [wanted(key, n) for n, key in enumerate(["long", "any", "short", "middle", "all"])]
    batch = plan_together(reversed(coming), held, NO_WORKERS, alone)
    assert batch.waiting == {}
    assert batch.order == ["short", "middle", "long", "any", "all"]
    assert (seen["long"], seen["any"]) == ([], [90.0])
    assert seen["short"] == [90.0]
    assert seen["middle"] == [90.0, 10.0]


def test_requests_outside_the_batch_are_woken_when_their_position_changes() -> None:
    held = ReservedRequests[str]()
    for number, (key, length) in enumerate([("first", 10.0), ("second", 20.0), ("third", 30.0)]):
        held.add(key, number, 0, planned(W1, length))
    plans = {"first": going(planned(W2, 40.0)), "new": going(planned(W1, 40.0))}
    looking = [wanted("first", 0), wanted("new", 9)]
    batch = plan_together(looking, held, NO_WORKERS, lambda each: plans[each.key])
    assert (batch.order, batch.to_wake) == (["first", "new"], ["second"])


def test_early_requests_wait_with_a_reservation() -> None:
    held, busy = ReservedRequests[str](), Wait("busy", 70, planned(W1, 40.0))
    full = Wait("no worker has room")
    plans = {"a": busy, "b": going(planned(W2, 50.0)), "c": REFUSED, "d": full}
    looking = [wanted(key, n) for n, key in enumerate("abcd")]
    batch = plan_together(looking, held, NO_WORKERS, lambda each: plans[each.key])
    assert (batch.order, batch.waiting) == (["b", "c"], {"a": busy, "d": full})
    assert (held.reserved_rank("a"), held.reserved_rank("b"), held.reserved_rank("c")) == (
        W1,
        W2,
        None,
    )


def test_joined_requests_are_placed_by_arrival() -> None:
    held = ReservedRequests[str]()
    for number, key in enumerate("abcd"):
        held.add(key, number, 0, planned(W1, float(number)))
    joined = held.joined([wanted("b", 1), wanted("e", 9)])
    assert reserved(joined.reservations) == [(W1, float(number)) for number in range(4)]
    assert (joined.reservations.numbers.tolist(), joined.positions.tolist()) == (
        [0, 0, 0, 0, -1],
        [1, 4],
    )


def test_single_requests_and_other_policies_are_not_planned_twice() -> None:
    def alone(_: PendingRequest[str]) -> Decision:
        raise AssertionError("nobody is to be planned")

    held = ReservedRequests[str]()
    assert plan_together([wanted("a")], held, NO_WORKERS, alone).order == ["a"]
    assert plan_together([wanted("b", 1), wanted("a")], held, None, alone).order == ["a", "b"]


def test_next_request_retries_at_its_time_and_others_at_the_end_of_their_wait() -> None:
    held = ReservedRequests[str]()
    held.add("a", 0, 0, planned(W1, 10.0))
    held.add("b", 1, 0, planned(W1, 20.0))
    assert held.next_retry_ms("a", Wait("busy", 70, planned(W1, 10.0))) == 70
    assert held.next_retry_ms("b", Wait("busy", 70, planned(W1, 20.0))) == 10_000
    assert held.next_retry_ms("c", Wait("full", 80)) == 80


def test_worker_change_wakes_requests_planned_for_it_and_all_while_they_are_few() -> None:
    held = ReservedRequests[int]()
    for n in range(MAX_WAKEUPS):
        held.add(n, n, 0, planned(W2, float(MAX_WAKEUPS - n)))
    assert held.to_wake("w1") == list(reversed(range(MAX_WAKEUPS)))
    held.add(99, 99, 0, planned(W1, 1.0))
    assert held.to_wake("w1") == [99]
    held.add(98, 98, 0, planned(W2, 0.0))
    assert held.to_wake("w2") == [98, *reversed(range(1, MAX_WAKEUPS))]
    assert held.to_wake("w2", 2) == [98, MAX_WAKEUPS - 1]
    assert held.to_wake("w2", 0) == [98]
    assert held.to_wake("w1", 0) == [99]
    assert held.to_wake("w3", 0) == []


def test_worker_change_wakes_the_next_request_of_each_of_its_ranks() -> None:
    held = ReservedRequests[str]()
    for key, rank, ms in (("a", 0, 2.0), ("b", 0, 1.0), ("c", 1, 3.0), ("d", 1, 4.0)):
        held.add(key, ord(key), 0, planned(WorkerRank("w1", 1, rank), ms))
    assert list(held.to_wake("w1", 0)) == ["b", "c"]
    assert list(held.to_wake("w1", 2)) == ["b", "a", "c"]
    assert list(held.to_wake("w1", 3)) == ["b", "a", "c"]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([W1, W2]), st.floats(0, 100))),
    st.integers(0, 6),
)
def test_reservations_of_others_are_the_queued_ones_by_arrival(
    plans: list[tuple[int, WorkerRank, float]], number: int
) -> None:
    held, last = ReservedRequests[int](), dict[int, tuple[WorkerRank, float]]()
    for key, place, prefill_ms in plans:
        held.add(key, key, 0, planned(place, prefill_ms))
        last[key] = (place, prefill_ms)
    assert sorted(held.in_dispatch_order()) == sorted(last)
    assert reserved(held.reservations_of_others(number)) == [
        last[key] for key in sorted(last) if key != number
    ]
