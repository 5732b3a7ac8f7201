"""Tests of batch requests: they take the capacity that interactive ones leave, and give way to
them."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from kvlane.app.routing.queueing import batch_class
from kvlane.app.routing.selection.batch_placement import runs_to_preempt
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.streams.codecs import pack_tokens, unpack_tokens
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Assigned,
    Assignment,
    Cancel,
    CancelRun,
    End,
    Fence,
    Fencing,
    LogRecord,
    PrefillDone,
)
from kvlane.streams.request import GuidedDecoding, Hints, Request, SamplingOptions, StopConditions
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES, TOPICS_BY_NAME
from tests.harness.fake_worker import (
    FakeWorker,
    append_record,
    chunk,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test

BATCH = Request(
    id="b", model="demo", token_ids=pack_tokens([7, 8, 9]), deadline_s=100, service_class="batch"
)


def ask(world: MemoryWorld, *ids: str, **over: Any) -> None:
    for name in ids:
        append_record(world, REQUESTS, replace(BATCH, **({"id": name} | over)))


def assigned_ids(worker: FakeWorker) -> list[str]:
    return [each.request.id for each in worker.received(Assignment)]


async def begin_batch_run(world: MemoryWorld, worker: FakeWorker, **over: Any) -> dict[str, Any]:
    """The only run of a worker is of class batch, and has made a token."""
    ask(world, "b", **over)
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    run = worker.start(assignment)
    append_record(world, RESPONSES, replace(chunk(0, 70, text="x", chars=1), id="b"))
    append_record(world, LEDGER, PrefillDone(run=1, **run))
    await world.sleep(1)
    return run


@scenario_test
async def test_batch_run_is_preempted_and_continues_from_its_last_token(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_num_seqs=1)
    router = await start_router(world, max_attempts=1)  # a preemption is no failed attempt
    await begin_batch_run(world, worker)
    ask(world, "a", service_class="interactive")
    (stopped,) = await wait_for_items(world, lambda: worker.received(CancelRun))
    assert (stopped.id, stopped.attempt) == ("b", 0)
    assert [f.reason for f in read_records(world, LEDGER, Fencing, "b")] == ["preempted"]
    assert [f.attempt for f in read_records(world, RESPONSES, Fence, "b")] == [1]
    worker.running = []
    interactive = worker.start(worker.received(Assignment)[-1])
    await world.sleep(20)
    assert assigned_ids(worker) == ["b", "a"]
    worker.finish(interactive, "stop")
    await world.wait_until(lambda: len(worker.received(Assignment)) == 3)
    again = worker.received(Assignment)[-1]
    assert (again.request.id, again.attempt) == ("b", 1)
    assert list(unpack_tokens(again.taken)) == [70]
    page = (await router._context.metrics.page()).decode()
    assert "kvlane_router_preempted_runs_total 1.0" in page


@pytest.mark.parametrize("restarted_at_s", [None, 5, 800])
@partial(scenario_test, lanes=1)
async def test_tokens_of_a_preempted_run_are_used_after_a_peak_of_14_minutes(
    world: MemoryWorld, restarted_at_s: int | None
) -> None:
    worker = FakeWorker(world, max_num_seqs=1)
    router = await start_router(world, "r1")
    await begin_batch_run(world, worker, deadline_s=86_400, queued_ms=world.broker.now_ms())
    ask(world, "a", service_class="interactive")
    await wait_for_items(world, lambda: worker.received(CancelRun))
    worker.running = []
    worker.finish(worker.start(worker.received(Assignment)[-1]), "stop")
    worker.state = "draining"  # the peak takes all of it
    if restarted_at_s is not None:
        await world.sleep(restarted_at_s)
        await router.stop()
        await router._ctx.cancel_tasks()
        await start_router(world, "r2")
    await world.sleep(840 - (restarted_at_s or 0))
    assert read_records(world, RESPONSES, End, "b") == []
    worker.state = "ready"
    await world.wait_until(lambda: assigned_ids(worker) == ["b", "a", "b"], within_s=70)
    assert list(unpack_tokens(worker.received(Assignment)[-1].taken)) == [70]


@partial(scenario_test, lanes=1)
async def test_preempted_request_ends_before_its_records_are_deleted(world: MemoryWorld) -> None:
    """Also where its own time limit is a day: half of the retention remains for its readers."""
    worker = FakeWorker(world, max_num_seqs=1)
    settings = {"max_lifetime_s": 1700, "dedup_window_s": 1700}
    await start_router(world, **settings)
    await begin_batch_run(world, worker, deadline_s=86_400, queued_ms=world.broker.now_ms())
    (assigned,) = read_records(world, LEDGER, Assigned, "b")
    kept_ms = TOPICS_BY_NAME[RESPONSES].retention_ms
    assert kept_ms is not None
    assert assigned.deadline_ms <= world.broker.now_ms() + kept_ms / 2


@scenario_test
async def test_router_that_owns_a_batch_request_moves_it(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_num_seqs=1)
    await start_router(world, "r1")
    await start_router(world, "r2")
    await world.sleep(10)  # each has a lane
    await begin_batch_run(world, worker)
    ask(world, "a", "c", "d", "e", service_class="interactive")
    await wait_for_items(world, lambda: worker.received(CancelRun))
    (batch,) = read_records(world, LEDGER, Assigned, "b")
    others = {read_records(world, LEDGER, Assigned, name)[0].router for name in "acde"}
    assert len(others) == 2
    assert batch.service_class == "batch"


@scenario_test
async def test_batch_request_follows_the_interactive_one_read_with_it(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_num_seqs=1)
    ask(world, "b", "c", "d")
    ask(world, "a", service_class="interactive")
    await start_router(world)
    await wait_for_items(world, lambda: worker.received(Assignment))
    await world.sleep(5)
    assert assigned_ids(worker) == ["a"]


@scenario_test
async def test_batch_requests_are_never_refused_and_cause_no_refusals(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_num_seqs=1, max_runs=1)
    await start_router(world, max_queued_requests=1, max_queued_batch_requests=1)
    ask(world, "a", service_class="interactive")
    await wait_for_items(world, lambda: worker.received(Assignment))
    run = worker.start(worker.received(Assignment)[0])
    append_record(world, LEDGER, PrefillDone(run=1, **run))
    ask(world, "b", "c", "d", "e")
    await world.sleep(2)
    ask(world, "f", service_class="interactive")
    await world.sleep(2)
    assert not [name for name in "bcdef" if read_records(world, RESPONSES, End, name)]
    worker.finish(run, "stop")
    done = 1
    while len(set(assigned_ids(worker))) < 6:
        await wait_for_items(world, partial(worker.received, Assignment), done + 1)
        for assignment in worker.received(Assignment)[done:]:
            worker.finish(worker.start(assignment), "stop")
            done += 1
    assert not [name for name in "bcdef" if read_records(world, RESPONSES, End, name)]


@scenario_test
async def test_run_that_cannot_be_continued_stays(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_num_seqs=1)
    await start_router(world)
    guided = SamplingOptions(guided_decoding=GuidedDecoding(regex="a+"))
    await begin_batch_run(world, worker, sampling=guided)
    ask(world, "a", service_class="interactive")
    await world.wait_until(lambda: assigned_ids(worker) == ["b", "a"])
    await world.sleep(5)
    assert worker.received(CancelRun) == []


@scenario_test
async def test_guided_run_gives_way_where_its_engine_can_continue_it(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_num_seqs=1, continues_guided=True)
    await start_router(world)
    guided = SamplingOptions(guided_decoding=GuidedDecoding(regex="a+"))
    await begin_batch_run(world, worker, sampling=guided)
    ask(world, "a", service_class="interactive")
    await wait_for_items(world, lambda: worker.received(CancelRun))


@scenario_test
async def test_decision_not_read_back_counts_for_the_next_one(world: MemoryWorld) -> None:
    worker = FakeWorker(world, block_size=16, total_kv_blocks=20)
    await start_router(world, batch_max_slowdown=100)
    ask(world, "a", service_class="interactive")
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    append_record(world, LEDGER, PrefillDone(run=1, **worker.start(assignment)))
    await world.sleep(1)
    # Beside the interactive run the cache has room for one answer of mean length, not for two.
    ask(world, "b", "c", stop=StopConditions(max_tokens=1))
    for assignment in (await wait_for_items(world, lambda: worker.received(Assignment), 2))[1:]:
        worker.start(assignment)
    await world.sleep(5)
    assert assigned_ids(worker) == ["a", "b"]
    assert worker.received(CancelRun) == []


@partial(scenario_test, lanes=1)
async def test_one_search_finds_all_preempted_runs(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_num_seqs=4)
    router = await start_router(world)
    ask(world, *"bcde")
    for assignment in await wait_for_items(world, lambda: worker.received(Assignment), 4):
        append_record(world, LEDGER, PrefillDone(run=1, **worker.start(assignment)))
    await world.sleep(1)
    batch, ledger = router._context.queue.batch, router._context.ledger
    (run,) = read_records(world, LEDGER, Assigned, "b")
    interactive = [replace(run, id=name, service_class="interactive") for name in "wxyz"]
    with patch.object(batch_class, "runs_to_preempt", wraps=runs_to_preempt) as search:
        end = len(world.records(LEDGER, 0)) + 4
        ledger.apply(Partition(LEDGER, 0), [LogRecord(end, 0, each) for each in interactive], end)
        found = batch.giving_way_on(WorkerRank(worker.name, worker.epoch, 0), 0)
        states = {name: ledger.request(0, name) for name in found}
        assert sorted(found) == ["b", "c", "d", "e"]
        assert all(state and batch.gives_way(name, state, 0) for name, state in states.items())
        assert search.call_count == 1
        fenced = Fencing(id="b", attempt=1, reason="preempted")
        ledger.apply(Partition(LEDGER, 0), [LogRecord(end, 0, fenced)], end + 1)
        assert sorted(batch.due(0)) == ["c", "d", "e"]


@partial(scenario_test, lanes=1)
async def test_new_owner_finds_the_preempted_run(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_num_seqs=1)
    router = await start_router(world, "r1")
    run = await begin_batch_run(world, worker)
    await router.stop()
    await router._ctx.cancel_tasks()
    (batch,) = read_records(world, LEDGER, Assigned, "b")
    (origin,) = (batch.origin,)
    other = replace(batch, id="a", service_class="interactive", origin=origin)
    append_record(world, LEDGER, other)
    worker.running = [*worker.running, replace(worker.running[0], id="a")]
    await start_router(world, "r2")
    (stopped,) = await wait_for_items(world, lambda: worker.received(CancelRun))
    assert (stopped.id, run["id"]) == ("b", "b")


@scenario_test
async def test_continued_runs_wait_without_waking_each_other(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_num_seqs=2)
    await start_router(world)
    for name in ("b", "c"):
        ask(world, name)
        (*_, assignment) = await wait_for_items(
            world, lambda: worker.received(Assignment), "bc".index(name) + 1
        )
        run = worker.start(assignment)
        append_record(world, RESPONSES, replace(chunk(0, 70, text="x", chars=1), id=name))
        append_record(world, LEDGER, PrefillDone(run=1, **run))
        await world.sleep(1)
    ask(world, "a", "d", service_class="interactive")
    await wait_for_items(world, lambda: worker.received(CancelRun), 2)
    await world.sleep(30)
    assert assigned_ids(worker)[:2] == ["b", "c"]
    assert sorted(assigned_ids(worker)[2:]) == ["a", "d"]


@pytest.mark.parametrize("more", [0, 2])
@partial(scenario_test, lanes=1)
async def test_batch_request_waits_in_a_router_until_its_own_deadline(
    world: MemoryWorld, more: int
) -> None:
    worker = FakeWorker(world, state="draining")
    names = "bcd"[: 1 + more]  # further ones are deferred
    await start_router(world, max_queued_batch_requests=1, max_lifetime_s=60, deadline_s=60)
    ask(world, *names, deadline_s=600, queued_ms=world.broker.now_ms())
    await world.sleep(400)
    assert read_records(world, RESPONSES, End, "b") == []
    assert world.broker.group(REQUESTS, "router").committed[0] > len(names)
    worker.state = "ready"
    for count in range(1, len(names) + 1):
        found = await wait_for_items(world, lambda: worker.received(Assignment), count)
        worker.finish(worker.start(found[-1]), "stop")
    assert sorted(assigned_ids(worker)) == list(names)
    for assignment in worker.received(Assignment):
        left_ms = assignment.deadline_ms - 1000 * world.clock.now()
        assert left_ms > 0


@partial(scenario_test, lanes=1)
async def test_batch_request_that_waits_ends_at_its_own_deadline(world: MemoryWorld) -> None:
    FakeWorker(world, state="draining")
    await start_router(world, max_lifetime_s=60, deadline_s=60)
    ask(world, "b", deadline_s=200, queued_ms=world.broker.now_ms())
    await world.sleep(190)
    assert read_records(world, RESPONSES, End, "b") == []
    await world.sleep(15)
    assert [end.code for end in read_records(world, RESPONSES, End, "b")] == ["deadline"]


@partial(scenario_test, lanes=1)
async def test_many_waiting_batch_requests_end_at_their_deadline(world: MemoryWorld) -> None:
    """Beyond MAX_FREQUENT_RETRIES a request retries less often than its deadline asks for."""
    FakeWorker(world, state="draining")
    await start_router(world)
    names = [f"b{n}" for n in range(8 * batch_class.MAX_FREQUENT_RETRIES)]
    ask(world, *names, deadline_s=5, queued_ms=world.broker.now_ms())
    await world.sleep(4.9)
    assert not any(read_records(world, RESPONSES, End, name) for name in names)
    await world.sleep(0.3)
    ends = [end.code for name in names for end in read_records(world, RESPONSES, End, name)]
    assert ends == ["deadline"] * len(names)


@partial(scenario_test, lanes=1)
async def test_many_waiting_batch_requests_are_appended_again_in_time(world: MemoryWorld) -> None:
    FakeWorker(world, state="draining")
    await start_router(world, max_lifetime_s=60, deadline_s=60)
    names = [f"b{n}" for n in range(8 * batch_class.MAX_FREQUENT_RETRIES)]
    ask(world, *names, deadline_s=600, queued_ms=world.broker.now_ms())
    await world.wait_until(lambda: len(world.records(REQUESTS)) > len(names), 100)
    await world.sleep(0.5)
    assert len(world.records(REQUESTS)) == 2 * len(names)


@partial(scenario_test, lanes=1)
async def test_repeated_request_moves_with_its_lane_and_is_cancelled(world: MemoryWorld) -> None:
    worker = FakeWorker(world, state="draining")
    first = await start_router(world, "r1", max_lifetime_s=60, deadline_s=60)
    ask(world, "b", "c", deadline_s=600, queued_ms=world.broker.now_ms())
    await world.sleep(100)
    await first.stop()
    await first._ctx.cancel_tasks()
    await start_router(world, "r2", max_lifetime_s=60, deadline_s=60)
    await world.sleep(100)
    append_record(world, REQUESTS, Cancel(id="b"))
    await world.sleep(5)
    assert [end.code for end in read_records(world, RESPONSES, End, "b")] == ["cancelled"]
    worker.state = "ready"
    await wait_for_items(world, lambda: worker.received(Assignment))
    await world.sleep(5)
    assert assigned_ids(worker) == ["c"]


@pytest.mark.parametrize("at_s", [32, 37])
@partial(scenario_test, lanes=1)
async def test_cancel_beside_the_second_append_of_a_request_ends_it(
    world: MemoryWorld, at_s: int
) -> None:
    """The append begins after 30 s, is in the log after 35 s, and acknowledged after 40 s."""
    worker = FakeWorker(world, state="draining")
    await start_router(world, max_lifetime_s=60, deadline_s=60)
    ask(world, "b", deadline_s=600, queued_ms=world.broker.now_ms())
    await world.sleep(29)
    world.faults.slow["append"] = 5.0
    await world.sleep(at_s - 29)
    append_record(world, REQUESTS, Cancel(id="b"))
    await world.sleep(30)
    world.faults.slow.clear()
    worker.state = "ready"
    await world.sleep(10)
    assert len(read_records(world, REQUESTS, Request, "b")) == 2
    assert [end.code for end in read_records(world, RESPONSES, End, "b")] == ["cancelled"]
    assert worker.received(Assignment) == []


@scenario_test
async def test_batch_request_that_only_a_reserved_worker_may_take_goes_there(
    world: MemoryWorld,
) -> None:
    first, second = (FakeWorker(world, f"worker-{n}") for n in (1, 2))
    await start_router(world)

    def is_assigned(name: str) -> bool:
        return name in assigned_ids(first) + assigned_ids(second)

    for name in "acde":  # the router reserves a worker from now on
        ask(world, name, service_class="interactive", token_ids=pack_tokens(range(1000)))
        await world.wait_until(partial(is_assigned, name))
        worker = first if name in assigned_ids(first) else second
        worker.finish(worker.start(worker.received(Assignment)[-1]), "stop")
    ask(world, "b", "f")
    await world.sleep(2)
    assert assigned_ids(second)[-2:] == ["b", "f"]
    ask(world, "g", hints=Hints(allowed_worker_ids=("worker-1",)))
    await world.wait_until(lambda: "g" in assigned_ids(first))
