"""Tests of the router's queue: which request goes when, to which worker, and when one retries."""

from __future__ import annotations

import math

import pytest

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.policy_names import QueueOrder
from kvlane.app.routing.queueing.deferred_prompts import QueueSize
from kvlane.app.routing.queueing.fair_share import UNBOUNDED, ClassConfig, QueueKey
from kvlane.app.routing.queueing.pending import RequestKey
from kvlane.app.routing.queueing.router_queue import MAX_FREQUENT_RETRIES, QueueConfig
from kvlane.app.routing.queueing.worker_capacity import PROBE_INTERVAL_MS
from kvlane.app.routing.selection.decision import Placement, Rejection, Wait
from kvlane.app.routing.selection.handover_rules import HandOverRules
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.streams.records import Assigned
from tests.harness.queue_harness import ORIGIN, QueueHarness
from tests.harness.routing_harness import NOW_MS, TIMEOUT_MS, RoutingHarness

CURVES = PerfCurves(prefill=(0.0, 1.0, 0.0), decode=(0.0, 0.0, 0.0), min_decode_ms=0.0)
SLOW = {"curve": CURVES.coefficients(), "max_num_batched_tokens": 65_536}
"""A millisecond for each token of a prompt."""
SHARES = {"paid": ClassConfig(3.0), "free": ClassConfig(1.0, max_queued_requests=2)}


def one_at_a_time(routing: RoutingHarness, **config: object) -> QueueHarness:
    """A queue before a worker that takes one run at a time; it has the run of `first`."""
    routing.worker("w", max_runs=1)
    queue = QueueHarness(routing, **config)
    queue.send("first")
    assert queue.workers == {"first": "w"}
    return queue


def finish_all(queue: QueueHarness) -> list[str]:
    """Finish the runs one by one; returns the requests in the order in which they went."""
    finished = 0
    while finished < len(queue.workers):
        queue.finish([*queue.workers][finished])
        finished += 1
    return [*queue.workers]


# --- order ---------------------------------------------------------------------------------------


def test_freed_place_goes_to_the_next_request_by_priority_and_age(routing: RoutingHarness) -> None:
    queue = one_at_a_time(routing)
    queue.send("a", "b")
    queue.pass_time(NOW_MS + 500)
    queue.send("younger")
    queue.send("strict", strict_priority=1)
    queue.send("jumps", priority_jump=10)
    assert finish_all(queue) == ["first", "strict", "jumps", "a", "b", "younger"]


def test_classes_get_tokens_by_their_weights(routing: RoutingHarness) -> None:
    queue = one_at_a_time(routing, classes={"paid": ClassConfig(3.0), "free": ClassConfig(1.0)})
    for number in range(8):
        queue.send(f"free-{number}", queue_class="free")
    for number in range(8):
        queue.send(f"paid-{number}", queue_class="paid")
    went = [name.partition("-")[0] for name in finish_all(queue)[1:]]
    assert (went[:8].count("paid"), went[:8].count("free")) == (6, 2)
    assert [name for name in queue.workers if "paid" in name] == [f"paid-{n}" for n in range(8)]


def test_shortest_of_the_requests_for_a_busy_worker_goes_first(routing: RoutingHarness) -> None:
    routing.worker("w", engine=dict(SLOW))
    queue = QueueHarness(routing, "predictive")
    queue.send("first", tokens=2000)
    for name, tokens in (("long", 900), ("short", 300), ("middle", 600)):
        queue.send(name, tokens=tokens)
    assert queue.queue.reservations == 3
    for name in ("first", "short", "middle"):
        queue.prefilled(name)
    assert [*queue.workers] == ["first", "short", "middle", "long"]
    assert queue.queue.reservations == 0


