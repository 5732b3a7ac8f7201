"""Tests of failover in a router: requests move on when workers, runs or routers fail."""

from __future__ import annotations

import asyncio

from kvlane.streams.codecs import decode, unpack_tokens
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Assigned,
    Assignment,
    CancelRun,
    End,
    Ended,
    Fence,
    Fencing,
    Lost,
    RunProgress,
    Tombstone,
    Usage,
)
from kvlane.streams.request import GuidedDecoding, Request, SamplingOptions, StopConditions
from kvlane.streams.topics import ASSIGNMENTS, LEDGER, REGISTRY, REQUESTS, RESPONSES
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    begin_run,
    chunk,
    never_read,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test


@scenario_test
async def test_lost_worker_is_declared_and_its_stream_continues_elsewhere(
    world: MemoryWorld,
) -> None:
    first = FakeWorker(world, "w1")
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (assignment,) = await wait_for_items(world, lambda: first.received(Assignment))
    first.start(assignment)
    append_record(world, RESPONSES, chunk(0, 7, 8, text="ab", chars=2))
    second = FakeWorker(world, "w2")
    first.heartbeat_task.cancel()
    (again,) = await wait_for_items(world, lambda: second.received(Assignment))
    assert list(unpack_tokens(again.taken)) == [7, 8]
    assert again.taken_chars == 2
    assert again.attempt == 1
    assert again.deadline_ms == assignment.deadline_ms
    (lost,) = first.received(Lost)
    assert lost.epoch == first.epoch
    assert lost.silent_ms > 5000
    assert [f.attempt for f in read_records(world, RESPONSES, Fence)] == [1]
    assert [f.reason for f in read_records(world, LEDGER, Fencing)] == ["lost"]
    cards = [decode(r) for r in world.records(REGISTRY, 0)]
    assert Tombstone(key="worker/w1", epoch=first.epoch) in cards


@scenario_test
async def test_chunks_after_the_fence_are_not_carried_over(world: MemoryWorld) -> None:
    first = FakeWorker(world, "w1")
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    run = first.start((await wait_for_items(world, lambda: first.received(Assignment)))[0])
    append_record(world, RESPONSES, chunk(0, 7))
    append_record(world, RESPONSES, Fence(id="a", attempt=1))
    append_record(world, RESPONSES, chunk(1, 8, seq=1))
    second = FakeWorker(world, "w2")
    first.finish(run, "broken")
    (again,) = await wait_for_items(world, lambda: second.received(Assignment))
    assert list(unpack_tokens(again.taken)) == [7]


@scenario_test
async def test_stream_that_had_ended_before_the_fence_is_closed_as_seen(world: MemoryWorld) -> None:
    worker = (await begin_run(world)).worker
    append_record(world, RESPONSES, chunk(0, 7, finish_reason="stop"))
    worker.heartbeat_task.cancel()
    assert [
        e.code for e in await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    ] == ["seen"]
    assert read_records(world, RESPONSES, End) == []
    assert len(worker.received(Assignment)) == 1


@scenario_test
async def test_answer_that_was_whole_but_for_its_last_chunk_ends_as_length(
    world: MemoryWorld,
) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    limited = Request(
        id="a", model="demo", token_ids=PROMPT.token_ids, stop=StopConditions(max_tokens=2)
    )
    append_record(world, REQUESTS, limited)
    run = worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    append_record(world, RESPONSES, chunk(0, 7, 8))
    worker.finish(run, "broken")
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "length"
    assert end.usage == Usage(prompt_tokens=3, completion_tokens=2)
    assert len(worker.received(Assignment)) == 1


@scenario_test
async def test_request_that_stalled_two_engines_before_its_first_token_is_moved_to_no_third(
    world: MemoryWorld,
) -> None:
    workers = [FakeWorker(world, name) for name in ("w1", "w2", "w3")]
    await start_router(world, max_attempts=5)
    append_record(world, REQUESTS, PROMPT)
    for attempt in range(2):
        await world.wait_until(lambda n=attempt: len(read_records(world, LEDGER, Assigned)) > n)
        assigned = read_records(world, LEDGER, Assigned)[-1]
        worker = next(w for w in workers if w.name == assigned.worker)
        run = worker.start(worker.received(Assignment)[-1])
        worker.finish(run, "broken", stalled=True, message="the engine stalls")
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "attempts"
    assert "2 workers stalled before its first token" in end.message
    await world.sleep(5)
    assert len(read_records(world, LEDGER, Assigned)) == 2


