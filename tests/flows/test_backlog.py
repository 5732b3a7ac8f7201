"""Tests of prompts over Kafka while routers are full: they wait in the log, and none is refused
for load."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any

import pytest

from kvlane.app.lanes.dispatch import LOG_LOOKUP_TIMEOUT_S, Dispatcher
from kvlane.app.lanes.remaining_work import RemainingWork
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.prompts.prompt_source import MAX_BATCH
from kvlane.app.router import Router
from kvlane.app.routing.queueing.fair_share import ClassConfig
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.records import (
    Assigned,
    Assignment,
    Cancel,
    End,
    Refused,
    RequestOffset,
    RouterCapacity,
)
from kvlane.streams.request import Hints, Request
from kvlane.streams.topics import BATCH, CAPACITY, LEDGER, PROMPTS, REQUESTS, RESPONSES, lane_of
from tests.flows.test_batch_prompts import ask_batch
from tests.flows.test_preprocessor import begin, send
from tests.harness.fake_worker import FakeWorker, append_record, start_router
from tests.harness.memory_world import MemoryWorld, scenario_test


def ends(world: MemoryWorld) -> dict[str, str]:
    records = [decode(r) for r in world.all_records(RESPONSES)]
    return {r.id: r.code for r in records if isinstance(r, End)}


def assigned(world: MemoryWorld) -> list[str]:
    records = [decode(r) for r in world.all_records(LEDGER)]
    return [r.id for r in records if isinstance(r, Assigned)]


def published(world: MemoryWorld) -> list[str]:
    records = [decode(r) for r in world.all_records(REQUESTS)]
    return [r.id for r in records if isinstance(r, Request)]


def cancelled(world: MemoryWorld) -> list[str]:
    records = [decode(r) for r in world.all_records(REQUESTS)]
    return [r.id for r in records if isinstance(r, Cancel)]


async def finish_all(world: MemoryWorld, worker: FakeWorker, every_s: float = 0.01) -> None:
    """Start what comes, one after the other, and end each at once."""
    seen = 0
    while True:
        for assignment in worker.received(Assignment)[seen:]:
            seen += 1
            worker.finish(worker.start(assignment), "stop")
            await world.sleep(every_s)
        await world.sleep(0.01)


@partial(scenario_test, lanes=1)
async def test_prompts_wait_while_routers_are_full(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m", max_runs=2)
    router = await start_router(world, max_queued_requests=10)
    await world.sleep(5)
    preprocessor, _ = await begin(world)
    names = [f"job-{n}" for n in range(300)]
    for name in names:
        send(world, name)
    await world.sleep(20)
    assert ends(world) == {}
    assert len(assigned(world)) == 2
    assert len(published(world)) <= 2 + 10 / 2 + 1
    assert preprocessor.is_paused
    assert preprocessor.credit == 0
    page = (await preprocessor._metrics.page()).decode()
    assert "kvlane_preprocessor_paused 1.0" in page
    assert "kvlane_preprocessor_credit_requests 0.0" in page
    committed = world.broker.group(PROMPTS, "preprocessor").committed
    assert sum(committed.values()) <= len(published(world))
    world.spawn(finish_all(world, worker))
    for assignment in worker.received(Assignment):
        worker.finish(worker.start(assignment), "stop")
    await world.wait_until(lambda: set(assigned(world)) == set(names), within_s=120)
    await world.sleep(5)
    assert ends(world) == {}
    assert sorted(assigned(world)) == sorted(names)
    assert sorted(published(world)) == sorted(names)
    assert not preprocessor.is_paused
    assert sum(world.broker.group(PROMPTS, "preprocessor").committed.values()) == len(names)
    assert router._context.queue.waiting.deferred.granted.requests == 0


@partial(scenario_test, lanes=1)
async def test_cancel_overtakes_waiting_prompts(world: MemoryWorld) -> None:
    FakeWorker(world, model="m", max_runs=1)
    await start_router(world, max_queued_requests=4)
    await world.sleep(5)
    await begin(world)
    names = [f"job-{n}" for n in range(20)]
    for name in names:
        send(world, name)
    for name in names:
        send(world, name, kind="cancel")
    await world.sleep(10)
    assert sorted(cancelled(world)) == sorted(published(world)) == sorted(names)


@pytest.mark.parametrize("preprocessors", [2, 5])
@partial(scenario_test, lanes=4)
async def test_several_preprocessors_share_the_room_of_several_routers(
    world: MemoryWorld, preprocessors: int
) -> None:
    worker = FakeWorker(world, model="m", max_runs=1)
    routers = [await start_router(world, f"r{n}", max_queued_requests=20) for n in (1, 2)]
    await world.sleep(15)
    for n in range(preprocessors):
        await begin(world, f"p{n}")
    await world.sleep(15)
    for n in range(500):
        send(world, f"job-{n}")
    await world.sleep(30)
    assert 18 <= len(published(world)) <= 1 + 2 * (10 + preprocessors)
    assert (
        sum(r._context.queue.waiting.deferred.size.requests for r in routers) <= 2 * preprocessors
    )
    world.spawn(finish_all(world, worker))
    await world.wait_until(lambda: len(set(assigned(world))) == 500, within_s=300)
    assert ends(world) == {}


@scenario_test
async def test_preprocessor_that_waits_stays_in_its_group(world: MemoryWorld) -> None:
    world.broker.max_poll_interval_s = 3.0
    FakeWorker(world, model="m", state="draining")
    await start_router(world, max_queued_requests=2)
    await world.sleep(5)
    preprocessor, ctx = await begin(world)
    group = world.broker.group(PROMPTS, "preprocessor")
    await world.wait_until(lambda: group.generation == 1)
    for n in range(100):
        send(world, f"job-{n}")
    await world.sleep(60)
    assert preprocessor.is_paused
    assert group.generation == 1
    assert ctx.error is None


@scenario_test
async def test_waiting_prompts_move_with_their_partition(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m", state="draining")
    await start_router(world, max_queued_requests=4)
    await world.sleep(5)
    first, ctx = await begin(world, "p1")
    for n in range(100):
        send(world, f"job-{n}")
    await world.wait_until(lambda: first.is_paused)
    await begin(world, "p2")
    await world.sleep(20)
    assert ctx.error is None
    worker.state = "ready"
    world.spawn(finish_all(world, worker, 0.0))
    await world.wait_until(lambda: len(set(assigned(world))) == 100, within_s=120)
    assert ends(world) == {}
    assert len(assigned(world)) == 100
    assert len(published(world)) < 200, "what waited was published by its old owner, too"


@scenario_test
async def test_prompt_ends_at_its_deadline_wherever_it_waits(world: MemoryWorld) -> None:
    FakeWorker(world, model="m", state="draining")
    await start_router(world, max_queued_requests=4)
    await begin(world)
    names = [f"job-{n}" for n in range(500)]
    for n, name in enumerate(names):
        send(world, name, deadline_s=30 if n == 0 else 10)
    await world.sleep(9)
    assert ends(world) == {}
    await world.sleep(6)
    assert ends(world).keys() >= set(names[1:])
    await world.wait_until(lambda: len(ends(world)) == 500, within_s=30)
    assert set(ends(world).values()) <= {"deadline", "all_busy"}
    assert {r.code for r in map(decode, world.all_records(REQUESTS)) if isinstance(r, Refused)} == {
        "deadline"
    }


@scenario_test
async def test_deadline_of_a_prompt_counts_from_its_append(world: MemoryWorld) -> None:
    for n in range(3):
        send(world, f"job-{n}", deadline_s=100)
    asked_ms = world.all_records(PROMPTS)[0].timestamp
    await world.sleep(50)
    FakeWorker(world, model="m")
    await start_router(world)
    await begin(world)
    await world.wait_until(lambda: len(assigned(world)) == 3)
    found = [decode(r) for r in world.all_records(LEDGER)]
    assert {r.deadline_ms for r in found if isinstance(r, Assigned)} == {asked_ms + 100_000}


@scenario_test
async def test_dead_router_blocks_no_prompts(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m", state="draining")
    router = await start_router(world, "r1", max_queued_requests=4)
    await world.sleep(5)
    preprocessor, _ = await begin(world)
    for n in range(100):
        send(world, f"job-{n}")
    await world.wait_until(lambda: preprocessor.is_paused)
    await world.sleep(5)
    router._log.kill()
    await router._ctx.cancel_tasks()
    worker.state = "ready"
    world.spawn(finish_all(world, worker))
    await start_router(world, "r2")
    await world.wait_until(lambda: len(set(assigned(world))) == 100, within_s=60)
    assert ends(world) == {}


@scenario_test
async def test_without_reports_prompts_are_published_at_a_bounded_rate(world: MemoryWorld) -> None:
    await begin(world)
    await world.sleep(5)
    for n in range(2000):
        send(world, f"job-{n}")
    await world.sleep(4)
    assert 200 < len(published(world)) <= 200 * 6
    await world.wait_until(lambda: len(published(world)) == 2000, within_s=20)


@scenario_test
async def test_router_reports_its_room_and_how_far_it_has_read(world: MemoryWorld) -> None:
    FakeWorker(world, model="m", state="draining")
    await start_router(world, max_queued_requests=10, max_queued_tokens=1000)
    await world.sleep(5)
    for n in range(4):
        append_record(
            world, REQUESTS, Request(id=f"r{n}", model="m", token_ids=pack_tokens(range(10)))
        )
    await world.sleep(3)
    reports = [decode(r) for r in world.all_records(CAPACITY)]
    assert isinstance(reports[0], RouterCapacity)
    last = reports[-1]
    assert isinstance(last, RouterCapacity)
    assert (last.router, last.requests, last.tokens) == ("r1", 1, 460)
    assert last.positions == {
        lane: len(world.records(REQUESTS, lane)) for lane in range(world.lanes)
    }
    count = len(reports)
    await world.sleep(10)
    assert 8 <= len(world.all_records(CAPACITY)) - count <= 11


@scenario_test
async def test_room_for_batch_requests_is_without_those_that_are_read_and_not_queued_yet(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens may still be hashed; they take none of the room for interactive requests."""
    queued = asyncio.Event()
    assign = Dispatcher.assign

    async def assign_later(dispatcher: Dispatcher, work: RemainingWork) -> None:
        await queued.wait()
        await assign(dispatcher, work)

    monkeypatch.setattr(Dispatcher, "assign", assign_later)
    FakeWorker(world, model="m", state="draining")
    await start_router(world, max_queued_batch_requests=5, max_queued_requests=10)

    async def room() -> tuple[int, int]:
        await world.sleep(3)
        (last,) = [decode(r) for r in world.all_records(CAPACITY)][-1:]
        assert isinstance(last, RouterCapacity)
        return last.requests, last.batch_requests

    assert await room() == (5, 5)
    now_ms = world.broker.now_ms()
    for n in range(3):
        append_record(world, REQUESTS, prompt(f"b{n}", service_class="batch", queued_ms=now_ms))
    append_record(world, REQUESTS, prompt("a", queued_ms=now_ms))
    assert await room() == (4, 2)
    queued.set()
    assert await room() == (4, 2)


