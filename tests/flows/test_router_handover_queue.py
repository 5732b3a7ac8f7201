"""Tests of the queue of a router with prefill and decode workers: its bound, its order and its
wake-ups."""

from __future__ import annotations

from msgspec.structs import replace

from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Assignment, End, Fencing
from kvlane.streams.request import Hints
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES
from tests.harness.fake_worker import (
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.handover_harness import LONG, PARAMS, assigned, workers
from tests.harness.memory_world import MemoryWorld, scenario_test

WHOLE = replace(LONG, id="whole", stop=replace(LONG.stop, max_tokens=0, min_tokens=0))


def ends(world: MemoryWorld, *keys: str) -> list[str]:
    return [e.code for key in keys for e in read_records(world, RESPONSES, End, key)]


async def fill(world: MemoryWorld, prefill: FakeWorker, decode: FakeWorker) -> Assignment:
    """Give the decode worker one run."""
    append_record(world, REQUESTS, replace(LONG, id="busy"))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    return await assigned(world, decode)


async def hand_over_next(world: MemoryWorld, prefill: FakeWorker, key: str, count: int) -> None:
    append_record(world, REQUESTS, replace(LONG, id=key))
    prefill.hand_over(await assigned(world, prefill, count), PARAMS)
    await world.sleep(0.05)


# --- the bound -----------------------------------------------------------------------------------


@scenario_test
async def test_no_prompt_is_computed_beyond_the_bound_on_waiting_decodes(
    world: MemoryWorld,
) -> None:
    prefill = FakeWorker(world, "p", role="prefill")
    decode = FakeWorker(world, "d", role="decode", max_runs=1)
    await start_router(world, max_queued_requests=2, handover_timeout_s=60)
    decode.start(await fill(world, prefill, decode))
    await hand_over_next(world, prefill, "waits", 2)
    others = [f"r{n}" for n in range(10)]
    for key in others:
        append_record(world, REQUESTS, replace(LONG, id=key))
        await world.sleep(0.2)
    assert len(prefill.received(Assignment)) == 2
    assert ends(world, *others) == ["queue_full"] * 9


@scenario_test
async def test_prompts_from_kafka_wait_in_the_log_while_decodes_wait(world: MemoryWorld) -> None:
    prefill = FakeWorker(world, "p", role="prefill")
    decode = FakeWorker(world, "d", role="decode", max_runs=1)
    router = await start_router(world, max_queued_requests=2, handover_timeout_s=60)
    busy = decode.start(await fill(world, prefill, decode))
    await hand_over_next(world, prefill, "waits", 2)
    for n in range(3):
        queued = replace(LONG, id=f"r{n}", queued_ms=world.broker.now_ms())
        append_record(world, REQUESTS, queued)
    await world.sleep(3)
    assert len(prefill.received(Assignment)) == 2
    assert router._context.queue.waiting.deferred_requests == 3
    decode.finish(busy, "stop")
    await assigned(world, prefill, 3)
    assert not ends(world, "r0", "r1", "r2")


@scenario_test
async def test_new_prompts_are_computed_when_the_last_decode_is_assigned(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=60)
    busy = decode.start(await fill(world, prefill, decode))
    await hand_over_next(world, prefill, "older", 2)
    for key in ("first", "second"):
        append_record(world, REQUESTS, replace(LONG, id=key))
        await world.sleep(0.1)
    await world.sleep(0.3)
    assert len(prefill.received(Assignment)) == 2
    began_ms = world.clock.wall_ms()
    decode.finish(busy, "stop")
    assert (await assigned(world, decode, 2)).request.id == "older"
    assert (await assigned(world, prefill, 3)).request.id == "first"
    assert world.clock.wall_ms() - began_ms < 100


@scenario_test
async def test_decode_that_waits_for_its_pin_delays_no_other_prompt(world: MemoryWorld) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=60)
    decode.start(await fill(world, prefill, decode))
    other = FakeWorker(world, "d2", role="decode")
    pinned = replace(LONG, id="pinned", hints=Hints(decode_worker_id="d"))
    append_record(world, REQUESTS, pinned)
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    await world.sleep(0.5)
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill, 3), PARAMS)
    assert (await assigned(world, other)).request.id == "a"


