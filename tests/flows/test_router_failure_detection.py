"""Tests of failure detection in a router: which workers are dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from kvlane.app.lanes.failure_detector import PROBE_LEAD
from kvlane.app.router import Router
from kvlane.app.settings import Settings
from kvlane.streams.codecs import decode
from kvlane.streams.errors import AppendFailed
from kvlane.streams.ports import Appended
from kvlane.streams.records import Assignment, Fence, Lost, Probe, Tombstone
from kvlane.streams.topics import KV_EVENTS, REGISTRY, REQUESTS, RESPONSES, partition_of
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.simulated_processes import SimulatedProcesses


def partition(world: MemoryWorld, name: str) -> int:
    return partition_of(name.encode(), world.broker.partitions[KV_EVENTS])


def names(world: MemoryWorld, wanted: Callable[[int], bool], how_many: int) -> list[str]:
    """Names of workers whose heartbeats lie on partitions like this."""
    found = (name for n in count() if wanted(partition(world, name := f"w{n}")))
    return [next(found) for _ in range(how_many)]


def deaths(world: MemoryWorld) -> list[str]:
    """Who was declared lost, by name, in the order of kv-events' partitions."""
    events = map(decode, world.all_records(KV_EVENTS))
    return [r.worker for r in events if isinstance(r, Lost)]


def probes(world: MemoryWorld, number: int) -> int:
    return sum(isinstance(decode(r), Probe) for r in world.records(KV_EVENTS, number))


def tombstones(world: MemoryWorld) -> list[Tombstone]:
    cards = map(decode, world.records(REGISTRY, 0))
    return [r for r in cards if isinstance(r, Tombstone)]


def without(router: Router, number: int, refuse: Callable[[], Any]) -> None:
    """Probes do not get through to one partition of kv-events."""
    send = router._context.publisher.publish_once

    async def some_are_sent(topic: str, key: str, record: Any, partition: Any = None) -> Any:
        if topic == KV_EVENTS and partition == number:
            await refuse()
        return await send(topic, key, record, partition)

    router._context.publisher.publish_once = some_are_sent  # type: ignore[method-assign]


async def pair(world: MemoryWorld) -> tuple[list[FakeWorker], Router]:
    """Two workers whom a router has heard for a while, and that fall silent now."""
    workers = [FakeWorker(world, f"w{n}") for n in range(2)]
    router = await start_router(world)
    await world.sleep(3)
    for worker in workers:
        worker.heartbeat_task.cancel()
    return workers, router