# --- prompts beyond the room of their router -----------------------------------------------------


def prompt(name: str, **over: Any) -> Request:
    fields = {"id": name, "model": "m", "token_ids": pack_tokens(range(1000)), "queued_ms": 1}
    return Request(**(fields | over))


def overrun(world: MemoryWorld, count: int, **over: Any) -> list[str]:
    """More prompts than a router has room for."""
    names = [f"p{n:03}" for n in range(count)]
    for name in names:
        append_record(world, REQUESTS, prompt(name, queued_ms=world.broker.now_ms(), **over))
    return names


def waiting(router: Router) -> tuple[int, int]:
    queue = router._context.queue.waiting
    return queue.queued_requests, queue.deferred_requests


@partial(scenario_test, lanes=1)
async def test_prompts_beyond_the_room_of_a_router_wait_without_their_bodies(
    world: MemoryWorld,
) -> None:
    worker = FakeWorker(world, model="m", state="draining")
    router = await start_router(world, max_queued_requests=10)
    names = overrun(world, 100)
    await world.sleep(5)
    assert waiting(router) == (5, 95)
    (owner,) = router._owners.values()
    assert owner._backpressure.prompt_bytes == 5 * 4000
    assert not owner.claim.is_paused
    worker.state = "ready"
    world.spawn(finish_all(world, worker))
    await world.wait_until(lambda: len(assigned(world)) == 100)
    await world.sleep(1)
    assert ends(world) == {}
    assert sorted(assigned(world)) == names
    assert waiting(router) == (0, 0)
    assert router._context.queue.waiting.deferred.granted.requests == 0
    assert world.broker.group(REQUESTS, "router").committed == {0: 100}


