"""The router finds out which workers are dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from app.lanes.deaths import PROBED_BEFORE
from app.router import Router
from app.settings import Settings
from streams.codecs import decode
from streams.errors import AppendFailed
from streams.ports import Appended
from streams.records import Assignment, Fence, Lost, Probe, Tombstone
from streams.topics import KV_EVENTS, REGISTRY, REQUESTS, RESPONSES, partition_of
from tests.processes import Processes
from tests.routers import PROMPT, Hand, read, route, some, write
from tests.worlds import World, in_world


def partition(world: World, name: str) -> int:
    return partition_of(name.encode(), world.broker.partitions[KV_EVENTS])


def names(world: World, wanted: Callable[[int], bool], how_many: int) -> list[str]:
    """Names of workers whose heartbeats lie on partitions like this."""
    found = (name for n in count() if wanted(partition(world, name := f"w{n}")))
    return [next(found) for _ in range(how_many)]


def deaths(world: World) -> list[str]:
    """Who was declared lost, by name, in the order of kv-events' partitions."""
    events = map(decode, world.everywhere(KV_EVENTS))
    return [r.worker for r in events if isinstance(r, Lost)]


def probes(world: World, number: int) -> int:
    return sum(isinstance(decode(r), Probe) for r in world.records(KV_EVENTS, number))


def tombstones(world: World) -> list[Tombstone]:
    cards = map(decode, world.records(REGISTRY, 0))
    return [r for r in cards if isinstance(r, Tombstone)]


def without(router: Router, number: int, refuse: Callable[[], Any]) -> None:
    """Probes do not get through to one partition of kv-events."""
    send = router._context.outbox.send

    async def some_are_sent(topic: str, key: str, record: Any, partition: Any = None) -> Any:
        if topic == KV_EVENTS and partition == number:
            await refuse()
        return await send(topic, key, record, partition)

    router._context.outbox.send = some_are_sent  # type: ignore[method-assign]


