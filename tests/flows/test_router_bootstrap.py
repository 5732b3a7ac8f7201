"""Tests of a router whose prefill workers have a bootstrap endpoint: both runs of a request at
once."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.streams.codecs import pack_tokens, unpack_tokens
from kvlane.streams.records import (
    Assigned,
    Assignment,
    Cancel,
    CancelRun,
    End,
    Ended,
    Fence,
    Fencing,
    PrefillDone,
)
from kvlane.streams.request import BootstrapInfo, Hints
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES
from tests.harness.fake_worker import (
    FakeWorker,
    append_record,
    chunk,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.handover_harness import LONG, assigned
from tests.harness.memory_world import MemoryWorld, scenario_test
from workbench.testing.virtual_time import VirtualClock

ENDPOINT = {"bootstrap_host": "10.0.0.7", "bootstrap_port": 8998}


def workers(world: MemoryWorld, **over: Any) -> tuple[FakeWorker, FakeWorker]:
    prefill = FakeWorker(world, "p", role="prefill", **ENDPOINT)
    return prefill, FakeWorker(world, "d", role="decode", **over)


def meeting(assignment: Assignment) -> BootstrapInfo:
    info = assignment.request.bootstrap_info
    assert info is not None
    return info


@pytest.mark.parametrize("ahead_ms", [-3_600_000, 3_600_000])
@scenario_test
async def test_end_of_a_meeting_is_by_the_brokers_clock_at_a_router_with_another_one(
    world: MemoryWorld, ahead_ms: int
) -> None:
    prefill, decode = workers(world)
    clock = VirtualClock(world.clock._loop, ahead_ms=ahead_ms)
    await start_router(world, clock=clock, handover_timeout_s=5)
    append_record(world, REQUESTS, LONG)
    first, second = await assigned(world, prefill), await assigned(world, decode)
    assert first.handoff_until_ms == second.handoff_until_ms
    assert 0 < first.handoff_until_ms - world.broker.now_ms() < 10_000


def reasons(world: MemoryWorld) -> list[str]:
    return [f.reason for f in read_records(world, LEDGER, Fencing)]


def cancelled(worker: FakeWorker) -> list[tuple[str, str]]:
    return [(c.phase, c.reason) for c in worker.received(CancelRun)]


@scenario_test
async def test_decode_is_dispatched_beside_its_prefill(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    first, second = await assigned(world, prefill), await assigned(world, decode)
    assert (first.phase, first.attempt) == ("prefill", 0)
    assert (second.phase, second.attempt) == ("decode", 0)
    assert meeting(first) == meeting(second)
    assert (meeting(first).bootstrap_host, meeting(first).bootstrap_port) == ("10.0.0.7", 8998)
    assert 0 <= meeting(first).bootstrap_room < 2**63
    assert first.request.stop.max_tokens == 1
    assert second.request.stop == LONG.stop
    assert second.request.hints.prefill_worker_id == "p"
    assert second.request.prefill_result is None
    assert first.handoff_until_ms == second.handoff_until_ms > world.broker.now_ms() + 9000
    decisions = [(d.phase, d.worker) for d in read_records(world, LEDGER, Assigned)]
    assert decisions == [("prefill", "p"), ("decode", "d")]


@scenario_test
async def test_answer_of_a_decode_that_has_met_its_prefill(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    router = await start_router(world)
    append_record(world, REQUESTS, LONG)
    first, second = await assigned(world, prefill), await assigned(world, decode)
    run = decode.start(second)
    prefill.hand_over(first, b"")
    append_record(world, LEDGER, PrefillDone(run=1, **run))
    append_record(world, RESPONSES, chunk(0, 70, text="x", chars=1, finish_reason="stop"))
    decode.finish(run, "stop")
    await world.sleep(150)  # past the deadline
    assert not read_records(world, RESPONSES, End)
    assert not read_records(world, RESPONSES, Fence)
    assert len(decode.received(Assignment)) == 1
    assert not any(owner._dispatcher.handovers.open_count for owner in router._owners.values())


@scenario_test
async def test_room_has_the_rank_of_the_prefill_and_is_never_repeated(world: MemoryWorld) -> None:
    prefill = FakeWorker(world, "p", role="prefill", ranks=3, **ENDPOINT)
    decode = FakeWorker(world, "d", role="decode")
    await start_router(world)
    for n in range(6):
        hints = Hints(prefill_worker_id="p", prefill_dp_rank=n % 3)
        append_record(world, REQUESTS, replace(LONG, id=f"{n}", hints=hints))
    await assigned(world, prefill, 6)
    await assigned(world, decode, 6)
    given = prefill.received(Assignment)
    assert sorted(a.rank for a in given) == [0, 0, 1, 1, 2, 2]
    assert all(meeting(a).bootstrap_room % 3 == a.rank for a in given)
    assert all(a.request.hints.prefill_dp_rank == a.rank for a in given)
    rooms = {a.request.id: meeting(a) for a in given}
    assert len({room.bootstrap_room for room in rooms.values()}) == 6
    assert {a.request.id: meeting(a) for a in decode.received(Assignment)} == rooms


@scenario_test
async def test_failed_prefill_ends_the_run_of_decode(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    run = prefill.start(await assigned(world, prefill))
    decode.start(await assigned(world, decode))
    prefill.finish(run, "error", message="out of memory")
    whole = await assigned(world, decode, 2)
    assert (whole.phase, whole.attempt) == ("aggregated", 1)
    assert whole.request.bootstrap_info is None
    assert reasons(world) == ["retryable"]
    assert cancelled(decode) == [("decode", "retryable")]


@scenario_test
async def test_death_of_the_prefill_worker_ends_the_run_of_decode(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.start(await assigned(world, prefill))
    decode.start(await assigned(world, decode))
    prefill.heartbeat_task.cancel()
    whole = await assigned(world, decode, 2)
    assert (whole.phase, whole.attempt) == ("aggregated", 1)
    assert reasons(world) == ["lost"]


@scenario_test
async def test_death_of_the_prefill_worker_after_the_first_token_changes_nothing(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.start(await assigned(world, prefill))
    run = decode.start(await assigned(world, decode))
    append_record(world, LEDGER, PrefillDone(run=1, **run))
    prefill.heartbeat_task.cancel()
    await world.sleep(20)
    assert not reasons(world)
    append_record(world, RESPONSES, chunk(0, 70, text="x", chars=1, finish_reason="stop"))
    decode.finish(run, "stop")
    await world.sleep(150)
    assert not read_records(world, RESPONSES, End)


@scenario_test
async def test_refused_prefill_is_computed_again(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world, max_attempts=1)  # a refusal is no failure
    append_record(world, REQUESTS, LONG)
    room = meeting(await assigned(world, prefill))
    decode.start(await assigned(world, decode))
    prefill.reject(prefill.received(Assignment)[0])
    again, second = await assigned(world, prefill, 2), await assigned(world, decode, 2)
    assert (again.phase, again.attempt, second.phase) == ("prefill", 1, "decode")
    assert meeting(again) == meeting(second) != room
    assert cancelled(decode)[0] == ("decode", "worker_full")


@scenario_test
async def test_refused_decode_begins_with_another_prefill_in_another_room(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world)
    await start_router(world, max_attempts=1)
    append_record(world, REQUESTS, LONG)
    first = await assigned(world, prefill)
    prefill.start(first)
    decode.reject(await assigned(world, decode))
    again = await assigned(world, prefill, 2)
    assert (again.phase, again.attempt) == ("prefill", 1)
    assert meeting(again) != meeting(first)
    assert cancelled(prefill) == [("prefill", "worker_full")]


@scenario_test
async def test_decode_that_waited_in_vain_makes_the_rest_whole(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.start(await assigned(world, prefill))
    run = decode.start(await assigned(world, decode))
    decode.finish(run, "broken", message="the blocks were not transferred in time")
    whole = await assigned(world, decode, 2)
    assert (whole.phase, whole.attempt) == ("aggregated", 1)


@scenario_test
async def test_death_of_the_decode_worker_in_the_middle_of_an_answer(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    other = FakeWorker(world, "d2", role="decode", state="draining")
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill), b"")
    run = decode.start(await assigned(world, decode))
    append_record(world, RESPONSES, chunk(0, 70, text="x", chars=1))
    append_record(world, LEDGER, PrefillDone(run=1, **run))
    other.state = "ready"
    decode.heartbeat_task.cancel()
    rest = await assigned(world, other)
    assert (rest.phase, rest.attempt) == ("aggregated", 1)
    assert list(unpack_tokens(rest.taken)) == [70]
    assert rest.request.bootstrap_info is None


@scenario_test
async def test_prefill_without_a_decode_worker_in_time_begins_the_next_attempt(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=3)
    append_record(world, REQUESTS, replace(LONG, id="b", token_ids=pack_tokens([1, 2])))
    prefill.start(await assigned(world, prefill))
    busy = decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, LONG)
    # New prompts wait behind those that wait for a decode worker, so this one is alone.
    prefill.start(await assigned(world, prefill, 2))
    await wait_for_items(world, lambda: read_records(world, LEDGER, Fencing))
    assert reasons(world) == ["handover_unused"]
    again = await assigned(world, prefill, 3)
    assert (again.phase, again.attempt, again.request.id) == ("prefill", 1, "a")
    decode.finish(busy, "stop")
    second = await assigned(world, decode, 2)
    assert (second.phase, second.attempt) == ("decode", 1)
    assert meeting(second) == meeting(again)


@scenario_test
async def test_next_owner_begins_again_when_the_prefill_without_decode_has_ended(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world, max_runs=1)
    router = await start_router(world)
    append_record(world, REQUESTS, replace(LONG, id="b", token_ids=pack_tokens([1, 2])))
    prefill.start(await assigned(world, prefill))
    busy = decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, LONG)
    run = prefill.start(await assigned(world, prefill, 2))
    await router.stop()
    await start_router(world, "r2")
    decode.finish(busy, "stop")
    await world.sleep(3)
    assert len(decode.received(Assignment)) == 1
    prefill.finish(run, "broken", message="the blocks were not transferred in time")
    whole = await assigned(world, decode, 2)
    assert (whole.phase, whole.attempt, whole.request.id) == ("aggregated", 1, "a")


@scenario_test
async def test_cancel_leaves_the_meeting_of_both_runs_to_their_workers(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    router = await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.start(await assigned(world, prefill))
    decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, Cancel(id="a"))
    await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    assert [end.code for end in read_records(world, RESPONSES, End)] == ["cancelled"]
    assert cancelled(prefill)[0] == ("prefill", "cancelled")
    assert cancelled(decode)[0] == ("decode", "cancelled")
    await world.sleep(5)
    assert len(decode.received(Assignment)) == 1
    assert not any(owner._dispatcher.handovers.open_count for owner in router._owners.values())


@scenario_test
async def test_cancel_before_decode_has_room_still_dispatches_it(world: MemoryWorld) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world)
    append_record(world, REQUESTS, replace(LONG, id="b", token_ids=pack_tokens([1, 2])))
    prefill.start(await assigned(world, prefill))
    busy = decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, LONG)
    first = await assigned(world, prefill, 2)
    await world.sleep(1)
    append_record(world, REQUESTS, Cancel(id="a"))
    await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert not read_records(world, LEDGER, Ended)
    decode.finish(busy, "stop")
    second = await assigned(world, decode, 2)
    assert second.request.stop.max_tokens == 1
    assert meeting(second) == meeting(first)
    await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))


@scenario_test
async def test_next_owner_goes_on_with_both_runs(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    router = await start_router(world)
    for name in ("a", "b"):
        append_record(world, REQUESTS, replace(LONG, id=name))
    first, _ = prefill.start(await assigned(world, prefill)), await assigned(world, decode, 2)
    prefill.start(prefill.received(Assignment)[1])
    for second in decode.received(Assignment):
        decode.start(second)
    await world.sleep(1)
    await router.stop()
    await start_router(world, "r2")
    await world.sleep(5)
    assert not read_records(world, LEDGER, Fencing)
    prefill.finish(first, "broken")
    whole = await assigned(world, decode, 3)
    assert (whole.phase, whole.attempt, whole.request.id) == ("aggregated", 1, first["id"])
    assert len(read_records(world, LEDGER, Fencing, first["id"])) == 1