def test_requests_of_one_moment_are_planned_before_one_of_them_goes(
    routing: RoutingHarness,
) -> None:
    for name in ("w1", "w2"):
        routing.worker(name, engine=dict(SLOW))
    queue = QueueHarness(routing, "predictive")
    queue.send("a", "b", "c", "d", tokens=500)
    assert sorted(queue.workers.values()) == ["w1", "w2"]
    reserved = queue.queue.ranks_with_reservations()
    assert sorted(place.worker for place in reserved) == ["w1", "w2"]
    for name in [*queue.workers]:
        queue.prefilled(name)
    assert sorted(queue.workers.values()) == ["w1", "w1", "w2", "w2"]


# --- wake-ups ------------------------------------------------------------------------------------


def test_wake_up_reaches_the_next_request_while_there_are_places(routing: RoutingHarness) -> None:
    queue = one_at_a_time(routing)
    queue.send("a", "b", "c")
    routing.worker("large")
    queue.queue.on_fleet_changed()
    queue.plan()
    assert queue.workers == {"first": "w", "a": "large", "b": "large", "c": "large"}


def test_request_retries_each_second_without_a_wake_up(routing: RoutingHarness) -> None:
    queue = one_at_a_time(routing)
    queue.send("a")
    assert queue.queue.next_wake_ms == NOW_MS + 1000
    before = len(queue.decisions)
    queue.pass_time(NOW_MS + 3000)
    assert [name for name, _ in queue.decisions[before:]] == ["a", "a", "a"]


def test_many_requests_retry_less_often(routing: RoutingHarness) -> None:
    queue = one_at_a_time(routing)
    count = 2 * MAX_FREQUENT_RETRIES
    queue.send(*[f"{n}" for n in range(count)], tokens=1)
    queue.pass_time(NOW_MS + 1000)
    before = len(queue.decisions)
    queue.pass_time(NOW_MS + 11_000)
    assert 4.5 * count < len(queue.decisions) - before < 5.5 * count


def test_wait_ends_at_the_deadline(routing: RoutingHarness) -> None:
    queue = one_at_a_time(routing)
    queue.send("a", deadline_ms=NOW_MS + 300)
    assert queue.queue.next_wake_ms == NOW_MS + 301, "the first time past it"
    queue.leave("a")
    assert queue.queue.next_wake_ms == math.inf
    assert not queue.queue.waiting.keys


def test_request_for_a_busy_worker_retries_when_it_is_predicted_free(
    routing: RoutingHarness,
) -> None:
    routing.worker("w", engine=dict(SLOW))
    queue = QueueHarness(routing, "predictive")
    queue.send("first", tokens=400)
    queue.send("a", tokens=300)
    assert queue.queue.next_wake_ms == NOW_MS + 400
    queue.pass_time(NOW_MS + 399)
    assert "a" not in queue.workers
    queue.pass_time(NOW_MS + 400)
    assert queue.workers == {"first": "w", "a": "w"}, "no record was read"


# --- workers that take no more -------------------------------------------------------------------


def test_worker_that_refused_gets_one_probe_a_second(routing: RoutingHarness) -> None:
    routing.worker("w")
    queue = QueueHarness(routing)
    queue.send("a", "b", "refused")
    queue.finish("refused", "worker_full", retryable=True)
    queue.send("c", "d")
    assert [*queue.workers] == ["a", "b", "refused"], "two runs are its limit"
    queue.pass_time(NOW_MS + PROBE_INTERVAL_MS)
    assert [*queue.workers][3:] == ["c"]
    queue.finish("c", "worker_full", retryable=True)
    queue.pass_time(NOW_MS + 2 * PROBE_INTERVAL_MS - 1)
    assert [*queue.workers][3:] == ["c"]
    queue.pass_time(NOW_MS + 3 * PROBE_INTERVAL_MS)
    assert [*queue.workers][3:] == ["c", "d"], "the interval began with the retry after the refusal"


def test_finished_run_of_a_worker_that_refused_makes_room(routing: RoutingHarness) -> None:
    routing.worker("w")
    queue = QueueHarness(routing)
    queue.send("a", "b", "refused")
    queue.finish("refused", "worker_full", retryable=True)
    queue.send("c")
    queue.finish("a")
    assert [*queue.workers][3:] == ["c"]


# --- bounds --------------------------------------------------------------------------------------