class Fast:
    """A clock that goes twice as fast as the broker's."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock

    def now(self) -> float:
        return 2 * self._clock.now()

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds / 2)


async def pair(world: World) -> tuple[list[Hand], Router]:
    """Two workers whom a router has heard for a while, and that fall silent now."""
    workers = [Hand(world, f"w{n}") for n in range(2)]
    router = await route(world)
    await world.sleep(3)
    for worker in workers:
        worker.beating.cancel()
    return workers, router


async def all_beat_again_in_time(world: World, workers: list[Hand]) -> None:
    for worker in workers:
        worker.beating = world.spawn(worker._beat())
    await world.sleep(30)
    assert deaths(world) == []


async def fails() -> None:
    raise AppendFailed("no leader")


async def hangs() -> None:
    await asyncio.get_running_loop().create_future()


@in_world
async def test_a_lost_epoch_that_still_beats_is_told_again(world: World) -> None:
    worker = Hand(world)
    await route(world)
    worker.beating.cancel()
    await some(world, lambda: worker.told(Lost))
    worker.beat()
    await some(world, lambda: worker.told(Lost), 2)


@in_world
async def test_an_outage_of_the_broker_kills_nobody(world: World) -> None:
    worker = Hand(world)
    await route(world)
    await world.sleep(3)
    worker.beating.cancel()
    world.broker.available = False
    await world.sleep(30)
    world.broker.available = True
    worker.beating = world.spawn(worker._beat())
    await world.sleep(20)
    assert worker.told(Lost) == []


@in_world
async def test_a_partition_without_leader_protects_only_its_own_workers(world: World) -> None:
    bad = partition(world, "w0")
    dead_too, *living = names(world, lambda p: p != bad, 8)
    hands = [Hand(world, name) for name in ("w0", dead_too, *living)]
    router = await route(world)
    without(router, bad, fails)
    await world.sleep(2)
    hands[0].beating.cancel()
    hands[1].beating.cancel()
    await world.until(lambda: deaths(world) == [dead_too], within_s=10)
    await world.sleep(20)
    assert deaths(world) == [dead_too]


@in_world
async def test_a_probe_that_hangs_delays_no_verdict_elsewhere(world: World) -> None:
    bad = partition(world, "w0")
    dead_too, *living = names(world, lambda p: p != bad, 8)
    hands = [Hand(world, name) for name in ("w0", dead_too, *living)]
    router = await route(world)
    without(router, bad, hangs)
    await world.sleep(2)
    hands[0].beating.cancel()
    hands[1].beating.cancel()
    await world.until(lambda: deaths(world) == [dead_too], within_s=10)


@in_world
async def test_workers_of_one_partition_are_examined_with_the_same_probes(world: World) -> None:
    here = partition(world, "w0")
    hands = [Hand(world, name) for name in names(world, lambda p: p == here, 2)]
    hands += [Hand(world, name) for name in names(world, lambda p: p != here, 6)]
    await route(world)
    await world.sleep(2)
    before = probes(world, here)
    for hand in hands[:2]:
        hand.beating.cancel()
    await world.until(lambda: len(deaths(world)) == 2)
    settings = Settings()
    early_s = PROBED_BEFORE * settings.request_timeout_ms / 1000
    assert probes(world, here) - before == 1 + early_s / settings.heartbeat_s


@in_world
async def test_nobody_asks_about_workers_that_beat_a_little_late(world: World) -> None:
    """However short the time is that they have."""
    workers = [Hand(world, f"w{n}") for n in range(2)]
    await route(world, worker_timeout_s=2.4, heartbeat_s=1)
    for worker in workers:
        worker.beating.cancel()
    await world.sleep(1)
    before = [probes(world, partition(world, worker.name)) for worker in workers]
    for _ in range(20):
        for worker in workers:
            worker.beat()
        await world.sleep(1.5)
    assert [probes(world, partition(world, worker.name)) for worker in workers] == before


@in_world
async def test_silence_is_measured_in_the_log_and_not_by_a_clock_that_is_fast(
    world: World,
) -> None:
    workers = [Hand(world, f"w{n}") for n in range(2)]
    await route(world, clock=Fast(world))
    for worker in workers:
        worker.beating.cancel()
    for _ in range(20):
        await world.sleep(3)  # for this router they are silent for 6 seconds
        for worker in workers:
            worker.beat()
    assert deaths(world) == []


@in_world
async def test_a_worker_that_was_silent_before_the_router_came_gets_time(world: World) -> None:
    workers = [Hand(world, f"w{n}") for n in range(2)]
    await world.sleep(1)
    for worker in workers:
        worker.beating.cancel()
    await world.sleep(60)  # as after an outage of everything
    await route(world)
    await world.sleep(3)
    assert deaths(world) == []
    await world.until(lambda: len(deaths(world)) == 2, within_s=10)


@in_world
async def test_the_card_of_a_lost_worker_is_removed_by_whoever_lives(world: World) -> None:
    """The router that declared it lost died before it wrote the tombstone."""
    worker = Hand(world)
    Hand(world, "w2")
    await route(world)
    worker.beating.cancel()
    lost = Lost(worker=worker.name, epoch=worker.epoch, by="r0")
    world.append(KV_EVENTS, partition(world, worker.name), lost, key=worker.name)
    await world.until(lambda: bool(tombstones(world)), within_s=30)
    await world.sleep(10)
    assert tombstones(world) == [Tombstone(key="worker/w1", epoch=worker.epoch)]


@in_world
async def test_a_slow_broker_kills_nobody(world: World) -> None:
    """Heartbeats take as long as the probe does: for a while nothing at all gets through."""
    workers, _ = await pair(world)
    world.faults.slow["append"] = 3.0
    await world.sleep(12)
    world.faults.slow.clear()
    await all_beat_again_in_time(world, workers)  # what was on its way arrives


@in_world
async def test_a_leader_that_has_just_taken_over_gets_the_heartbeats_first(world: World) -> None:
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


@in_world
async def test_who_is_late_with_the_router_itself_is_not_lost(world: World) -> None:
    """Appends of the router were slow elsewhere, and probes are quick again."""
    workers, router = await pair(world)

    async def takes_long() -> Appended:
        await world.sleep(3.0)
        return Appended(0, 0, world.broker.now_ms())

    slow = world.spawn(router._context.outbox._observed(takes_long()))
    await world.sleep(7.5)
    await all_beat_again_in_time(world, workers)
    await slow


@in_world
async def test_slow_appends_elsewhere_protect_for_one_time_out_at_most(world: World) -> None:
    dead, _ = Hand(world, "w0"), Hand(world, "w1")
    router = await route(world)
    await world.sleep(3)
    dead.beating.cancel()
    world.spawn(router._context.outbox._observed(hangs()))
    await world.sleep(9)
    assert deaths(world) == []
    await world.until(lambda: deaths(world) == ["w0"], within_s=3)


@in_world
async def test_a_slow_broker_protects_nobody_for_longer_than_it_is_slow(world: World) -> None:
    Hand(world, "w0")
    dead = Hand(world, "w1")
    await route(world)
    await world.sleep(3)
    dead.beating.cancel()
    world.faults.slow["append"] = 3.0
    await world.sleep(20)
    world.faults.slow.clear()
    await world.until(lambda: deaths(world) == ["w1"], within_s=10)


@in_world
async def test_a_stopped_router_that_goes_on_accuses_nobody(world: World) -> None:
    """SIGSTOP for a minute: for its clock all workers were silent, in its log none was."""
    processes = Processes(world)
    workers = [Hand(world, f"w{n}") for n in range(3)]
    await processes.router()
    await world.sleep(3)
    processes.stop("r1")
    await world.sleep(60)
    processes.resume("r1")
    await world.sleep(20)
    assert deaths(world) == []
    workers[0].beating.cancel()
    await world.until(lambda: deaths(world) == ["w0"], within_s=10)


@in_world
async def test_a_lone_worker_gets_twice_the_time_and_no_more(world: World) -> None:
    worker = Hand(world)
    await route(world)
    await world.sleep(3)
    worker.beating.cancel()
    await world.sleep(9)
    assert deaths(world) == []
    await world.until(lambda: deaths(world) == ["w1"], within_s=3)


@in_world
async def test_one_of_two_workers_gets_no_more_than_its_time(world: World) -> None:
    first, _ = Hand(world, "w1"), Hand(world, "w2")
    await route(world)
    await world.sleep(3)
    first.beating.cancel()
    await world.until(lambda: deaths(world) == ["w1"], within_s=7.5)


@in_world
async def test_when_more_than_a_third_fall_silent_at_once_all_get_twice_the_time(
    world: World,
) -> None:
    workers = [Hand(world, f"w{n}") for n in range(5)]
    await route(world)
    await world.sleep(3)
    for worker in workers[:2]:
        worker.beating.cancel()
    await world.sleep(9)
    assert deaths(world) == []
    await world.until(lambda: sorted(deaths(world)) == ["w0", "w1"], within_s=3)


@in_world
async def test_two_routers_that_see_one_death_move_its_request_once(world: World) -> None:
    first = Hand(world, "w1")
    for name in ("r1", "r2"):
        await route(world, name)
    write(world, REQUESTS, PROMPT)
    first.start((await some(world, lambda: first.told(Assignment)))[0])
    second = Hand(world, "w2")
    first.beating.cancel()
    await some(world, lambda: second.told(Assignment))
    await world.sleep(20)
    assert len(second.told(Assignment)) == 1
    assert len(read(world, RESPONSES, Fence)) == 1
