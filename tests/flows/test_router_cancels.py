"""Tests of cancels in a router: of requests, and of prompts that were refused before."""

from __future__ import annotations

import random
from functools import partial

import pytest
from msgspec.structs import replace

from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.codecs import decode
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.records import Assignment, Cancel, CancelRun, End, Ended, Fence, Refused
from kvlane.streams.request import Request
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES, lane_of
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
from tests.harness.gateway_harness import memory_settings
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import connect, read


async def wait_cancelled(world: MemoryWorld, within_s: float) -> None:
    """Wait for the only End, which must be that of a cancelled request."""
    await world.wait_until(lambda: bool(read_records(world, RESPONSES, End)), within_s)
    assert [e.code for e in read_records(world, RESPONSES, End)] == ["cancelled"]


@scenario_test
async def test_queued_request_can_be_cancelled(world: MemoryWorld) -> None:
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(1)
    append_record(world, REQUESTS, Cancel(id="a"))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "cancelled"
    worker = FakeWorker(world)
    await world.sleep(3)
    assert worker.received(Assignment) == []


@scenario_test
async def test_request_and_its_cancel_of_one_poll_do_not_wait_for_a_worker(
    world: MemoryWorld,
) -> None:
    append_record(world, REQUESTS, PROMPT)
    offset = append_record(world, REQUESTS, Cancel(id="a"))
    await start_router(world)
    await wait_cancelled(world, within_s=2)
    group = world.broker.group(REQUESTS, "router")
    await world.wait_until(lambda: group.committed.get(lane_of("a", world.lanes)) == offset + 1)


@scenario_test
async def test_cancel_precedes_earlier_records_and_waits_as_well(world: MemoryWorld) -> None:
    append_record(world, REQUESTS, PROMPT)
    append_record(world, REQUESTS, Refused(id="a", code="invalid"))
    append_record(world, REQUESTS, Cancel(id="a"))
    await start_router(world)
    await wait_cancelled(world, within_s=2)


@scenario_test
async def test_request_that_waits_for_another_worker_can_be_cancelled(world: MemoryWorld) -> None:
    worker, _, run = await begin_run(world)
    worker.state = "draining"
    worker.send_heartbeat()
    worker.finish(run, "broken")
    await wait_for_items(world, lambda: read_records(world, RESPONSES, Fence))
    await world.sleep(1)
    append_record(world, REQUESTS, Cancel(id="a"))
    await wait_cancelled(world, within_s=2)


@scenario_test
async def test_cancel_during_a_fence_is_not_delayed(world: MemoryWorld) -> None:
    worker, _, run = await begin_run(world)
    worker.state = "draining"
    worker.send_heartbeat()
    world.faults.slow["append"] = 0.5
    worker.finish(run, "broken")
    await world.sleep(0.6)  # Fencing stands, Fence does not
    append_record(world, REQUESTS, Cancel(id="a"))
    await wait_cancelled(world, within_s=5)