def test_queue_is_full_at_its_bound(routing: RoutingHarness) -> None:
    queue = one_at_a_time(routing, bound=QueueSize(2, UNBOUNDED, UNBOUNDED))
    waiting, demo = queue.queue.waiting, QueueKey("m")
    queue.send("a")
    assert not waiting.is_full(demo)
    assert waiting.is_full(demo, planned=1)
    queue.send("b")
    assert waiting.is_full(demo)
    assert waiting.queued_requests == 2
    queue.finish("first")
    assert not waiting.is_full(demo)


def test_class_is_full_at_its_own_bound(routing: RoutingHarness) -> None:
    queue = one_at_a_time(routing, classes=SHARES)
    queue.send("a", "b", queue_class="free")
    waiting = queue.queue.waiting
    assert waiting.is_full(QueueKey("m", "free"))
    assert not waiting.is_full(QueueKey("m", "paid"))


def test_queue_is_backed_up_once_every_place_is_reserved(routing: RoutingHarness) -> None:
    routing.worker("w", engine=dict(SLOW))
    bound = QueueSize(1, UNBOUNDED, UNBOUNDED)
    queue = QueueHarness(routing, "predictive", bound=bound)
    queue.send("first", tokens=2000)
    queue.send("a", tokens=500)
    (waiting,) = queue.requests.values()
    assert queue.queue.is_backed_up(waiting)
    queue.leave("a")
    assert not queue.queue.is_backed_up(waiting)


# --- hand-overs ----------------------------------------------------------------------------------


def test_prompt_is_not_computed_while_computed_ones_wait_for_the_same_decode_worker(
    routing: RoutingHarness,
) -> None:
    routing.worker("p", role="prefill")
    routing.worker("d", role="decode", max_runs=1)
    queue = QueueHarness(routing, handover_rules=HandOverRules(is_enforced=True))
    queue.send("a", phase="decode")
    queue.send("b", phase="decode")
    queue.send("c", phase="prefill")
    assert queue.workers == {"a": "d"}
    queue.finish("a")
    assert queue.workers == {"a": "d", "b": "d", "c": "p"}


def test_whole_request_waits_where_two_workers_are_enforced(routing: RoutingHarness) -> None:
    """Also when its decode worker comes after the choice of its phase."""
    routing.worker("p", role="prefill")
    routing.worker("d", role="decode")
    queue = QueueHarness(routing, handover_rules=HandOverRules(is_enforced=True))
    queue.send("a", phase="aggregated")
    assert queue.workers == {}
    queue.send("a", phase="prefill")
    assert queue.workers == {"a": "p"}


def test_decode_is_queued_for_no_place(routing: RoutingHarness) -> None:
    routing.worker("p", role="prefill", engine=dict(SLOW))
    routing.worker("d", role="decode", engine=dict(SLOW))
    queue = QueueHarness(routing, "predictive", handover_rules=HandOverRules(is_enforced=True))
    queue.send("a", tokens=2000, phase="decode")
    queue.send("b", tokens=500, phase="decode")
    assert queue.workers == {"a": "d", "b": "d"}
    assert queue.queue.reservations == 0


# --- other routers, other decisions --------------------------------------------------------------


def test_request_waits_its_turn_at_a_worker_that_other_routers_choose_too(
    routing: RoutingHarness,
) -> None:
    names = [routing.worker(f"w{n}", engine=dict(SLOW)) for n in range(8)]
    queue = QueueHarness(routing, "predictive")
    for number in range(8):
        queue.record(Assigned(
            id=f"other-{number}", attempt=0, phase="aggregated", worker=names[number], epoch=number,
            router=f"another-{number}", origin=ORIGIN, responses_from=0,
            deadline_ms=0, prompt_tokens=10, prefill_tokens=10,
        ))  # fmt: skip
    delays = queue.queue.inputs.state(queue.now_ms).stagger_ms
    assert set(delays) == set(names)
    assert max(delays.values()) > 0
    queue.send("a")
    (_, decision), *_ = queue.decisions
    assert isinstance(decision, Wait)
    assert queue.queue.next_wake_ms <= NOW_MS + 10 + max(delays.values())