@scenario_test
async def test_request_that_fails_on_every_worker_ends_with_attempts(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world, max_attempts=2)
    append_record(world, REQUESTS, PROMPT)
    for n in range(2):
        run = worker.start(
            (await wait_for_items(world, lambda: worker.received(Assignment), n + 1))[n]
        )
        worker.finish(run, "broken")
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "attempts"
    assert len(worker.received(Assignment)) == 2


@scenario_test
async def test_lost_assignment_is_found_and_repeated(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (_assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    worker.slot_offset = 1  # read past it, and never took it
    await wait_for_items(world, lambda: worker.received(Assignment), 2)
    assert [f.reason for f in read_records(world, LEDGER, Fencing)] == ["not_started"]


@scenario_test
async def test_listed_run_that_is_slow_to_start_is_kept(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    await wait_for_items(world, lambda: worker.received(Assignment))
    worker.running = [RunProgress(id="a", attempt=0, phase="aggregated")]
    worker.slot_offset = 1
    await world.sleep(20)
    assert len(worker.received(Assignment)) == 1


@scenario_test
async def test_run_unlisted_by_its_worker_is_restarted(world: MemoryWorld) -> None:
    worker = (await begin_run(world)).worker
    await world.sleep(3)
    worker.running = []
    await wait_for_items(world, lambda: worker.received(Assignment), 2)
    assert [f.reason for f in read_records(world, LEDGER, Fencing)] == ["broken"]


@scenario_test
async def test_run_found_broken_by_its_check_is_restarted(world: MemoryWorld) -> None:
    worker, other = FakeWorker(world), FakeWorker(world, "w2")
    other.state = "draining"
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    await world.sleep(10)  # it does not read its slot, and the router waits for it to do so
    run = {"id": "a", "attempt": 0, "phase": "aggregated", "worker": "w1"}
    other.state = "ready"
    worker.finish(run | {"epoch": worker.epoch}, "broken")
    (again,) = await wait_for_items(world, lambda: other.received(Assignment))
    assert again.attempt == assignment.attempt + 1


@scenario_test
async def test_superseded_run_that_continues_is_cancelled_and_an_unknown_one_is_not(
    world: MemoryWorld,
) -> None:
    first, second = FakeWorker(world, "w1"), FakeWorker(world, "w2")
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    await world.wait_until(
        lambda: len(first.received(Assignment)) + len(second.received(Assignment)) == 1
    )
    worker = first if first.received(Assignment) else second
    run = worker.start(worker.received(Assignment)[0])
    worker.finish(run, "broken")
    worker.running = [
        RunProgress(id="a", attempt=0, phase="aggregated"),
        RunProgress(id="strange", attempt=0, phase="aggregated"),
    ]
    cancels = await wait_for_items(world, lambda: worker.received(CancelRun), 2)
    assert {(c.id, c.attempt) for c in cancels} == {("a", 0)}


@scenario_test
async def test_run_is_not_cancelled_before_its_fence_is_written(world: MemoryWorld) -> None:
    """Its last word would be the end of a request that nobody cancelled."""
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    worker.start(assignment)
    world.faults.next_fates(RESPONSES, *[AppendFate.LOST] * 1000)
    append_record(world, LEDGER, Fencing(id="a", attempt=1, reason="broken"))
    await world.sleep(10.0)
    assert not read_records(world, RESPONSES, Fence)
    assert not worker.received(CancelRun)
    world.faults.fates.clear()
    cancels = await wait_for_items(world, lambda: worker.received(CancelRun))
    assert {(c.id, c.attempt) for c in cancels} == {("a", 0)}
    assert read_records(world, RESPONSES, Fence)


@scenario_test
async def test_fenced_run_is_cancelled_while_its_request_is_queued(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    worker.start(assignment)
    worker.state = "draining"  # goes on with what it has, takes nothing
    await world.sleep(2.0)
    append_record(world, LEDGER, Fencing(id="a", attempt=1, reason="broken"))
    cancels = await wait_for_items(world, lambda: worker.received(CancelRun), 2)
    assert {(c.id, c.attempt) for c in cancels} == {("a", 0)}
    assert len(worker.received(Assignment)) == 1


@scenario_test
async def test_another_router_takes_over_where_the_first_one_died(world: MemoryWorld) -> None:
    """Between Assigned and Assignment: only the ledger knows of the decision."""
    worker = FakeWorker(world)
    first = await start_router(world, "r1")
    world.faults.next_fates(ASSIGNMENTS, *[AppendFate.LOST] * 1000)
    append_record(world, REQUESTS, PROMPT)
    await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned))
    await first.stop()
    await first._ctx.cancel_tasks()
    world.faults.fates.clear()
    worker.slot_offset = 0
    await start_router(world, "r2")
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    assert assignment.attempt == 1
    assert assignment.request == PROMPT


@scenario_test
async def test_queued_requests_of_a_dead_router_are_recovered(world: MemoryWorld) -> None:
    first = await start_router(world, "r1")
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(2)
    first._log.kill()  # type: ignore[attr-defined]
    await asyncio.wait_for(first._ctx.cancel_tasks(), 5)
    await start_router(world, "r2")
    worker = FakeWorker(world)
    await wait_for_items(world, lambda: worker.received(Assignment))


@scenario_test
async def test_routers_with_the_same_records_have_the_same_queue(world: MemoryWorld) -> None:
    workers = [FakeWorker(world, f"w{n}") for n in range(3)]
    routers = [await start_router(world, f"r{n}") for n in range(3)]
    for n in range(20):
        append_record(
            world, REQUESTS, Request(id=f"a{n}", model="demo", token_ids=PROMPT.token_ids)
        )
    await world.wait_until(lambda: sum(len(w.received(Assignment)) for w in workers) == 20)
    workers[0].heartbeat_task.cancel()
    await world.sleep(20)
    for lane in range(world.lanes):
        source = Partition(LEDGER, lane)
        assert len({r._ledger.position(source) for r in routers}) == 1
        assert len({r._ledger.state_hash(source) for r in routers}) == 1
    assert all(not r._context.queue.inputs.unconfirmed for r in routers)


@scenario_test
async def test_answer_that_had_reached_its_end_of_text_ends_as_stop(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, Request(id="a", model="demo", eos_token_ids=(8,)))
    run = worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    append_record(world, RESPONSES, chunk(0, 7, 8))
    worker.finish(run, "broken")
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "stop"
    assert len(worker.received(Assignment)) == 1


@scenario_test
async def test_guided_answer_is_not_continued_in_its_middle(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    guided = SamplingOptions(guided_decoding=GuidedDecoding(regex="a*"))
    append_record(world, REQUESTS, Request(id="a", model="demo", sampling=guided))
    run = worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    worker.finish(run, "broken")
    run = worker.start((await wait_for_items(world, lambda: worker.received(Assignment), 2))[1])
    append_record(world, RESPONSES, chunk(0, 7, attempt=1))
    worker.finish(run, "broken")
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "lost"
    assert "guided decoding" in end.message


@scenario_test
async def test_guided_answer_continues_only_on_an_engine_that_can(world: MemoryWorld) -> None:
    able = FakeWorker(world, "w1", continues_guided=True)
    await start_router(world)
    guided = SamplingOptions(guided_decoding=GuidedDecoding(regex="a*"))
    append_record(world, REQUESTS, Request(id="a", model="demo", sampling=guided))
    run = able.start((await wait_for_items(world, lambda: able.received(Assignment)))[0])
    append_record(world, RESPONSES, chunk(0, 7))
    unable = FakeWorker(world, "w2")
    await world.sleep(2)
    able.finish(run, "broken")
    again = (await wait_for_items(world, lambda: able.received(Assignment), 2))[1]
    assert list(unpack_tokens(again.taken)) == [7]
    assert not unable.received(Assignment)


@scenario_test
async def test_guided_answer_waits_for_an_engine_that_can(world: MemoryWorld) -> None:
    first = FakeWorker(world, "w1", continues_guided=True)
    await start_router(world)
    guided = SamplingOptions(guided_decoding=GuidedDecoding(regex="a*"))
    append_record(world, REQUESTS, Request(id="a", model="demo", sampling=guided))
    first.start((await wait_for_items(world, lambda: first.received(Assignment)))[0])
    append_record(world, RESPONSES, chunk(0, 7))
    first.heartbeat_task.cancel()
    await wait_for_items(world, lambda: read_records(world, RESPONSES, Fence))
    await world.sleep(5)
    second = FakeWorker(world, "w2", continues_guided=True)
    (again,) = await wait_for_items(world, lambda: second.received(Assignment))
    assert list(unpack_tokens(again.taken)) == [7]


@scenario_test
async def test_request_that_cannot_be_read_in_time_is_lost(world: MemoryWorld) -> None:
    worker, router, run = await begin_run(world)
    router._context.scanner.fetch_request = never_read  # type: ignore[method-assign]
    worker.finish(run, "broken")
    await world.sleep(95)
    assert read_records(world, RESPONSES, End) == []
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "lost"
    assert "could not be read" in end.message