@scenario_test
async def test_cancel_does_not_wait_for_a_heartbeat_that_never_comes(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    await wait_for_items(world, lambda: worker.received(Assignment))
    await world.sleep(10)  # it never reads its slot: the router waits to see whether it has
    append_record(world, REQUESTS, Cancel(id="a"))
    await wait_cancelled(world, within_s=2)


@scenario_test
async def test_cancel_precedes_the_wait_for_a_heartbeat(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    await wait_for_items(world, lambda: worker.received(Assignment))
    world.faults.slow["offsets"] = 1.0  # the first questions of the search take 4 seconds
    await world.sleep(4)
    append_record(world, REQUESTS, Cancel(id="a"))
    world.faults.slow.clear()
    await wait_cancelled(world, within_s=8)


@scenario_test
async def test_cancel_does_not_wait_for_an_unreadable_log(world: MemoryWorld) -> None:
    worker, router, run = await begin_run(world)
    router._context.scanner.fetch_request = never_read  # type: ignore[method-assign]
    worker.finish(run, "broken")
    await wait_for_items(world, lambda: read_records(world, RESPONSES, Fence))
    await world.sleep(1)
    append_record(world, REQUESTS, Cancel(id="a"))
    await wait_cancelled(world, within_s=1)


@scenario_test
async def test_two_concurrent_cancels_of_a_queued_request_both_finish(world: MemoryWorld) -> None:
    await start_router(world)
    offset = append_record(world, REQUESTS, PROMPT)
    await world.sleep(1)
    for _ in range(2):
        append_record(world, REQUESTS, Cancel(id="a"))
    await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    group = world.broker.group(REQUESTS, "router")
    await world.wait_until(lambda: group.committed.get(lane_of("a", world.lanes)) == offset + 3)


@scenario_test
async def test_running_request_is_cancelled_for_reader_worker_and_ledger(
    world: MemoryWorld,
) -> None:
    worker = (await begin_run(world)).worker
    append_record(world, REQUESTS, Cancel(id="a"))
    await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    assert [e.code for e in read_records(world, RESPONSES, End)] == ["cancelled"]
    assert next((c.id, c.attempt) for c in worker.received(CancelRun)) == ("a", 0)


@scenario_test
async def test_cancel_of_an_unknown_id_leaves_no_trace(world: MemoryWorld) -> None:
    await start_router(world)
    append_record(world, REQUESTS, Cancel(id="a"))
    await world.sleep(3)
    assert read_records(world, RESPONSES, End) == []
    assert read_records(world, LEDGER, Ended) == []


@scenario_test
async def test_refused_prompt_is_ended_visibly_unless_its_id_is_in_use(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, Refused(id="b", code="invalid", message="messages: is empty"))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End, "b"))
    assert (end.code, end.message) == ("invalid", "messages: is empty")
    append_record(world, REQUESTS, PROMPT)
    await wait_for_items(world, lambda: worker.received(Assignment))
    append_record(world, REQUESTS, Refused(id="a", code="invalid"))
    await world.sleep(1)
    assert read_records(world, RESPONSES, End) == []


@scenario_test
async def test_cancel_is_exact_however_full_the_queue_is(world: MemoryWorld) -> None:
    """It takes effect at once, on its request alone, and its place goes to the next one."""
    worker = FakeWorker(world, state="draining")
    await start_router(world, max_queued_requests=3)
    for name in ("h0", "h1", "h2", "too-many"):
        append_record(world, REQUESTS, replace(PROMPT, id=name))
        await world.sleep(0.1)
    (refused,) = await wait_for_items(
        world, lambda: read_records(world, RESPONSES, End, "too-many")
    )
    assert refused.code == "queue_full"
    began = world.clock.now()
    append_record(world, REQUESTS, Cancel(id="h1", reason="enough"))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End, "h1"))
    assert end.code == "cancelled"
    assert world.clock.now() - began < 0.2
    append_record(world, REQUESTS, replace(PROMPT, id="next"))
    await world.sleep(1.0)
    assert not read_records(world, RESPONSES, End, "next")
    worker.state = "ready"
    await world.wait_until(lambda: len(worker.received(Assignment)) == 3)
    assert {a.request.id for a in worker.received(Assignment)} == {"h0", "h2", "next"}


@scenario_test
async def test_running_request_is_cancelled_though_the_queue_is_full(world: MemoryWorld) -> None:
    worker = (await begin_run(world, max_queued_requests=1)).worker
    worker.state = "draining"
    await world.sleep(2.0)
    for name in ("h0", "too-many"):
        append_record(world, REQUESTS, replace(PROMPT, id=name))
        await world.sleep(0.1)
    assert read_records(world, RESPONSES, End, "too-many")
    append_record(world, REQUESTS, Cancel(id="a", reason="enough"))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "cancelled"
    assert await wait_for_items(world, lambda: worker.received(CancelRun))
    await world.sleep(5.0)
    assert not read_records(world, RESPONSES, End, "h0")