def test_requests_wait_for_a_silent_worker_until_it_is_heard_again(routing: RoutingHarness) -> None:
    routing.worker("w")
    queue = QueueHarness(routing)
    queue.now_ms = NOW_MS + 2 * TIMEOUT_MS
    routing.silent.update(queue.now_ms / 1000)
    queue.send("a")
    assert queue.workers == {}
    routing.send_heartbeat("w", queue.now_ms)
    queue.queue.on_fleet_changed()
    queue.plan()
    assert queue.workers == {"a": "w"}


def test_impossible_request_is_rejected_and_holds_no_place(routing: RoutingHarness) -> None:
    routing.workers("w")
    queue = QueueHarness(routing, "direct")
    queue.send("a")
    ((_, decision),) = queue.decisions
    assert isinstance(decision, Rejection)
    assert queue.queue.reservations == 0
    assert not queue.queue.waiting.keys


def test_dry_run_has_no_effect(routing: RoutingHarness) -> None:
    routing.worker("w", engine=dict(SLOW))
    queue = QueueHarness(routing, "predictive")
    queue.send("first", tokens=2000)
    queue.send("a", tokens=500)
    (waiting,) = queue.requests.values()
    planned = queue.queue.dry_run(waiting, queue.now_ms)
    assert not isinstance(planned, Wait | Rejection)
    assert planned.worker_rank.worker == "w"
    assert (queue.queue.reservations, "a" in queue.workers) == (1, False)


def test_burst_with_one_prefix_meets_at_a_worker_before_its_first_event(
    routing: RoutingHarness,
) -> None:
    for name in ("w1", "w2", "w3"):
        routing.index.publishing.add(routing.worker(name))
    queue = QueueHarness(routing, "predictive")
    queue.send("first", tokens=4000, begins_alike=True)
    queue.send("second", tokens=4050, begins_alike=True)
    queue.send("third", tokens=4100, begins_alike=True)
    assert len({*queue.workers.values()}) == 1
    placed = {name: d for name, d in queue.decisions if isinstance(d, Placement)}
    assert "estimated_tokens" not in placed["first"].params
    assert placed["second"].cached_tokens == placed["second"].params["estimated_tokens"] > 3600
    queue.finish("first", "broken")
    queue.finish("second", "broken")
    queue.finish("third", "broken")
    queue.send("alone", tokens=8100, begins_alike=True)
    assert queue.decisions[-1][0] == "alone"
    last = queue.decisions[-1][1]
    assert isinstance(last, Placement)
    assert last.cached_tokens == 0, "no run has computed it"


# --- settings that change ------------------------------------------------------------------------


def queued_prefills(routing: RoutingHarness) -> QueueHarness:
    """Three requests that policy predictive queues for a busy worker, the shortest came last."""
    routing.worker("w", engine=dict(SLOW))
    queue = QueueHarness(routing, "predictive")
    queue.send("first", tokens=2000)
    for name, tokens in (("long", 900), ("middle", 600), ("short", 300)):
        queue.send(name, tokens=tokens)
    assert (queue.queue.reservations, queue.queue.waiting.queued_requests) == (3, 3)
    return queue


@pytest.mark.parametrize(
    ("policy", "order", "went"),
    [
        ("predictive", "sjf", ["short", "middle", "long"]),
        ("predictive", "fcfs", ["long", "middle", "short"]),
        ("dynamo", "sjf", ["long", "middle", "short"]),
    ],
)
def test_waiting_requests_go_by_new_settings_and_none_is_lost(
    routing: RoutingHarness, policy: str, order: QueueOrder, went: list[str]
) -> None:
    queue = queued_prefills(routing)
    queue.queue.set_config(QueueConfig(RoutingConfig(policy), order=order))
    queue.plan()
    for name in ("first", *went[:2]):
        queue.prefilled(name)
    assert [*queue.workers][1:] == went
    assert {queue.decisions[-1][1].policy} == {policy}  # type: ignore[union-attr]
    assert (queue.queue.reservations, queue.queue.waiting.queued_requests) == (0, 0)


