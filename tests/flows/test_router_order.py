"""Tests of the order in which a router appends: each record after the one before it is in the
log."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.records import (
    Assigned,
    Assignment,
    Cancel,
    CancelRun,
    End,
    Ended,
    Fence,
    Fencing,
    Started,
    Tombstone,
)
from kvlane.streams.topics import (
    ASSIGNMENTS,
    KV_EVENTS,
    LEDGER,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    lane_of,
)
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    begin_run,
    chunk,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test

NEVER = [AppendFate.LOST] * 1000


def watch_appends(world: MemoryWorld) -> list[str]:
    """The topics of all appends of clients from now on, in the order they reach the broker."""
    topics: list[str] = []
    fate = world.faults.fate

    def watched(client: str, topic: str, partition: int, entries: int) -> AppendFate:
        if topic != KV_EVENTS:
            topics.append(topic)
        return fate(client, topic, partition, entries)

    world.faults.fate = watched  # type: ignore[method-assign]
    return topics


@scenario_test
async def test_no_run_is_cancelled_before_its_end_is_readable(world: MemoryWorld) -> None:
    """Otherwise the worker's last Chunk, `cancelled`, could be the visible end of a deadline."""
    worker = (await begin_run(world)).worker
    await world.sleep(2)
    world.faults.next_fates(RESPONSES, *NEVER)
    append_record(world, REQUESTS, Cancel(id="a"))
    await world.sleep(10)
    assert worker.received(CancelRun) == []
    assert read_records(world, LEDGER, Ended) == []
    world.faults.fates.clear()
    await wait_for_items(world, lambda: worker.received(CancelRun))
    assert read_records(world, RESPONSES, End)


@scenario_test
async def test_request_is_discharged_after_its_runs_were_cancelled(world: MemoryWorld) -> None:
    await begin_run(world)
    await world.sleep(2)
    topics = watch_appends(world)
    append_record(world, REQUESTS, Cancel(id="a"))
    await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    assert topics == [RESPONSES, ASSIGNMENTS, LEDGER]


@scenario_test
async def test_possibly_active_run_is_cancelled_after_its_fence(world: MemoryWorld) -> None:
    """Before it, the last Chunk of a cancelled run would be the end of its request."""
    worker = (await begin_run(world)).worker
    await world.sleep(2)
    world.faults.next_fates(RESPONSES, *NEVER)
    worker.running = []  # it is alive, and says no more of it
    await wait_for_items(world, lambda: read_records(world, LEDGER, Fencing))
    await world.sleep(5)
    assert worker.received(CancelRun) == []
    world.faults.fates.clear()
    await wait_for_items(world, lambda: worker.received(CancelRun))
    assert read_records(world, RESPONSES, Fence)


@scenario_test
async def test_attempt_of_another_router_is_left_to_it(world: MemoryWorld) -> None:
    first, second = FakeWorker(world, "w1"), FakeWorker(world, "w2")
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (got,) = await wait_for_items(
        world, lambda: first.received(Assignment) + second.received(Assignment)
    )
    worker, other = (first, second) if first.received(Assignment) else (second, first)
    run = worker.start(got)
    for n in range(2):
        append_record(world, RESPONSES, chunk(n, 7, seq=n))
    world.faults.next_fates(RESPONSES, *NEVER)
    worker.finish(run, "broken")
    await wait_for_items(world, lambda: read_records(world, LEDGER, Fencing))
    began = {"id": "a", "attempt": 1, "phase": "aggregated", "epoch": other.epoch}
    began |= {"origin": got.origin, "responses_from": 0, "deadline_ms": got.deadline_ms}
    append_record(world, LEDGER, Assigned(worker=other.name, prompt_tokens=3, policy="", **began))
    append_record(world, LEDGER, Started(worker=other.name, run=2, **began))
    world.broker.delete_records(RESPONSES, lane_of("a", world.lanes), 1)  # for one that goes on
    world.faults.fates.clear()
    await wait_for_items(world, lambda: read_records(world, RESPONSES, Fence))
    await world.sleep(1)
    assert len(first.received(Assignment) + second.received(Assignment)) == 1
    assert read_records(world, RESPONSES, End) == []


@scenario_test
async def test_unread_finished_record_precedes_the_verdict(world: MemoryWorld) -> None:
    worker, router, run = await begin_run(world)
    await world.sleep(3)
    async with router._context.ledger_follower.paused():  # it is behind with the ledger
        append_record(world, RESPONSES, chunk(0, 7, finish_reason="stop"))
        worker.finish(run, "stop")
        await world.sleep(10)
    await world.sleep(5)
    assert read_records(world, LEDGER, Fencing) == []
    assert read_records(world, RESPONSES, Fence) == []


@scenario_test
async def test_budget_of_an_assignment_is_the_remaining_time(world: MemoryWorld) -> None:
    worker = FakeWorker(world, state="draining")
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(40)
    worker.state = "ready"
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    assert assignment.budget_s == pytest.approx(PROMPT.deadline_s - 40, abs=3)


@scenario_test
async def test_answer_begins_at_the_end_of_its_lane_however_long_the_lane_is_owned(
    world: MemoryWorld,
) -> None:
    """Retention takes what was there when the lane was opened: from there nothing could go on."""
    first, second = FakeWorker(world, "w1"), FakeWorker(world, "w2")
    second.state = "draining"
    await start_router(world)
    await world.sleep(5)
    world.append(RESPONSES, lane_of("a", world.lanes), replace(chunk(0, 7), id="old"))
    await world.sleep(2 * 3600)
    world.append(RESPONSES, lane_of("a", world.lanes), replace(chunk(0, 7), id="new"))
    await world.sleep(2)
    append_record(world, REQUESTS, PROMPT)
    run = first.start((await wait_for_items(world, lambda: first.received(Assignment)))[0])
    append_record(world, RESPONSES, chunk(0, 7))
    second.state = "ready"
    await world.sleep(1)
    first.finish(run, "broken")
    (again,) = await wait_for_items(world, lambda: second.received(Assignment))
    assert again.attempt == 1
    assert read_records(world, RESPONSES, End) == []


@scenario_test
async def test_finished_requests_leave_no_state(world: MemoryWorld) -> None:
    first, second = FakeWorker(world, "w1"), FakeWorker(world, "w2")
    router = await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (got,) = await wait_for_items(
        world, lambda: first.received(Assignment) + second.received(Assignment)
    )
    worker, other = (first, second) if first.received(Assignment) else (second, first)
    worker.finish(worker.start(got), "broken")
    other.finish(
        other.start((await wait_for_items(world, lambda: other.received(Assignment)))[0]), "stop"
    )
    key = f"worker/{worker.name}"
    worker.heartbeat_task.cancel()
    world.append(REGISTRY, 0, Tombstone(key=key, epoch=worker.epoch), key=key)
    await world.sleep(5)
    for owner in router._owners.values():
        kept = (owner._jobs, owner._records_behind, owner._arrived, owner._failover.fenced)
        assert not any((*kept, owner._waits.waiting_ids, owner.waits))
