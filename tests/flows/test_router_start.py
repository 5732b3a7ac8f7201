"""Tests of the start of a router: records that it reads, and those that wake waiting requests."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.router import Router
from kvlane.streams.codecs import decode
from kvlane.streams.ports import Entry
from kvlane.streams.records import Assigned, Assignment, Ended, Fence, Lost, RunProgress, Tombstone
from kvlane.streams.topics import (
    DEAD_LETTERS,
    KV_EVENTS,
    LEDGER,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    partition_of,
)
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test
from workbench.testing.virtual_time import VirtualClock


def count_finds(router: Router) -> list[Any]:
    """How often a request looked for a place."""
    found: list[Any] = []
    find = router._context.scheduler.schedule

    def counted(*sent: Any) -> Any:
        found.append(sent)
        return find(*sent)

    router._context.scheduler.schedule = counted  # type: ignore[method-assign]
    return found


@partial(scenario_test, lanes=1)
async def test_copy_counts_by_its_append_however_late_it_is_read(world: MemoryWorld) -> None:
    """Its window has passed when it is read, after another router's start, but not its deadline."""
    worker = FakeWorker(world)
    settings = {"dedup_window_s": 60, "max_lifetime_s": 60, "deadline_s": 60}
    first = await start_router(world, "r1", **settings)
    append_record(world, REQUESTS, PROMPT)
    run = worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    worker.finish(run, "stop")
    await world.sleep(40)
    await first.stop()
    await first._ctx.cancel_tasks()
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(25)
    append_record(world, LEDGER, Ended(id="later", code="cancelled"))
    await start_router(world, "r2", **settings)
    append_record(world, REQUESTS, replace(PROMPT, id="b"))
    await wait_for_items(world, lambda: worker.received(Assignment), 2)
    assert [a.id for a in read_records(world, LEDGER, Assigned)].count("a") == 1


@scenario_test
async def test_repeated_id_is_recognised_within_the_window(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    first = await start_router(world, "r1", dedup_window_s=4000)
    append_record(world, REQUESTS, PROMPT)
    run = worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    worker.finish(run, "stop")
    await first.stop()
    await first._ctx.cancel_tasks()
    await world.sleep(3000)
    await start_router(world, "r2", dedup_window_s=4000)
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(5)
    assert len(worker.received(Assignment)) == 1


@pytest.mark.parametrize("minutes", [-60, -22, 22, 60])
@partial(scenario_test, lanes=1)
async def test_router_with_a_wrong_wall_clock_finds_open_obligations(
    world: MemoryWorld, minutes: int
) -> None:
    workers = {name: FakeWorker(world, name) for name in ("w1", "w2")}
    first = await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    assigned = await wait_for_items(
        world, lambda: [a for w in workers.values() for a in w.received(Assignment)]
    )
    dead = workers.pop(assigned[0].worker)
    dead.start(assigned[0])
    await first._ctx.cancel_tasks()
    dead.heartbeat_task.cancel()
    wrong = VirtualClock(world.clock._loop, ahead_ms=minutes * 60_000)
    await start_router(world, "r2", clock=wrong)
    await wait_for_items(world, lambda: read_records(world, RESPONSES, Fence))
    (living,) = workers.values()
    assert [
        a.attempt for a in await wait_for_items(world, lambda: living.received(Assignment))
    ] == [1]


@pytest.mark.parametrize("minutes", [-60, 22, 60])
@partial(scenario_test, lanes=1)
async def test_router_with_a_wrong_wall_clock_recognises_an_id(
    world: MemoryWorld, minutes: int
) -> None:
    worker = FakeWorker(world)
    first = await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    run = worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    worker.finish(run, "stop")
    await first.stop()
    await first._ctx.cancel_tasks()
    wrong = VirtualClock(world.clock._loop, ahead_ms=minutes * 60_000)
    await start_router(world, "r2", clock=wrong)
    append_record(world, REQUESTS, PROMPT)
    append_record(world, REQUESTS, replace(PROMPT, id="b"))
    ids = [
        a.request.id for a in await wait_for_items(world, lambda: worker.received(Assignment), 2)
    ]
    assert ids == ["a", "b"]


@scenario_test
async def test_obligation_older_than_the_window_is_found(world: MemoryWorld) -> None:
    """A lifetime is read back twice, however short the window is in which ids are recognised."""
    worker = FakeWorker(world)
    settings = {"max_lifetime_s": 600, "dedup_window_s": 600}
    first = await start_router(world, "r1", **settings)
    append_record(world, REQUESTS, PROMPT)
    worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    await first.stop()
    await first._ctx.cancel_tasks()
    await world.sleep(1000)
    await start_router(world, "r2", **settings)
    await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))


