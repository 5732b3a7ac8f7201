"""Tests of a request that cannot be handled: it ends by itself; the router and other requests go
on."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from kvlane.app.router import Router
from kvlane.streams.errors import AccessDenied, LogClosed, Malformed, NewerRecord, PositionLost
from kvlane.streams.ports import Entry
from kvlane.streams.records import (
    Assigned,
    Assignment,
    Cancel,
    End,
    Ended,
    Finished,
    Refused,
    RequestOffset,
    Started,
)
from kvlane.streams.request import Hints, Request, RouterParams
from kvlane.streams.topics import DEAD_LETTERS, LEDGER, REQUESTS, RESPONSES, lane_of
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    begin_run,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test

BROKEN = {"id": "a", "attempt": 0, "phase": "aggregated", "worker": "w9", "epoch": 0}


def raising(error: Exception) -> Any:
    async def never_well(*_: Any, **__: Any) -> Any:
        raise error

    return never_well


async def assert_serves(world: MemoryWorld, router: Router, worker: FakeWorker) -> None:
    """The router lives, serves others, and has everything committed."""
    assert router._ctx.error is None
    end = append_record(world, REQUESTS, Request(id="after", model="demo")) + 1
    await wait_for_items(
        world, lambda: [a for a in worker.received(Assignment) if a.request.id == "after"]
    )
    group = world.broker.group(REQUESTS, "router")
    await world.wait_until(lambda: group.committed.get(lane_of("after", world.lanes)) == end)


@pytest.mark.parametrize("deadline_s", [math.nan, math.inf, -math.inf, -1.0])
@partial(scenario_test, lanes=1)
async def test_invalid_deadline_is_refused(world: MemoryWorld, deadline_s: float) -> None:
    worker = FakeWorker(world)
    router = await start_router(world)
    append_record(world, REQUESTS, Request(id="a", model="demo", deadline_s=deadline_s))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "invalid"
    assert "deadline_s" in end.message
    await assert_serves(world, router, worker)


@pytest.mark.parametrize("name", ["priority_jump", "ttft_target", "itl_target"])
@partial(scenario_test, lanes=1)
async def test_times_that_are_no_numbers_are_refused(world: MemoryWorld, name: str) -> None:
    """They would have no place in the order of the queue."""
    worker = FakeWorker(world)
    router = await start_router(world)
    hints, targets = Hints(), RouterParams()
    if name == "priority_jump":
        hints = Hints(priority_jump=math.nan)
    else:
        targets = RouterParams(**{name: math.nan})
    append_record(world, REQUESTS, Request(id="a", model="demo", hints=hints, router=targets))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "invalid"
    assert name in end.message
    await assert_serves(world, router, worker)


@pytest.mark.parametrize("copies", [1, 2])
@partial(scenario_test, lanes=1)
async def test_request_whose_bytes_cannot_be_read_is_refused_once(
    world: MemoryWorld, copies: int
) -> None:
    worker = FakeWorker(world)
    unreadable = Entry(b"a", b"\xc1", (("t", b"Request"),))
    world.append_raw(REQUESTS, 0, *[unreadable] * copies)
    router = await start_router(world)
    await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    await assert_serves(world, router, worker)
    (end,) = read_records(world, RESPONSES, End)
    assert end.code == "invalid"
    assert "not a Request" in end.message
    assert len(world.all_records(DEAD_LETTERS)) == copies


@scenario_test
async def test_tokens_that_are_no_integers_are_refused(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    append_record(world, REQUESTS, Request(id="a", model="demo", token_ids=b"12345"))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "invalid"
    assert worker.received(Assignment) == []


@partial(scenario_test, lanes=1)
async def test_origin_without_a_request_ends_its_request(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    offset = append_record(world, REQUESTS, Cancel(id="b"))
    origin = RequestOffset(topic=REQUESTS, partition=0, offset=offset)
    times = {"responses_from": 0, "deadline_ms": world.broker.now_ms() + 100_000}
    append_record(world, LEDGER, Started(run=1, origin=origin, **times, **BROKEN))
    append_record(world, LEDGER, Finished(code="broken", **BROKEN))
    router = await start_router(world)
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "internal"
    assert [e.code for e in await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))]
    await assert_serves(world, router, worker)


@pytest.mark.parametrize("error", [ValueError("what?"), Malformed("no Request")])
@partial(scenario_test, lanes=1)
async def test_any_error_of_one_request_ends_that_request(
    world: MemoryWorld, error: Exception
) -> None:
    worker, router, run = await begin_run(world)
    router._context.scanner.fetch_request = raising(error)  # type: ignore[method-assign]
    worker.finish(run, "broken")
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "internal"
    await assert_serves(world, router, worker)


@partial(scenario_test, lanes=1)
async def test_request_that_cannot_be_admitted_is_done_after_its_end(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    router = await start_router(world)
    honest = router._context.scheduler.schedule
    router._context.scheduler.schedule = lambda *_: {}["surprise"]  # type: ignore[method-assign]
    append_record(world, REQUESTS, PROMPT)
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "internal"
    router._context.scheduler.schedule = honest  # type: ignore[method-assign]
    await assert_serves(world, router, worker)


@pytest.mark.parametrize("error", [LogClosed("closed"), AccessDenied("no right")])
@scenario_test
async def test_error_unrelated_to_a_request_ends_the_process_and_no_request(
    world: MemoryWorld, error: Exception
) -> None:
    worker, router, run = await begin_run(world)
    router._context.scanner.fetch_request = raising(error)  # type: ignore[method-assign]
    worker.finish(run, "broken")
    await world.wait_until(lambda: router._ctx.error is error)
    assert read_records(world, RESPONSES, End) == []


@scenario_test
async def test_unreadable_ledger_ends_the_process_and_no_request(world: MemoryWorld) -> None:
    FakeWorker(world)
    router = await start_router(world)
    world.faults.slow["append"] = 1.0
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(0.5)
    lane = lane_of("a", world.lanes)
    world.append_raw(LEDGER, lane, Entry(b"x", b"", (("t", b"FromTheFuture"), ("r", b"2"))))
    await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned))
    await world.sleep(5)
    assert isinstance(router._ctx.error, NewerRecord)
    assert read_records(world, RESPONSES, End) == []


@scenario_test
async def test_request_deleted_from_the_log_ends_as_lost(world: MemoryWorld) -> None:
    worker, router, run = await begin_run(world)
    gone = PositionLost(REQUESTS, 0, 0, 1)
    router._context.scanner.fetch_request = raising(gone)  # type: ignore[method-assign]
    worker.finish(run, "broken")
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "lost"


@scenario_test
async def test_records_in_a_wrong_lane_are_dead_lettered_and_never_run(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    router = await start_router(world)
    wrong = 1 - lane_of("a", world.lanes)
    for record in (PROMPT, Cancel(id="a"), Refused(id="a", code="invalid")):
        offset = world.append(REQUESTS, wrong, record, key="a")
    dead_letters = await wait_for_items(world, lambda: world.all_records(DEAD_LETTERS), 3)
    reasons = {dict(letter.headers)["reason"] for letter in dead_letters}
    assert len(reasons) == 1
    assert f"belongs in lane {1 - wrong}".encode() in reasons.pop()
    group = world.broker.group(REQUESTS, "router")
    await world.wait_until(lambda: group.committed.get(wrong) == offset + 1)
    assert worker.received(Assignment) == []
    assert read_records(world, RESPONSES, End) == []
    assert router._ctx.error is None