@scenario_test
async def test_request_whose_hand_over_expired_is_not_refused(world: MemoryWorld) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=3, max_queued_requests=0)
    decode.start(await fill(world, prefill, decode))
    FakeWorker(world, "d2", role="decode")
    pinned = Hints(decode_worker_id="d")
    append_record(world, REQUESTS, replace(LONG, hints=pinned))
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    append_record(world, REQUESTS, replace(LONG, id="b", hints=Hints(decode_worker_id="d2")))
    run = prefill.start(await assigned(world, prefill, 3))  # the prefill worker is full
    await wait_for_items(world, lambda: read_records(world, LEDGER, Fencing))
    append_record(world, REQUESTS, replace(LONG, id="new"))
    assert await wait_for_items(world, lambda: ends(world, "new")) == ["queue_full"]
    assert not ends(world, "a")
    prefill.finish(run, "broken")
    again = await assigned(world, prefill, 4)
    assert (again.request.id, again.attempt) == ("a", 1)


# --- what a worker's refusal shows ---------------------------------------------------------------


@scenario_test
async def test_decode_worker_that_refused_an_expired_hand_over_is_not_full(
    world: MemoryWorld,
) -> None:
    prefill = FakeWorker(world, "p", role="prefill")
    decode = FakeWorker(world, "d", role="decode", max_runs=1)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    expired = await assigned(world, decode)
    append_record(world, REQUESTS, WHOLE)
    await world.sleep(0.3)
    assert len(decode.received(Assignment)) == 1
    began_ms = world.clock.wall_ms()
    decode.reject(expired, retryable=False)
    assert (await assigned(world, decode, 2)).request.id == "whole"
    assert world.clock.wall_ms() - began_ms < 100
    again = await assigned(world, prefill, 2)
    assert (again.phase, again.attempt) == ("prefill", 1)
    assert [f.reason for f in read_records(world, LEDGER, Fencing)] == ["worker_full"]


# --- wake-ups ------------------------------------------------------------------------------------


@scenario_test
async def test_freed_prefill_worker_wakes_a_new_prompt_beside_older_decodes(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=60)
    decode.start(await fill(world, prefill, decode))
    FakeWorker(world, "d2", role="decode")
    append_record(world, REQUESTS, replace(LONG, id="older", hints=Hints(decode_worker_id="d")))
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    append_record(world, REQUESTS, replace(LONG, id="b"))
    run = prefill.start(await assigned(world, prefill, 3))
    await world.sleep(0.05)
    append_record(world, REQUESTS, LONG)
    await world.sleep(0.05)
    began_ms = world.clock.wall_ms()
    prefill.finish(run, "broken")
    assert (await assigned(world, prefill, 4)).request.id == "a"
    assert world.clock.wall_ms() - began_ms < 100


@scenario_test
async def test_freed_decode_worker_wakes_a_decode_beside_more_urgent_prompts(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=60)
    busy = decode.start(await fill(world, prefill, decode))
    append_record(world, REQUESTS, replace(LONG, id="older", hints=Hints(decode_worker_id="d")))
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    await world.sleep(0.05)
    FakeWorker(world, "d2", role="decode")
    append_record(world, REQUESTS, replace(LONG, id="b", hints=Hints(decode_worker_id="d2")))
    prefill.start(await assigned(world, prefill, 3))
    urgent = Hints(strict_priority=1, decode_worker_id="d2")
    append_record(world, REQUESTS, replace(LONG, id="urgent", hints=urgent))
    await world.sleep(0.3)
    began_ms = world.clock.wall_ms()
    decode.finish(busy, "stop")
    assert (await assigned(world, decode, 2)).request.id == "older"
    assert world.clock.wall_ms() - began_ms < 100


@scenario_test
async def test_freed_decode_worker_wakes_a_whole_request(world: MemoryWorld) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=60)
    busy = decode.start(await fill(world, prefill, decode))
    append_record(world, REQUESTS, replace(WHOLE, token_ids=pack_tokens([1, 2])))
    await world.sleep(0.3)
    began_ms = world.clock.wall_ms()
    decode.finish(busy, "stop")
    assert (await assigned(world, decode, 2)).phase == "aggregated"
    assert world.clock.wall_ms() - began_ms < 100


@scenario_test
async def test_class_is_charged_once_for_both_phases(world: MemoryWorld) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=60, queue_classes={"x": {"weight": 1}})
    run = decode.start(await fill(world, prefill, decode))
    larger = replace(WHOLE, token_ids=pack_tokens(list(range(4000))))
    of_class = Hints(queue_class="x")
    append_record(world, REQUESTS, replace(larger, id="first"))
    await world.sleep(0.1)
    append_record(world, REQUESTS, replace(LONG, id="split", hints=of_class))
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    await world.sleep(0.1)
    for request in (replace(larger, id="last"), replace(WHOLE, hints=of_class)):
        append_record(world, REQUESTS, request)
        await world.sleep(0.1)
    for count in range(2, 6):
        decode.finish(run, "stop")
        run = decode.start(await assigned(world, decode, count))
    order = [assignment.request.id for assignment in decode.received(Assignment)]
    assert order == ["busy", "first", "split", "whole", "last"]
