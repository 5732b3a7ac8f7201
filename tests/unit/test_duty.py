"""Snapshot duty: every partition has one writer, and whatever becomes of it, what is found fits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from streams.clock import BrokerClock
from streams.codecs import decode
from streams.duty import AFTER_RECORDS, SnapshotDuty
from streams.follow import Follower
from streams.memory.broker import MemoryLog
from streams.ports import Partition
from streams.records import Ended, SnapshotPointer
from streams.snapshots import Snapshots, Taken
from streams.topics import LEDGER, REGISTRY, SNAPSHOTS
from tests.tally import Tally
from tests.worlds import World, in_world

LANE_0, LANE_1 = Partition(LEDGER, 0), Partition(LEDGER, 1)
EVERY_S = 300.0


async def inline(work: Callable[[], Taken]) -> Taken:
    return work()


class Replica:
    """A fold of the ledger, and its snapshot duty."""

    def __init__(self, world: World, log: MemoryLog, *, every_s: float = EVERY_S) -> None:
        self.world, self.log, self.fold = world, log, Tally()
        broker_clock, snapshots = BrokerClock(world.clock), Snapshots(log, world.clock)
        self.follower = Follower(
            log, self.fold, [LEDGER], world.clock, broker_clock=broker_clock, snapshots=snapshots
        )
        self.duty = SnapshotDuty(
            log, LEDGER, "tally", self.fold, self.follower, snapshots, world.clock, broker_clock,
            offload=inline, every_s=every_s,
        )  # fmt: skip
        works = (self.follower.run(), self.duty.belong(), self.duty.work())
        self.tasks = [world.spawn(work) for work in works]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)

    async def kill(self) -> None:
        self.log.cut()
        await self.end()


async def a_replica(world: World, name: str = "one", *, every_s: float = EVERY_S) -> Replica:
    replica = Replica(world, await world.connect(name), every_s=every_s)
    await replica.follower.wait_caught_up()
    return replica


def tell(world: World, count: int = 1, lane: int = 0) -> None:
    world.append(LEDGER, lane, *[Ended(id=f"r{n}", code="seen") for n in range(count)])


def pointers(world: World) -> list[tuple[int, int]]:
    """Partition and position of each pointer there is, the oldest first."""
    found = [decode(record) for record in world.records(REGISTRY, 0)]
    return [(p.partition, p.position) for p in found if isinstance(p, SnapshotPointer)]


async def from_snapshots(world: World) -> Tally:
    """What somebody knows who begins now, without reading the ledger."""
    fold = Tally()
    await Snapshots(await world.connect("late"), world.clock).load(fold, LANE_0, LANE_1)
    return fold


# --- when one is due -----------------------------------------------------------------------------


@in_world
async def test_a_partition_without_a_snapshot_gets_one_at_once(world: World) -> None:
    tell(world, 3)
    await a_replica(world)
    await world.sleep(15)
    assert pointers(world) == [(0, 3)]


@in_world
async def test_one_that_moves_gets_the_next_after_the_period(world: World) -> None:
    tell(world, 3)
    await a_replica(world)
    await world.sleep(15)
    for _ in range(60):
        tell(world)
        await world.sleep(10)
    assert [partition for partition, _ in pointers(world)] == [0, 0, 0]
    (_, first), (_, second), (_, third) = pointers(world)
    assert 25 <= second - first <= 35
    assert 25 <= third - second <= 35


@in_world
async def test_one_that_stands_still_gets_no_other(world: World) -> None:
    tell(world, 3)
    await a_replica(world)
    await world.sleep(10 * EVERY_S)
    assert pointers(world) == [(0, 3)]


@in_world
async def test_one_that_moves_fast_gets_it_sooner(world: World) -> None:
    tell(world)
    await a_replica(world)
    await world.sleep(20)
    tell(world, AFTER_RECORDS)
    await world.sleep(20)
    assert pointers(world) == [(0, 1), (0, AFTER_RECORDS + 1)]


@in_world
async def test_who_takes_over_goes_by_the_age_of_what_is_there(world: World) -> None:
    tell(world, 3)
    first = await a_replica(world)
    await world.sleep(15)
    await first.end()
    await first.duty.close()
    tell(world)
    await a_replica(world, "two")
    await world.sleep(EVERY_S / 2)
    assert pointers(world) == [(0, 3)]
    tell(world)  # what shows that time goes by
    await world.sleep(EVERY_S)
    assert pointers(world) == [(0, 3), (0, 5)]


@in_world
async def test_a_pointer_of_a_topic_that_was_made_anew_is_replaced(world: World) -> None:
    pointer = SnapshotPointer(
        fold="tally", partition=0, position=900, first_part=0, parts=1, checksum="", state_hash=""
    )
    world.append(REGISTRY, 0, pointer, key="snapshot/tally/0")
    tell(world, 3)
    await a_replica(world)
    await world.sleep(15)
    assert pointers(world) == [(0, 900), (0, 3)]


@in_world
async def test_nothing_is_written_before_the_log_is_read(world: World) -> None:
    tell(world, 5000)
    world.faults.slow["poll"] = 5.0
    replica = Replica(world, await world.connect("one"), every_s=1.0)
    await world.until(lambda: 0 < (replica.fold.position(LANE_0) or 0) < 5000)
    assert not pointers(world)
    await replica.follower.wait_caught_up()
    await world.until(lambda: bool(pointers(world)))
    assert pointers(world) == [(0, 5000)]


@in_world
async def test_what_it_wrote_is_counted(world: World) -> None:
    tell(world, 3)
    replica = await a_replica(world)
    assert replica.duty.age_s(0) is None
    await world.sleep(15)
    assert replica.duty.written == 1
    assert replica.duty.bytes == len(replica.fold.snapshot(LANE_0))
    tell(world)
    await world.sleep(30)
    assert replica.duty.age_s(0) == pytest.approx(45, abs=15)


# --- who writes it -------------------------------------------------------------------------------


@in_world
async def test_two_share_the_partitions(world: World) -> None:
    one, two = await a_replica(world), await a_replica(world, "two")
    await world.until(lambda: bool(one.duty.owned) and bool(two.duty.owned))
    assert sorted([*one.duty.owned, *two.duty.owned]) == [0, 1]
    tell(world, 3, 0)
    tell(world, 4, 1)
    await world.sleep(30)
    assert sorted(pointers(world)) == [(0, 3), (1, 4)]
    assert (one.duty.written, two.duty.written) == (1, 1)


@in_world
async def test_the_partitions_of_a_dead_one_go_to_the_other(world: World) -> None:
    one, two = await a_replica(world), await a_replica(world, "two")
    await world.until(lambda: bool(one.duty.owned) and bool(two.duty.owned))
    await one.kill()
    await world.until(lambda: two.duty.owned == {0, 1})
    tell(world, 3, 0)
    tell(world, 4, 1)
    await world.sleep(30)
    assert sorted(pointers(world)) == [(0, 3), (1, 4)]


@in_world
async def test_who_leaves_in_good_order_is_followed_at_once(world: World) -> None:
    one, two = await a_replica(world), await a_replica(world, "two")
    await world.until(lambda: bool(one.duty.owned) and bool(two.duty.owned))
    await one.duty.close()
    await world.sleep(2)
    assert two.duty.owned == {0, 1}
    assert not one.tasks[1].done() or one.tasks[1].exception() is None


@in_world
async def test_what_is_half_written_when_the_partition_moves_is_never_seen(world: World) -> None:
    tell(world, 3)
    one = await a_replica(world)
    world.faults.slow["append"] = 1.0
    await world.until(lambda: len(world.everywhere(SNAPSHOTS)) == 1)
    one.duty.revoked(frozenset({0}))
    await world.sleep(20)
    assert not pointers(world)
    assert not (await from_snapshots(world)).shares
    one.duty.assigned({0: 0})
    await world.sleep(20)
    assert pointers(world) == [(0, 3)]
    assert (await from_snapshots(world)).offsets(LANE_0) == [0, 1, 2]


@in_world
async def test_one_that_does_not_know_that_it_is_out_does_no_harm(world: World) -> None:
    """Its older snapshot becomes the newest: a longer tail is to be read, and that is all."""
    tell(world, 3)
    one = await a_replica(world)
    one.duty.revoked = lambda partitions: None  # type: ignore[method-assign]
    world.faults.slow["append"] = 20.0
    await world.until(lambda: len(world.everywhere(SNAPSHOTS)) == 1)
    world.faults.slow.clear()
    tell(world, 2)
    two = await a_replica(world, "two")
    two.duty.assigned({0: 0})
    await world.until(lambda: len(pointers(world)) == 2)
    assert pointers(world) == [(0, 5), (0, 3)]
    assert (await from_snapshots(world)).offsets(LANE_0) == [0, 1, 2]
    late = await a_replica(world, "late")
    assert late.fold.offsets(LANE_0) == [0, 1, 2, 3, 4]


# --- what it must not disturb --------------------------------------------------------------------


@in_world
async def test_state_and_position_are_of_one_moment_though_it_is_read_elsewhere(
    world: World,
) -> None:
    async def slowly(work: Callable[[], Taken]) -> Taken:
        tell(world, 100)
        await world.sleep(5)
        return work()

    tell(world, 3)
    replica = Replica(world, await world.connect("one"))
    replica.duty._offload = slowly
    await world.until(lambda: bool(pointers(world)))
    assert pointers(world) == [(0, 3)]
    assert (await from_snapshots(world)).offsets(LANE_0) == [0, 1, 2]
    await world.until(lambda: replica.fold.position(LANE_0) == 103)


@in_world
async def test_an_outage_ends_nothing(world: World) -> None:
    tell(world, 3)
    replica = await a_replica(world)
    world.broker.available = False
    await world.sleep(100)
    world.broker.available = True
    await world.until(lambda: bool(pointers(world)))
    assert not any(task.done() for task in replica.tasks)