@scenario_test
async def test_cancels_of_many_unknown_ids_query_the_broker_a_few_times(world: MemoryWorld) -> None:
    await start_router(world)
    await world.sleep(2)
    world.faults.slow["offsets"] = 0.05
    world.faults.sent.clear()
    for n in range(300):
        append_record(world, REQUESTS, Cancel(id=f"unknown-{n}"))
    group = world.broker.group(REQUESTS, "router")
    await world.wait_until(lambda: sum(group.committed.values()) == 300)
    assert world.faults.sent.count("offsets") < 20


@scenario_test
async def test_worker_hears_of_a_cancel_when_readers_have_the_end_that_names_its_reason(
    world: MemoryWorld,
) -> None:
    """A worker may end the run at once, and an append of the End may take long."""
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    run = worker.start(assignment)
    append_record(world, RESPONSES, chunk(0, 70, text="x", chars=1))
    await world.sleep(1)
    world.faults.slow["append"] = 2.0
    append_record(world, REQUESTS, Cancel(id="a", reason="its client left"))
    await wait_for_items(world, lambda: worker.received(CancelRun))
    append_record(world, RESPONSES, chunk(1, seq=1, finish_reason="cancelled"))
    worker.finish(run, "cancelled")
    *_, last = await read(await connect(world), "a")
    assert isinstance(last, End)
    assert (last.code, last.message) == ("cancelled", "its client left")


async def start_killable_router(world: MemoryWorld, name: str) -> tuple[MemoryLog, ProcessContext]:
    log = await world.connect(name)
    ctx = ProcessContext(name, world.clock, random.Random(name))
    await Router(log, memory_settings(), ctx).start()
    return log, ctx


@pytest.mark.parametrize(
    ("cancelled_after_s", "killed_after_s"),
    [(0.0, 0.0), (0.0, 0.9), (0.0, 1.2), (0.5, 1.5), (0.0, 2.5), (1.5, 0.6)],
)
@partial(scenario_test, lanes=1)
async def test_cancel_between_a_batch_request_and_its_renewal_outlives_the_owner(
    world: MemoryWorld, cancelled_after_s: float, killed_after_s: float
) -> None:
    worker = FakeWorker(world, max_num_seqs=1, max_runs=1)
    log, ctx = await start_killable_router(world, "r1")
    append_record(world, REQUESTS, replace(PROMPT, deadline_s=599.0))
    (first,) = await wait_for_items(world, lambda: worker.received(Assignment))
    run = worker.start(first)
    waiting = replace(PROMPT, id="b", service_class="batch", deadline_s=7000.0)
    append_record(world, REQUESTS, replace(waiting, queued_ms=world.clock.wall_ms()))
    await world.sleep(298)
    world.faults.slow["append"] = 1.0  # so long the renewed record is on its way
    await world.sleep(2 + cancelled_after_s)
    append_record(world, REQUESTS, Cancel(id="b"))
    await world.wait_until(lambda: len(renewed_records(world)) == 1, within_s=30)
    await world.sleep(killed_after_s)
    log.kill()
    await ctx.cancel_tasks()
    world.faults.slow.clear()
    await start_killable_router(world, "r2")
    await world.sleep(10)
    worker.finish(run, "stop")
    await world.sleep(30)
    assert [each.request.id for each in worker.received(Assignment)] == ["a"]
    assert {end.code for end in read_records(world, RESPONSES, End, "b")} == {"cancelled"}
    end_of_lane = len(world.records(REQUESTS, 0))
    group = world.broker.group(REQUESTS, "router")
    await world.wait_until(lambda: group.committed.get(0) == end_of_lane, within_s=10)


def renewed_records(world: MemoryWorld) -> list[Request]:
    found = map(decode, world.records(REQUESTS, 0))
    return [record for record in found if isinstance(record, Request) and record.is_renewed]