async def all_beat_again_in_time(world: MemoryWorld, workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.heartbeat_task = world.spawn(worker._beat())
    await world.sleep(30)
    assert deaths(world) == []


async def fails() -> None:
    raise AppendFailed("no leader")


async def hangs() -> None:
    await asyncio.get_running_loop().create_future()


@scenario_test
async def test_lost_record_is_repeated_for_an_epoch_with_heartbeats(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    worker.heartbeat_task.cancel()
    await wait_for_items(world, lambda: worker.received(Lost))
    worker.send_heartbeat()
    await wait_for_items(world, lambda: worker.received(Lost), 2)


@scenario_test
async def test_broker_outage_declares_no_worker_lost(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    await world.sleep(3)
    worker.heartbeat_task.cancel()
    world.broker.available = False
    await world.sleep(30)
    world.broker.available = True
    worker.heartbeat_task = world.spawn(worker._beat())
    await world.sleep(20)
    assert worker.received(Lost) == []


@scenario_test
async def test_partition_without_leader_protects_only_its_own_workers(world: MemoryWorld) -> None:
    bad = partition(world, "w0")
    dead_too, *living = names(world, lambda p: p != bad, 8)
    hands = [FakeWorker(world, name) for name in ("w0", dead_too, *living)]
    router = await start_router(world)
    without(router, bad, fails)
    await world.sleep(2)
    hands[0].heartbeat_task.cancel()
    hands[1].heartbeat_task.cancel()
    await world.wait_until(lambda: deaths(world) == [dead_too], within_s=10)
    await world.sleep(20)
    assert deaths(world) == [dead_too]


@scenario_test
async def test_hanging_probe_delays_no_verdict_elsewhere(world: MemoryWorld) -> None:
    bad = partition(world, "w0")
    dead_too, *living = names(world, lambda p: p != bad, 8)
    hands = [FakeWorker(world, name) for name in ("w0", dead_too, *living)]
    router = await start_router(world)
    without(router, bad, hangs)
    await world.sleep(2)
    hands[0].heartbeat_task.cancel()
    hands[1].heartbeat_task.cancel()
    await world.wait_until(lambda: deaths(world) == [dead_too], within_s=10)


@scenario_test
async def test_workers_of_one_partition_are_examined_with_the_same_probes(
    world: MemoryWorld,
) -> None:
    here = partition(world, "w0")
    hands = [FakeWorker(world, name) for name in names(world, lambda p: p == here, 2)]
    hands += [FakeWorker(world, name) for name in names(world, lambda p: p != here, 6)]
    await world.sleep(0.3)  # else heartbeats and looks at them are at the same moments
    await start_router(world)
    await world.sleep(2)
    before = probes(world, here)
    for hand in hands[:2]:
        hand.heartbeat_task.cancel()
    await world.wait_until(lambda: len(deaths(world)) == 2)
    settings = Settings()
    early_s = PROBE_LEAD * settings.request_timeout_ms / 1000
    assert probes(world, here) - before == 1 + early_s / settings.heartbeat_interval_s


@scenario_test
async def test_slightly_late_heartbeats_cause_no_probes(world: MemoryWorld) -> None:
    """However short the time is that they have."""
    workers = [FakeWorker(world, f"w{n}") for n in range(2)]
    await start_router(world, worker_timeout_s=2.4, heartbeat_interval_s=1)
    for worker in workers:
        worker.heartbeat_task.cancel()
    await world.sleep(1)
    before = [probes(world, partition(world, worker.name)) for worker in workers]
    for _ in range(20):
        for worker in workers:
            worker.send_heartbeat()
        await world.sleep(1.5)
    assert [probes(world, partition(world, worker.name)) for worker in workers] == before


@pytest.mark.parametrize("ahead_ms", [-40_000, 40_000])
@scenario_test
async def test_worker_of_a_new_leader_with_another_clock_is_not_lost(
    world: MemoryWorld, ahead_ms: int
) -> None:
    workers = [FakeWorker(world, f"w{n}") for n in range(2)]
    await start_router(world)
    await world.sleep(3)
    workers[0].heartbeat_task.cancel()
    world.lead(KV_EVENTS, partition(world, "w0"), ahead_ms)
    for _ in range(10):
        await world.sleep(0.1)
        world.append(KV_EVENTS, partition(world, "w0"), Probe(by="r2"), key="r2")
        await world.sleep(1.8)
        workers[0].send_heartbeat()
    assert deaths(world) == []
    await world.wait_until(lambda: deaths(world) == ["w0"], within_s=7.5)


@pytest.mark.parametrize("ahead_ms", [-40_000, 40_000])
@scenario_test
async def test_worker_that_died_before_a_leader_change_is_lost_in_time(
    world: MemoryWorld, ahead_ms: int
) -> None:
    dead, _ = FakeWorker(world, "w0"), FakeWorker(world, "w1")
    await start_router(world)
    await world.sleep(3)
    dead.heartbeat_task.cancel()
    await world.sleep(1)
    world.lead(KV_EVENTS, partition(world, "w0"), ahead_ms)
    await world.sleep(2.5)
    assert deaths(world) == []
    await world.wait_until(lambda: deaths(world) == ["w0"], within_s=4)


@pytest.mark.parametrize("ahead_ms", [-40_000, 40_000])
@scenario_test
async def test_workers_of_a_broker_with_another_clock_get_requests(
    world: MemoryWorld, ahead_ms: int
) -> None:
    world.lead(KV_EVENTS, partition(world, "w0"), ahead_ms)
    worker = FakeWorker(world, "w0")
    FakeWorker(world, "w1", model="another")
    await start_router(world)
    await world.sleep(20)
    assert deaths(world) == []
    append_record(world, REQUESTS, PROMPT)
    await wait_for_items(world, lambda: worker.received(Assignment))


@scenario_test
async def test_worker_silent_before_the_router_started_gets_time(world: MemoryWorld) -> None:
    workers = [FakeWorker(world, f"w{n}") for n in range(2)]
    await world.sleep(1)
    for worker in workers:
        worker.heartbeat_task.cancel()
    await world.sleep(60)  # as after an outage of everything
    await start_router(world)
    await world.sleep(3)
    assert deaths(world) == []
    await world.wait_until(lambda: len(deaths(world)) == 2, within_s=10)


@scenario_test
async def test_card_of_a_lost_worker_is_removed_by_any_live_router(world: MemoryWorld) -> None:
    """The router that declared it lost died before it wrote the tombstone."""
    worker = FakeWorker(world)
    FakeWorker(world, "w2")
    await start_router(world)
    worker.heartbeat_task.cancel()
    lost = Lost(worker=worker.name, epoch=worker.epoch, by="r0")
    world.append(KV_EVENTS, partition(world, worker.name), lost, key=worker.name)
    await world.wait_until(lambda: bool(tombstones(world)), within_s=30)
    await world.sleep(10)
    assert tombstones(world) == [Tombstone(key="worker/w1", epoch=worker.epoch)]


@scenario_test
async def test_slow_broker_declares_no_worker_lost(world: MemoryWorld) -> None:
    """Heartbeats take as long as the probe does: for a while nothing at all gets through."""
    workers, _ = await pair(world)
    world.faults.slow["append"] = 3.0
    await world.sleep(12)
    world.faults.slow.clear()
    await all_beat_again_in_time(world, workers)  # what was on its way arrives


@scenario_test
async def test_leader_that_has_just_taken_over_gets_the_heartbeats_first(
    world: MemoryWorld,
) -> None:
    """They are still on their way to the one that hangs, when probes reach the new one at once."""
    workers, router = await pair(world)
    hanging = True

    async def waits() -> None:
        while hanging:
            await world.sleep(0.1)

    for number in {partition(world, worker.name) for worker in workers}:
        without(router, number, waits)
    await world.sleep(4.5)
    hanging = False
    await world.sleep(1.5)
    await all_beat_again_in_time(world, workers)  # silent for longer than their time


@scenario_test
async def test_worker_late_together_with_the_router_is_not_lost(world: MemoryWorld) -> None:
    """Appends of the router were slow elsewhere, and probes are quick again."""
    workers, router = await pair(world)

    async def takes_long() -> Appended:
        await world.sleep(3.0)
        return Appended(0, 0, world.broker.now_ms())

    slow = world.spawn(router._context.publisher._observed(takes_long()))
    await world.sleep(7.5)
    await all_beat_again_in_time(world, workers)
    await slow


@scenario_test
async def test_slow_appends_elsewhere_protect_for_one_timeout_at_most(world: MemoryWorld) -> None:
    dead, _ = FakeWorker(world, "w0"), FakeWorker(world, "w1")
    router = await start_router(world)
    await world.sleep(3)
    dead.heartbeat_task.cancel()
    world.spawn(router._context.publisher._observed(hangs()))
    await world.sleep(9)
    assert deaths(world) == []
    await world.wait_until(lambda: deaths(world) == ["w0"], within_s=3)


@scenario_test
async def test_slow_broker_protects_workers_only_while_it_is_slow(world: MemoryWorld) -> None:
    FakeWorker(world, "w0")
    dead = FakeWorker(world, "w1")
    await start_router(world)
    await world.sleep(3)
    dead.heartbeat_task.cancel()
    world.faults.slow["append"] = 3.0
    await world.sleep(20)
    world.faults.slow.clear()
    await world.wait_until(lambda: deaths(world) == ["w1"], within_s=10)


@scenario_test
async def test_resumed_router_declares_no_worker_lost(world: MemoryWorld) -> None:
    """SIGSTOP for a minute: for its clock all workers were silent, in its log none was."""
    processes = SimulatedProcesses(world)
    workers = [FakeWorker(world, f"w{n}") for n in range(3)]
    await processes.router()
    await world.sleep(3)
    processes.stop("r1")
    await world.sleep(60)
    processes.resume("r1")
    await world.sleep(20)
    assert deaths(world) == []
    workers[0].heartbeat_task.cancel()
    await world.wait_until(lambda: deaths(world) == ["w0"], within_s=10)


@scenario_test
async def test_lone_worker_gets_twice_the_time_and_no_more(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    await world.sleep(3)
    worker.heartbeat_task.cancel()
    await world.sleep(9)
    assert deaths(world) == []
    await world.wait_until(lambda: deaths(world) == ["w1"], within_s=3)


@scenario_test
async def test_one_of_two_workers_gets_no_more_than_its_time(world: MemoryWorld) -> None:
    first, _ = FakeWorker(world, "w1"), FakeWorker(world, "w2")
    await start_router(world)
    await world.sleep(3)
    first.heartbeat_task.cancel()
    await world.wait_until(lambda: deaths(world) == ["w1"], within_s=7.5)


@scenario_test
async def test_when_more_than_a_third_fall_silent_at_once_all_get_twice_the_time(
    world: MemoryWorld,
) -> None:
    workers = [FakeWorker(world, f"w{n}") for n in range(5)]
    await start_router(world)
    await world.sleep(3)
    for worker in workers[:2]:
        worker.heartbeat_task.cancel()
    await world.sleep(9)
    assert deaths(world) == []
    await world.wait_until(lambda: sorted(deaths(world)) == ["w0", "w1"], within_s=3)


@scenario_test
async def test_two_routers_with_one_lost_worker_move_its_request_once(world: MemoryWorld) -> None:
    first = FakeWorker(world, "w1")
    for name in ("r1", "r2"):
        await start_router(world, name)
    append_record(world, REQUESTS, PROMPT)
    first.start((await wait_for_items(world, lambda: first.received(Assignment)))[0])
    second = FakeWorker(world, "w2")
    first.heartbeat_task.cancel()
    await wait_for_items(world, lambda: second.received(Assignment))
    await world.sleep(20)
    assert len(second.received(Assignment)) == 1
    assert len(read_records(world, RESPONSES, Fence)) == 1