@scenario_test
async def test_old_heartbeats_are_not_read(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await world.sleep(3600)
    router = await start_router(world)
    assert router._context.fleet_follower.applied < 100
    append_record(world, REQUESTS, PROMPT)
    assert await wait_for_items(world, lambda: worker.received(Assignment))


@scenario_test
async def test_worker_that_died_long_ago_with_a_card_is_declared_lost_again(
    world: MemoryWorld,
) -> None:
    """The router that declared it lost died before it wrote the tombstone."""
    dead, living = FakeWorker(world, "w1"), FakeWorker(world, "w2")
    dead.heartbeat_task.cancel()
    where = partition_of(b"w1", world.broker.partitions[KV_EVENTS])
    world.append(KV_EVENTS, where, Lost(worker="w1", epoch=dead.epoch), key="w1")
    await world.sleep(3600)
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    assert await wait_for_items(world, lambda: living.received(Assignment))
    await world.wait_until(
        lambda: (
            Tombstone(key="worker/w1", epoch=dead.epoch)
            in [decode(r) for r in world.records(REGISTRY, 0)]
        ),
        within_s=20,
    )
    assert dead.received(Assignment) == []


@scenario_test
async def test_unchanged_heartbeats_wake_no_request(world: MemoryWorld) -> None:
    workers = [FakeWorker(world, f"w{n}", model="other") for n in range(10)]
    FakeWorker(world, "w", state="draining")
    router = await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(1.5)  # between two checks, which are a second apart
    finds = count_finds(router)
    await world.sleep(20)
    assert len(finds) <= 21
    assert workers[0].received(Assignment) == []


@scenario_test
async def test_queued_request_is_woken_by_a_worker_that_is_ready_again(world: MemoryWorld) -> None:
    worker = FakeWorker(world, state="draining")
    await start_router(world)
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(5.5)
    worker.state = "ready"
    worker.send_heartbeat()
    await world.wait_until(lambda: bool(worker.received(Assignment)), within_s=0.1)


@scenario_test
async def test_queued_request_is_woken_by_a_worker_whose_heartbeats_resume(
    world: MemoryWorld,
) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    await world.sleep(1)
    worker.heartbeat_task.cancel()
    await world.sleep(7)
    append_record(world, REQUESTS, PROMPT)
    await world.sleep(0.5)
    assert worker.received(Assignment) == []
    worker.send_heartbeat()
    await world.wait_until(lambda: bool(worker.received(Assignment)), within_s=0.1)


@scenario_test
async def test_healthy_runs_are_not_checked_however_many_they_are(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    router = await start_router(world)
    for n in range(20):
        append_record(world, REQUESTS, replace(PROMPT, id=f"r{n}"))
    for assignment in await wait_for_items(world, lambda: worker.received(Assignment), 20):
        worker.start(assignment)
    await world.sleep(5)
    looks: list[str] = []
    for owner in router._owners.values():
        owner.reconcile = looks.append  # type: ignore[method-assign]
    await world.sleep(60)
    assert looks == []
    gone = worker.running.pop()
    await world.sleep(1.5)
    assert set(looks) == {gone.id}
    looks.clear()
    worker.heartbeat_task.cancel()
    await world.sleep(12)
    assert {f"r{n}" for n in range(20)} <= set(looks), "it is lost"


@scenario_test
async def test_lane_is_hashed_once_for_a_continued_run(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    router = await start_router(world)
    worker.running = [RunProgress(id=f"r{n}", attempt=0, phase="aggregated") for n in range(50)]
    await world.sleep(10)
    info = router._lane_of.cache_info()
    assert info.misses == 50
    assert info.hits >= 300


@scenario_test
async def test_unreadable_prompts_are_kept_only_by_a_setting(world: MemoryWorld) -> None:
    unreadable = Entry(b"a", b"\xc1 secret", (("t", b"Request"),))
    for name, keep in (("r1", False), ("r2", True)):
        router = await start_router(world, name, keep_prompts=keep)
        world.append_raw(REQUESTS, 0, unreadable)
        (letter, *_) = reversed(
            await wait_for_items(world, lambda: world.all_records(DEAD_LETTERS), 1 + keep)
        )
        assert (letter.value == unreadable.value) == keep
        await router.stop()
        await router._ctx.cancel_tasks()
