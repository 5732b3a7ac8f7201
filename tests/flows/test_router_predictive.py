"""Tests of policy predictive in a router: requests are held, released in order, and none is
forgotten."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.router import Router
from kvlane.app.routing.queueing import router_queue
from kvlane.app.routing.queueing.herd_avoidance import MIN_REQUESTS, NO_STAGGER
from kvlane.app.routing.queueing.pending import MAX_WAKEUPS
from kvlane.app.routing.selection.select import select_worker
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Assigned, Assignment, Cancel, End, PrefillDone, RequestOffset
from kvlane.streams.request import Hints, Request
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES
from tests.harness.fake_worker import (
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, run_scenario, scenario_test

CURVES = PerfCurves(prefill=(0.0, 0.1, 100.0), decode=(0.0, 0.0, 0.0), min_decode_ms=0.0)
"""A step takes 100 ms and 0.1 ms a token; so 4000 tokens are half a second."""
SLOW = {"curve": CURVES.coefficients(), "max_num_batched_tokens": 65_536}


def send(world: MemoryWorld, name: str, tokens: int, **over: Any) -> None:
    fields = {
        "id": name,
        "model": "demo",
        "deadline_s": 100,
        "token_ids": pack_tokens([7] * tokens),
    }
    append_record(world, REQUESTS, Request(**(fields | over)))


async def busy_worker(world: MemoryWorld, tokens: int = 4000) -> tuple[FakeWorker, Router]:
    """A slow worker that computes a prompt of so many tokens, `a`, and its router."""
    hand = FakeWorker(world, **SLOW)
    router = await start_router(world, policy="predictive")
    send(world, "a", tokens)
    await wait_for_items(world, lambda: hand.received(Assignment))
    return hand, router


def prefilled(world: MemoryWorld, hand: FakeWorker, name: str) -> None:
    done = PrefillDone(
        id=name, attempt=0, phase="aggregated", worker=hand.name, epoch=hand.epoch, run=1
    )
    append_record(world, LEDGER, done)


async def compute(world: MemoryWorld, hand: FakeWorker) -> None:
    """Do what comes, one prompt after the other, and say when each is computed."""
    done = 0
    while True:
        for assignment in hand.received(Assignment)[done:]:
            done += 1
            await world.sleep(0.1 + 0.0001 * len(assignment.request.token_ids) / 4)
            prefilled(world, hand, assignment.request.id)
        await world.sleep(0.001)


def taken(*hands: FakeWorker) -> list[str]:
    return [a.request.id for hand in hands for a in hand.received(Assignment)]


def count_finds(router: Router) -> list[Any]:
    found: list[Any] = []
    find = router._context.scheduler.schedule

    def counted(wanted: Any) -> Any:
        found.append(wanted)
        return find(wanted)

    router._context.scheduler.schedule = counted  # type: ignore[method-assign]
    return found


@scenario_test
async def test_request_goes_when_its_worker_is_predicted_free(world: MemoryWorld) -> None:
    hand, _ = await busy_worker(world)
    send(world, "b", 4000)
    await world.sleep(0.4)
    assert taken(hand) == ["a"]
    await world.sleep(0.15)
    assert taken(hand) == ["a", "b"], "nothing was heard from the worker, only time passed"
    (decision,) = read_records(world, LEDGER, Assigned, "b")
    assert decision.policy == "predictive"
    assert 400 < decision.held_ms < 600
    assert decision.ttft_ms_predicted == pytest.approx(500)
    assert decision.candidates[0].prefill_runs == 1


@scenario_test
async def test_first_token_of_the_previous_request_releases_the_next_at_once(
    world: MemoryWorld,
) -> None:
    hand, _ = await busy_worker(world)
    send(world, "b", 4000)
    await world.sleep(0.1)
    prefilled(world, hand, "a")
    await world.sleep(0.02)
    assert taken(hand) == ["a", "b"]


@scenario_test
async def test_shortest_goes_first_and_each_after_the_previous_one(world: MemoryWorld) -> None:
    hand = FakeWorker(world, **SLOW)
    world.spawn(compute(world, hand))
    await start_router(world, policy="predictive")
    send(world, "a", 4000)
    await wait_for_items(world, lambda: hand.received(Assignment))
    for name, tokens in (("long", 9000), ("short", 3000), ("middle", 6000)):
        send(world, name, tokens)
        await world.sleep(0.01)
    before, went = world.clock.now(), dict[str, float]()
    while len(went) < 4:
        await world.sleep(0.01)
        for name in taken(hand):
            went.setdefault(name, world.clock.now() - before)
    assert list(went) == ["a", "short", "middle", "long"]
    assert went["short"] == pytest.approx(0.47, abs=0.05)
    assert went["middle"] - went["short"] == pytest.approx(0.4, abs=0.05)
    assert went["long"] - went["middle"] == pytest.approx(0.7, abs=0.05)


@scenario_test
async def test_shortest_of_simultaneous_requests_goes_first(world: MemoryWorld) -> None:
    hand = FakeWorker(world, **SLOW)
    world.spawn(compute(world, hand))
    await start_router(world, policy="predictive")
    await world.sleep(1)
    for name, tokens in (("long", 9000), ("short", 3000), ("middle", 6000)):
        send(world, name, tokens)
    await world.wait_until(lambda: len(taken(hand)) == 3, within_s=5)
    assert taken(hand) == ["short", "middle", "long"]


@scenario_test
async def test_unplannable_request_does_not_block_the_others(world: MemoryWorld) -> None:
    hand = FakeWorker(world, **SLOW)
    await start_router(world, policy="predictive")
    await world.sleep(1)

    def broken(prompt: Any, *args: Any, **over: Any) -> Any:
        if prompt.request.id == "poison":
            raise ArithmeticError("nobody thought of it")
        return select_worker(prompt, *args, **over)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router_queue, "select_worker", broken)
        patch.setattr("kvlane.app.routing.queueing.joint_planning.plan_uniform", lambda *_: 1 // 0)
        for name in ("a", "poison", "b"):
            send(world, name, 100)
        await world.wait_until(lambda: sorted(taken(hand)) == ["a", "b"], within_s=1)
        await world.wait_until(
            lambda: bool(read_records(world, RESPONSES, End, "poison")), within_s=1
        )


@scenario_test
async def test_requests_are_planned_one_by_one_if_the_batch_plan_fails(world: MemoryWorld) -> None:
    hand = FakeWorker(world, **SLOW)
    await start_router(world, policy="predictive")
    await world.sleep(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router_queue, "plan_together", lambda *_: 1 // 0)
        for name in ("a", "b"):
            send(world, name, 100)
        await world.wait_until(lambda: sorted(taken(hand)) == ["a", "b"], within_s=5)


@scenario_test
async def test_queued_request_goes_to_a_new_worker(world: MemoryWorld) -> None:
    await busy_worker(world, 60_000)
    send(world, "b", 60_000)
    await world.sleep(1)
    other = FakeWorker(world, "w2", **SLOW)
    await world.sleep(0.1)
    assert taken(other) == ["b"]


@scenario_test
async def test_longest_wait_is_bounded_while_the_cache_stays_full(world: MemoryWorld) -> None:
    hand = FakeWorker(world, block_size=16, total_kv_blocks=100, **SLOW)  # 1600 tokens
    await start_router(world, policy="predictive", max_queue_wait_s=3)
    send(world, "a", 1200)
    await wait_for_items(world, lambda: hand.received(Assignment))
    prefilled(world, hand, "a")
    for n in range(5):
        send(world, f"b{n}", 1000 + n)
    await world.sleep(2.9)
    assert taken(hand) == ["a"]
    await world.sleep(0.2)
    assert sorted(taken(hand)) == ["a", *[f"b{n}" for n in range(5)]]


@scenario_test
async def test_no_request_waits_until_no_time_is_left(world: MemoryWorld) -> None:
    hand = FakeWorker(world, block_size=16, total_kv_blocks=100, **SLOW)
    await start_router(world, policy="predictive")
    send(world, "a", 1200)
    await wait_for_items(world, lambda: hand.received(Assignment))
    prefilled(world, hand, "a")
    send(world, "b", 1000, deadline_s=2)
    await world.sleep(1.9)
    assert taken(hand) == ["a", "b"]
    assert read_records(world, RESPONSES, End, "b") == []


@scenario_test
async def test_next_in_the_queue_follows_when_the_first_is_cancelled(world: MemoryWorld) -> None:
    hand, router = await busy_worker(world)
    send(world, "short", 3000)
    send(world, "long", 6000)
    await world.sleep(0.1)
    append_record(world, REQUESTS, Cancel(id="short"))
    await world.sleep(0.5)
    assert taken(hand) == ["a", "long"]
    assert not router._context.queue.waiting.keys
    assert router._context.queue.reservations == 0


@scenario_test
async def test_revoked_lane_takes_its_queued_requests_along(world: MemoryWorld) -> None:
    _, router = await busy_worker(world, 60_000)
    for n in range(5):
        send(world, f"b{n}", 60_000)
    await world.sleep(0.1)
    queue = router._context.queue
    assert queue.reservations == 5
    await router.stop()
    await world.sleep(0.1)
    assert (queue.reservations, len(queue.waiting.keys), queue.next_wake_ms) == (0, 0, math.inf)


@scenario_test
async def test_wait_for_a_busy_worker_takes_few_attempts(world: MemoryWorld) -> None:
    hand, router = await busy_worker(world, 60_000)
    found = count_finds(router)
    for n in range(40):
        send(world, f"b{n:02}", 60_000 - n)
    await world.sleep(5)
    assert taken(hand) == ["a"]
    assert len(found) <= 40 * (2 + 5), "two when it comes and its order is found, one each second"


@scenario_test
async def test_simultaneous_requests_are_all_assigned(world: MemoryWorld) -> None:
    hands = [FakeWorker(world, f"w{n}", **SLOW) for n in range(3)]
    router = await start_router(world, policy="predictive")
    found = count_finds(router)
    for hand in hands:
        world.spawn(compute(world, hand))
    for n in range(60):
        send(world, f"b{n:02}", 2000 + 100 * (n % 7))
    await world.wait_until(lambda: len(taken(*hands)) == 60, within_s=60)
    assert all(len(taken(hand)) >= 15 for hand in hands)
    assert len(found) <= 60 * 20, "each token wakes sixteen at most"
    assert router._context.queue.reservations == 0


@scenario_test
async def test_records_of_one_turn_wake_the_next_request_of_each_worker_and_few_others(
    world: MemoryWorld,
) -> None:
    hands = [FakeWorker(world, f"w{n}", **SLOW) for n in range(4)]
    router = await start_router(world, policy="predictive")
    for n in range(84):
        send(world, f"b{n:02}", 20_000 + n)
    await world.sleep(0.2)
    assert [len(taken(hand)) for hand in hands] == [1, 1, 1, 1]
    found = count_finds(router)
    for hand in hands:
        prefilled(world, hand, taken(hand)[0])
    await world.sleep(0.01)
    assert [len(taken(hand)) for hand in hands] == [2, 2, 2, 2], "the next one goes at once"
    assert len(found) <= MAX_WAKEUPS + 2 * len(hands), "20 wait for each worker"


async def stir(world: MemoryWorld, router: Router) -> None:
    """Let everybody look again, all the time."""
    while True:
        router._context.scheduler.on_fleet_changed()
        await world.sleep(0.003)


def test_more_frequent_retries_change_only_their_number() -> None:
    """With one worker; among several a request may change its mind as often as it looks."""
    histories: dict[bool, list[tuple[str, float]]] = {False: [], True: []}

    async def scenario(world: MemoryWorld, restless: bool) -> None:
        hand = FakeWorker(world, **SLOW)
        world.spawn(compute(world, hand))
        router = await start_router(world, policy="predictive")
        if restless:
            world.spawn(stir(world, router))
        for n in range(12):
            send(world, f"{n:02}", 2000 + 700 * (n * 5 % 12))
        went = histories[restless]
        while len(went) < 12:
            known = {request for request, _ in went}
            now = world.clock.now()
            went += [(request, now) for request in taken(hand) if request not in known]
            await world.sleep(0.001)

    for restless in (False, True):
        run_scenario(partial(scenario, restless=restless))
    calm, stirred = histories[False], histories[True]
    assert [request for request, _ in calm] == [request for request, _ in stirred]
    assert [at for _, at in calm] == pytest.approx([at for _, at in stirred], abs=0.02)


@scenario_test
async def test_ledger_is_read_sooner_while_a_request_waits(world: MemoryWorld) -> None:
    hand, router = await busy_worker(world)
    tail = router._context.count_awaited.__self__  # type: ignore[attr-defined]
    usual_s = tail._gather_s
    send(world, "b", 4000)
    await world.sleep(0.05)
    assert tail._gather_s < usual_s / 5
    await wait_for_items(world, lambda: hand.received(Assignment)[1:])
    await world.sleep(0.05)
    assert tail._gather_s == usual_s


@scenario_test
async def test_full_queue_refuses_a_request_without_planning_it(world: MemoryWorld) -> None:
    hand = FakeWorker(world, **SLOW)
    router = await start_router(world, policy="predictive", max_queued_requests=2)
    send(world, "a", 4000)
    await wait_for_items(world, lambda: hand.received(Assignment))
    for name in ("b", "c"):
        send(world, name, 4000)
    await world.sleep(0.05)
    planned = count_finds(router)
    send(world, "d", 4000)
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End, "d"))
    assert (end.code, end.retry_after_s) == ("queue_full", 1.0)
    assert "d" not in {each.key.id for each in planned}
    send(world, "e", 4000, hints=Hints(strict_priority=1))
    await wait_for_items(world, lambda: read_records(world, RESPONSES, End, "e"))
    assert "e" in {each.key.id for each in planned}, "it may go before those that wait"


@scenario_test
async def test_full_queue_of_one_model_does_not_concern_another(world: MemoryWorld) -> None:
    hand = FakeWorker(world, **SLOW)
    other = FakeWorker(world, "other-worker", model="other", **SLOW)
    await start_router(world, policy="predictive", max_queued_requests=2)
    send(world, "a", 4000)
    await wait_for_items(world, lambda: hand.received(Assignment))
    for name in ("b", "c"):
        send(world, name, 4000)
    await world.sleep(0.05)
    send(world, "d", 4000, model="other")
    await wait_for_items(world, lambda: other.received(Assignment))
    assert taken(other) == ["d"]


@scenario_test
async def test_full_queue_leaves_a_free_prefill_worker_to_new_prompts(world: MemoryWorld) -> None:
    hand = FakeWorker(world, transfer_lease_s=30.0, **SLOW)
    await start_router(world, policy="predictive", max_queued_requests=2)
    send(world, "a", 4000)
    await wait_for_items(world, lambda: hand.received(Assignment))
    for name in ("b", "c"):
        send(world, name, 4000)
    await world.sleep(0.05)
    prefill = FakeWorker(world, "prefill", role="prefill", **SLOW)
    await world.sleep(0.02)
    send(world, "d", 4000)
    await world.sleep(0.05)
    assert not read_records(world, RESPONSES, End, "d")
    assert "d" in taken(prefill)


@scenario_test
async def test_full_queue_hides_no_missing_model(world: MemoryWorld) -> None:
    hand = FakeWorker(world, **SLOW)
    await start_router(world, policy="predictive", max_queued_requests=2)
    send(world, "a", 4000)
    await wait_for_items(world, lambda: hand.received(Assignment))
    for name in ("b", "c"):
        send(world, name, 4000)
    await world.sleep(0.05)
    send(world, "d", 4000, model="unknown")
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End, "d"))
    assert end.code == "model_not_found"


@scenario_test
async def test_router_takes_turns_with_another_only_during_bursts(world: MemoryWorld) -> None:
    hand, router = await busy_worker(world)
    queue = router._context.queue

    async def decided(names: range, apart_s: float) -> None:
        for number in names:
            append_record(world, LEDGER, Assigned(
                id=f"other-{number}", attempt=0, phase="aggregated", worker=hand.name,
                epoch=hand.epoch, router="another", prompt_tokens=4000, prefill_tokens=4000,
                origin=RequestOffset(topic=REQUESTS, partition=0, offset=number),
                responses_from=0, deadline_ms=10**13,
            ))  # fmt: skip
            await world.sleep(apart_s)
        await world.sleep(0.1)

    await decided(range(MIN_REQUESTS), 0.1)
    assert queue.inputs.state(0).stagger_ms is NO_STAGGER
    await decided(range(100, 140), 0.0)
    assert set(queue.inputs.state(0).stagger_ms) == {hand.name}