@scenario_test
async def test_deferred_prompts_are_admitted_in_order_of_arrival(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m", max_runs=1)
    await start_router(world, max_queued_requests=2)
    names = [name for n in range(60) if lane_of(name := f"o{n}", world.lanes) == 0]
    for name in names:
        append_record(world, REQUESTS, prompt(name, queued_ms=world.broker.now_ms()))
        await world.sleep(0.01)
    world.spawn(finish_all(world, worker))
    await world.wait_until(lambda: len(assigned(world)) == len(names))
    assert assigned(world) == names


@partial(scenario_test, lanes=1)
async def test_prompts_leave_room_for_requests_over_http(world: MemoryWorld) -> None:
    FakeWorker(world, model="m", state="draining")
    router = await start_router(world, max_queued_requests=10)
    overrun(world, 100)
    for n in range(8):
        append_record(world, REQUESTS, Request(id=f"h{n}", model="m"))
    await world.sleep(5)
    assert waiting(router) == (10, 95)
    assert sorted(ends(world)) == ["h5", "h6", "h7"]
    assert set(ends(world).values()) == {"queue_full"}


@pytest.mark.parametrize(
    "bounds", [{"max_queued_requests": 0}, {"max_queued_tokens": 0}, {"max_queued_bytes": 0}]
)
@partial(scenario_test, lanes=1)
async def test_router_without_a_queue_takes_one_prompt_after_the_other(
    world: MemoryWorld, bounds: dict[str, int]
) -> None:
    worker = FakeWorker(world, model="m", max_runs=1)
    await start_router(world, **bounds)
    await begin(world)
    for n in range(20):
        send(world, f"job-{n}")
    world.spawn(finish_all(world, worker, 0.1))
    await world.wait_until(lambda: len(assigned(world)) == 20, within_s=120)
    assert ends(world) == {}


@scenario_test
async def test_cancel_reaches_a_deferred_prompt(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m", state="draining")
    router = await start_router(world, max_queued_requests=2)
    names = overrun(world, 50)
    await world.sleep(2)
    append_record(world, REQUESTS, Cancel(id=names[-1], reason="no"))
    await world.wait_until(lambda: ends(world) == {names[-1]: "cancelled"}, within_s=2)
    assert waiting(router) == (1, 48)
    append_record(world, REQUESTS, prompt(names[-2]))
    await world.sleep(1)
    assert waiting(router) == (1, 48)
    worker.state = "ready"
    world.spawn(finish_all(world, worker))
    await world.wait_until(lambda: sorted(assigned(world)) == names[:-1])
    await world.sleep(1)
    for lane, mark in world.broker.group(REQUESTS, "router").committed.items():
        assert mark == len(world.records(REQUESTS, lane))


@scenario_test
async def test_deferred_prompt_ends_at_its_deadline(world: MemoryWorld) -> None:
    FakeWorker(world, model="m", state="draining")
    router = await start_router(world, max_queued_requests=2)
    names = overrun(world, 50, deadline_s=10)
    await world.sleep(9)
    assert ends(world) == {}
    await world.sleep(3)
    assert sorted(ends(world)) == names
    assert sorted(ends(world).values()).count("deadline") >= 49
    assert waiting(router) == (0, 0)
    assert router._context.queue.waiting.remaining_capacity(0).requests == 1


@scenario_test
async def test_deferred_prompts_move_with_their_lane(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m", state="draining")
    first = await start_router(world, "r1", max_queued_requests=2)
    names = overrun(world, 60)
    await world.sleep(2)
    second = await start_router(world, "r2", max_queued_requests=2)
    await world.sleep(20)
    assert waiting(first)[1] + waiting(second)[1] == 60 - 2
    worker.state = "ready"
    world.spawn(finish_all(world, worker))
    await world.wait_until(lambda: sorted(assigned(world)) == names)
    await world.sleep(1)
    assert ends(world) == {}
    assert waiting(first) == waiting(second) == (0, 0)
    assert {
        first._context.queue.waiting.deferred.granted,
        second._context.queue.waiting.deferred.granted,
    } == {(0, 0, 0)}


@scenario_test
async def test_deferred_prompt_whose_record_is_gone_ends_as_lost(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m", state="draining")
    await start_router(world, max_queued_requests=2)
    names = [name for n in range(60) if lane_of(name := f"o{n}", world.lanes) == 0]
    for name in names:
        append_record(world, REQUESTS, prompt(name, queued_ms=world.broker.now_ms()))
    await world.sleep(2)
    world.broker.delete_records(REQUESTS, 0, 10)
    worker.state = "ready"
    world.spawn(finish_all(world, worker))
    await world.wait_until(lambda: len(ends(world)) + len(assigned(world)) == len(names))
    assert ends(world) == dict.fromkeys(names[1:10], "lost")


@scenario_test
async def test_deferred_prompt_waits_for_a_log_that_is_read_late(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m", state="draining")
    router = await start_router(world, max_queued_requests=2)
    names = overrun(world, 6)
    await world.sleep(2)
    scanner = router._context.scanner
    fetch = scanner.fetch_request

    async def fetch_late(origin: RequestOffset) -> Request:
        await world.sleep(3 * LOG_LOOKUP_TIMEOUT_S)
        return await fetch(origin)

    scanner.fetch_request = fetch_late  # type: ignore[method-assign]
    worker.state = "ready"
    world.spawn(finish_all(world, worker))
    await world.wait_until(lambda: sorted(assigned(world)) == names, within_s=300)
    assert ends(world) == {}


@scenario_test
async def test_full_class_does_not_block_the_others(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m", state="draining")
    router = await start_router(world, queue_classes={"batch": ClassConfig(max_queued_requests=2)})
    for n in range(20):
        append_record(
            world,
            REQUESTS,
            prompt(f"d{n}", hints=Hints(queue_class="batch"), queued_ms=world.broker.now_ms()),
        )
    for n in range(5):
        append_record(world, REQUESTS, prompt(f"e{n}", queued_ms=world.broker.now_ms()))
    await world.sleep(2)
    assert waiting(router) == (7, 18)
    worker.state = "ready"
    world.spawn(finish_all(world, worker))
    await world.wait_until(lambda: len(assigned(world)) == 25)


@scenario_test
async def test_outage_while_prompts_are_published_is_waited_out(world: MemoryWorld) -> None:
    worker = FakeWorker(world, model="m")
    await start_router(world)
    preprocessor, ctx = await begin(world)
    await world.sleep(5)
    world.broker.available = False
    for n in range(50):
        send(world, f"job-{n}")
    await world.sleep(10)
    world.broker.available = True
    world.spawn(finish_all(world, worker))
    await world.wait_until(lambda: len(set(assigned(world))) == 50)
    assert ctx.error is None
    assert not preprocessor.is_paused


async def backlog(world: MemoryWorld, preprocessors: list[Preprocessor], topic: str) -> list[float]:
    """Records, tokens and age of a topic, summed over the metrics of preprocessors."""
    sums = [0.0, 0.0, 0.0]
    for preprocessor in preprocessors:
        page = (await preprocessor._metrics.page()).decode()
        for i, name in enumerate(("records", "tokens", "oldest_age_seconds")):
            sample = rf'^kvlane_backlog_{name}{{topic="{topic}"}} (.*)$'
            [line] = re.findall(sample, page, re.MULTILINE)
            sums[i] += float(line)
    return sums


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@partial(scenario_test, lanes=1)
async def test_metrics_of_all_preprocessors_add_up_to_the_backlog(
    world: MemoryWorld, topic: str
) -> None:
    worker = FakeWorker(world, model="m", max_runs=2)
    await start_router(world, max_queued_requests=10, max_queued_batch_requests=10)
    await world.sleep(5)
    preprocessors = [(await begin(world, name))[0] for name in ("p1", "p2")]
    await world.sleep(20)
    assert await backlog(world, preprocessors, topic) == [0, 0, 0]
    names = [f"job-{n}" for n in range(300)]
    for name in names:
        (send if topic == PROMPTS else ask_batch)(world, name)
    await world.sleep(20)
    records, tokens, age_s = await backlog(world, preprocessors, topic)
    assert records == pytest.approx(len(names) - len(published(world)), abs=MAX_BATCH)
    assert records >= len(names) - len(published(world))
    assert tokens > 0
    assert 19 <= age_s / 2 <= 41
    world.spawn(finish_all(world, worker))
    for assignment in worker.received(Assignment):
        worker.finish(worker.start(assignment), "stop")
    await world.wait_until(lambda: set(assigned(world)) == set(names), within_s=120)
    await world.sleep(5)
    assert await backlog(world, preprocessors, topic) == [0, 0, 0]


@scenario_test
async def test_metrics_come_without_the_backlog_while_no_broker_answers(world: MemoryWorld) -> None:
    preprocessor, _ = await begin(world)
    await world.sleep(5)
    world.broker.available = False
    page = (await preprocessor._metrics.page()).decode()
    assert "kvlane_backlog_records{" not in page
    assert "kvlane_preprocessor_paused" in page
