"""Tests of a router's intake of requests: assigned, held, refused, ended."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from kvlane.app.router import Router
from kvlane.streams.records import Assigned, Assignment, End, Ended, Finished
from kvlane.streams.request import Request
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES, lane_of
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    chunk,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test


@scenario_test
async def test_request_is_assigned_and_the_decision_is_in_the_ledger(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    (decision,) = read_records(world, LEDGER, Assigned)
    assert assignment.request == PROMPT
    assert assignment.epoch == decision.epoch == worker.epoch
    assert decision.origin == assignment.origin
    assert decision.origin.offset == 0
    assert 99 < assignment.budget_s <= 100
    assert [c.worker for c in decision.candidates] == ["w1"]
    assert decision.prompt_tokens == 3


@scenario_test
async def test_decision_has_the_read_position_of_the_ledger(world: MemoryWorld) -> None:
    FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (first,) = await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned))
    assert first.known_ms == 0, "nothing stood there"
    await world.sleep(5)
    append_record(world, REQUESTS, replace(PROMPT, id="b"))
    (second,) = await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned, "b"))
    stood = [record.timestamp for record in world.all_records(LEDGER)]
    assert second.known_ms == stood[0], "what stands behind it was not read"


@scenario_test
async def test_requests_spread_over_the_workers_at_once(world: MemoryWorld) -> None:
    workers = [FakeWorker(world, f"w{n}") for n in range(4)]
    await start_router(world)
    for n in range(8):
        append_record(
            world, REQUESTS, Request(id=f"a{n}", model="demo", token_ids=PROMPT.token_ids)
        )
    await world.wait_until(lambda: sum(len(w.received(Assignment)) for w in workers) == 8)
    assert [len(w.received(Assignment)) for w in workers] == [2, 2, 2, 2]


@scenario_test
async def test_repeated_id_is_not_run_again(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    append_record(world, REQUESTS, PROMPT)
    worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(5)
    assert len(worker.received(Assignment)) == 1
    assert read_records(world, RESPONSES, End) == []


@scenario_test
async def test_request_waits_for_a_worker(world: MemoryWorld) -> None:
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(10)
    worker = FakeWorker(world)
    await wait_for_items(world, lambda: worker.received(Assignment))


@scenario_test
async def test_request_that_no_worker_accepts_ends_at_its_deadline(world: MemoryWorld) -> None:
    await start_router(world)
    append_record(world, REQUESTS, Request(id="a", deadline_s=5))
    await world.sleep(4.5)
    assert read_records(world, RESPONSES, End) == []
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "no_workers"
    assert [
        e.code for e in await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    ] == ["no_workers"]


@scenario_test
async def test_request_read_past_its_deadline_is_never_run(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    append_record(world, REQUESTS, Request(id="a", model="demo", deadline_s=5))
    await world.sleep(6)
    await start_router(world)
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "deadline"
    assert worker.received(Assignment) == []


@scenario_test
async def test_router_refuses_at_once_beyond_its_bound(world: MemoryWorld) -> None:
    await start_router(world, max_queued_requests=1)
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(1)
    append_record(world, REQUESTS, Request(id="b", model="demo"))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End, "b"))
    assert end.code == "queue_full"
    assert end.retry_after_s
    assert read_records(world, RESPONSES, End) == []


@scenario_test
async def test_full_worker_is_retried_and_costs_no_attempt(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world, max_attempts=1)
    append_record(world, REQUESTS, PROMPT)
    for n in range(4):
        assignments = await wait_for_items(world, lambda: worker.received(Assignment), n + 1)
        run = {"id": "a", "attempt": n, "phase": "aggregated", "worker": "w1"}
        worker.finish(run | {"epoch": worker.epoch}, "worker_full", retryable=True)
    assert [a.attempt for a in assignments] == [0, 1, 2, 3]
    assert read_records(world, RESPONSES, End) == []


@scenario_test
async def test_refusal_without_a_decision_does_not_mark_an_id_as_seen(world: MemoryWorld) -> None:
    """The router before this one died after the Assignment and before its Assigned."""
    worker = FakeWorker(world)
    run = {"id": "a", "attempt": 0, "phase": "aggregated", "worker": "w1", "epoch": worker.epoch}
    append_record(world, LEDGER, Finished(code="worker_full", retryable=True, **run))
    append_record(world, REQUESTS, PROMPT)
    await start_router(world)
    assert await wait_for_items(world, lambda: worker.received(Assignment))


@scenario_test
async def test_answer_is_searched_from_the_end_of_its_lane_at_takeover(world: MemoryWorld) -> None:
    FakeWorker(world)
    for n in range(10):
        world.append(RESPONSES, lane_of("a", world.lanes), chunk(n), key="other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_follow_response_ends", lambda _: asyncio.sleep(1000))
        await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    (decision,) = await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned))
    assert decision.responses_from == 10