def test_policy_predictive_reserves_places_for_requests_that_waited_under_another(
    routing: RoutingHarness,
) -> None:
    routing.worker("full", engine=dict(SLOW), max_runs=1)
    queue = QueueHarness(routing, "dynamo")
    queue.send("first", tokens=2000)
    queue.send("a", "b", tokens=900)
    routing.worker("w", engine=dict(SLOW))
    queue.queue.set_config(QueueConfig(RoutingConfig("predictive")))
    queue.queue.on_fleet_changed()
    queue.plan()
    assert queue.workers == {"first": "full", "a": "w"}
    assert queue.queue.reservations == 1
    queue.prefilled("a")
    assert queue.workers == {"first": "full", "a": "w", "b": "w"}


def test_settings_that_change_between_the_planning_and_the_turn_of_a_request_lose_none(
    routing: RoutingHarness,
) -> None:
    queue = queued_prefills(routing)
    queue.pass_time(NOW_MS + 1)
    for name in ("long", "middle", "short"):
        queue.queue.look(queue.requests[RequestKey(0, name)])
    order = queue.queue.plan_pass(queue.now_ms)
    queue.queue.set_config(QueueConfig(RoutingConfig("dynamo")))
    for key in order:
        queue._act(queue.requests[key])
    queue.plan()
    assert sorted(queue.workers) == ["first", "long", "middle", "short"]
    assert queue.queue.waiting.queued_requests == 0


def test_new_weights_of_classes_hold_for_waiting_requests(routing: RoutingHarness) -> None:
    shares = {"paid": ClassConfig(1.0), "free": ClassConfig(1.0)}
    queue = one_at_a_time(routing, classes=shares)
    for number in range(8):
        queue.send(f"free-{number}", queue_class="free")
        queue.send(f"paid-{number}", queue_class="paid")
    weighted = shares | {"paid": ClassConfig(3.0)}
    queue.queue.set_config(QueueConfig(RoutingConfig("dynamo"), classes=weighted))
    queue.plan()
    went = [name.partition("-")[0] for name in finish_all(queue)[1:]]
    assert (went[:8].count("paid"), went[:8].count("free")) == (6, 2)
    assert len(went) == 16


def test_requests_of_a_class_that_is_gone_go_all_the_same(routing: RoutingHarness) -> None:
    queue = one_at_a_time(routing, classes=SHARES)
    queue.send("a", "b", queue_class="free")
    queue.send("c", queue_class="paid")
    queue.queue.set_config(QueueConfig(RoutingConfig("dynamo")))
    queue.plan()
    queue.send("d", queue_class="free")
    assert sorted(finish_all(queue)) == ["a", "b", "c", "d", "first"]
    assert queue.queue.waiting.queued_requests == 0


def test_lower_bound_refuses_new_requests_and_keeps_those_that_wait(
    routing: RoutingHarness,
) -> None:
    queue = one_at_a_time(routing)
    queue.send("a", "b")
    bound = QueueSize(1, UNBOUNDED, UNBOUNDED)
    queue.queue.set_config(QueueConfig(RoutingConfig("dynamo"), bound=bound))
    queue.plan()
    assert queue.queue.waiting.is_full(QueueKey("m"))
    assert finish_all(queue) == ["first", "a", "b"]
    assert not queue.queue.waiting.is_full(QueueKey("m"))


def test_learned_times_outlive_another_objective(routing: RoutingHarness) -> None:
    routing.worker("w")
    queue, other = QueueHarness(routing, "predictive"), QueueHarness(routing, "predictive")
    for each in (queue, other):
        each.send("a")
        each.finish("a", ttft_ms=500.0, itl_ms=9.0, output_tokens=40)
    learned = other.queue.config.predictive_weights.decode_weight
    for objective in ("throughput", "balanced"):
        queue.queue.set_config(QueueConfig(RoutingConfig("predictive", objective=objective)))
    assert queue.queue.config.predictive_weights.decode_weight == learned
