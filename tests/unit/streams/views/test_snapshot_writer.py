"""Tests of the snapshot writer: every partition has one, and every snapshot found is consistent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvlane.streams.clock import BrokerClock
from kvlane.streams.codecs import decode
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Partition
from kvlane.streams.records import Ended, SnapshotPointer
from kvlane.streams.topics import LEDGER, REGISTRY, SNAPSHOTS
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.snapshot_store import CapturedState, SnapshotStore
from kvlane.streams.views.snapshot_writer import MAX_RECORDS_BEHIND, SnapshotWriter
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.recording_view import RecordingView

LANE_0, LANE_1 = Partition(LEDGER, 0), Partition(LEDGER, 1)
EVERY_S = 300.0


async def inline(work: Callable[[], CapturedState]) -> CapturedState:
    return work()


class Replica:
    """A fold of the ledger, and its snapshot duty."""

    def __init__(self, world: MemoryWorld, log: MemoryLog, *, every_s: float = EVERY_S) -> None:
        self.world, self.log, self.view = world, log, RecordingView()
        broker_clock, snapshots = BrokerClock(world.clock), SnapshotStore(log, world.clock)
        self.follower = Follower(
            log, self.view, [LEDGER], world.clock, broker_clock=broker_clock, snapshots=snapshots
        )
        self.duty = SnapshotWriter(
            log, LEDGER, "tally", self.view, self.follower, snapshots, world.clock, broker_clock,
            offload=inline, interval_s=every_s,
        )  # fmt: skip
        works = (self.follower.run(), self.duty.join_group(), self.duty.run())
        self.tasks = [world.spawn(work) for work in works]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)

    async def kill(self) -> None:
        self.log.kill()
        await self.end()


async def a_replica(world: MemoryWorld, name: str = "one", *, every_s: float = EVERY_S) -> Replica:
    replica = Replica(world, await world.connect(name), every_s=every_s)
    await replica.follower.wait_caught_up()
    return replica


def write(world: MemoryWorld, count: int = 1, lane: int = 0) -> None:
    world.append(LEDGER, lane, *[Ended(id=f"r{n}", code="seen") for n in range(count)])


def pointers(world: MemoryWorld) -> list[tuple[int, int]]:
    """Partition and position of each pointer there is, the oldest first."""
    found = [decode(record) for record in world.records(REGISTRY, 0)]
    return [(p.partition, p.position) for p in found if isinstance(p, SnapshotPointer)]


async def from_snapshots(world: MemoryWorld) -> RecordingView:
    """What somebody knows who begins now, without reading the ledger."""
    view = RecordingView()
    await SnapshotStore(await world.connect("late"), world.clock).load(view, LANE_0, LANE_1)
    return view


# --- when one is due -----------------------------------------------------------------------------


@scenario_test
async def test_partition_without_a_snapshot_gets_one_at_once(world: MemoryWorld) -> None:
    write(world, 3)
    await a_replica(world)
    await world.sleep(15)
    assert pointers(world) == [(0, 3)]


@scenario_test
async def test_changed_partition_gets_the_next_snapshot_after_the_period(
    world: MemoryWorld,
) -> None:
    write(world, 3)
    await a_replica(world)
    await world.sleep(15)
    for _ in range(60):
        write(world)
        await world.sleep(10)
    assert [partition for partition, _ in pointers(world)] == [0, 0, 0]
    (_, first), (_, second), (_, third) = pointers(world)
    assert 25 <= second - first <= 35
    assert 25 <= third - second <= 35


@scenario_test
async def test_unchanged_partition_gets_no_other_snapshot(world: MemoryWorld) -> None:
    write(world, 3)
    await a_replica(world)
    await world.sleep(10 * EVERY_S)
    assert pointers(world) == [(0, 3)]


@scenario_test
async def test_fast_partition_gets_a_snapshot_sooner(world: MemoryWorld) -> None:
    write(world)
    await a_replica(world)
    await world.sleep(20)
    write(world, MAX_RECORDS_BEHIND)
    await world.sleep(20)
    assert pointers(world) == [(0, 1), (0, MAX_RECORDS_BEHIND + 1)]


@scenario_test
async def test_new_writer_waits_by_the_age_of_the_last_snapshot(world: MemoryWorld) -> None:
    write(world, 3)
    first = await a_replica(world)
    await world.sleep(15)
    await first.end()
    await first.duty.close()
    write(world)
    await a_replica(world, "two")
    await world.sleep(EVERY_S / 2)
    assert pointers(world) == [(0, 3)]
    write(world)  # what shows that time goes by
    await world.sleep(EVERY_S)
    assert pointers(world) == [(0, 3), (0, 5)]


@scenario_test
async def test_pointer_of_a_recreated_topic_is_replaced(world: MemoryWorld) -> None:
    pointer = SnapshotPointer(
        view="tally", partition=0, position=900, first_part=0, parts=1, checksum="", state_hash=""
    )
    world.append(REGISTRY, 0, pointer, key="snapshot/tally/0")
    write(world, 3)
    await a_replica(world)
    await world.sleep(15)
    assert pointers(world) == [(0, 900), (0, 3)]


@scenario_test
async def test_no_snapshot_is_written_before_the_log_is_read(world: MemoryWorld) -> None:
    write(world, 5000)
    world.faults.slow["poll"] = 5.0
    replica = Replica(world, await world.connect("one"), every_s=1.0)
    await world.wait_until(lambda: 0 < (replica.view.position(LANE_0) or 0) < 5000)
    assert not pointers(world)
    await replica.follower.wait_caught_up()
    await world.wait_until(lambda: bool(pointers(world)))
    assert pointers(world) == [(0, 5000)]


@scenario_test
async def test_written_snapshots_are_counted(world: MemoryWorld) -> None:
    write(world, 3)
    replica = await a_replica(world)
    assert replica.duty.age_s(0) is None
    await world.sleep(15)
    assert replica.duty.written == 1
    assert replica.duty.bytes == len(replica.view.snapshot(LANE_0))
    write(world)
    await world.sleep(30)
    assert replica.duty.age_s(0) == pytest.approx(45, abs=15)


# --- who writes it -------------------------------------------------------------------------------


@scenario_test
async def test_two_share_the_partitions(world: MemoryWorld) -> None:
    one, two = await a_replica(world), await a_replica(world, "two")
    await world.wait_until(lambda: bool(one.duty.owned) and bool(two.duty.owned))
    assert sorted([*one.duty.owned, *two.duty.owned]) == [0, 1]
    write(world, 3, 0)
    write(world, 4, 1)
    await world.sleep(30)
    assert sorted(pointers(world)) == [(0, 3), (1, 4)]
    assert (one.duty.written, two.duty.written) == (1, 1)


@scenario_test
async def test_partitions_of_a_dead_writer_go_to_the_other(world: MemoryWorld) -> None:
    one, two = await a_replica(world), await a_replica(world, "two")
    await world.wait_until(lambda: bool(one.duty.owned) and bool(two.duty.owned))
    await one.kill()
    await world.wait_until(lambda: two.duty.owned == {0, 1})
    write(world, 3, 0)
    write(world, 4, 1)
    await world.sleep(30)
    assert sorted(pointers(world)) == [(0, 3), (1, 4)]


@scenario_test
async def test_writer_that_leaves_the_group_is_replaced_immediately(world: MemoryWorld) -> None:
    one, two = await a_replica(world), await a_replica(world, "two")
    await world.wait_until(lambda: bool(one.duty.owned) and bool(two.duty.owned))
    await one.duty.close()
    await world.sleep(2)
    assert two.duty.owned == {0, 1}
    assert not one.tasks[1].done() or one.tasks[1].exception() is None


@scenario_test
async def test_incomplete_snapshot_of_a_moved_partition_is_never_read(world: MemoryWorld) -> None:
    write(world, 3)
    one = await a_replica(world)
    world.faults.slow["append"] = 1.0
    await world.wait_until(lambda: len(world.all_records(SNAPSHOTS)) == 1)
    one.duty.revoked(frozenset({0}))
    await world.sleep(20)
    assert not pointers(world)
    assert not (await from_snapshots(world)).shares
    one.duty.assigned({0: 0})
    await world.sleep(20)
    assert pointers(world) == [(0, 3)]
    assert (await from_snapshots(world)).offsets(LANE_0) == [0, 1, 2]


@scenario_test
async def test_writer_unaware_of_its_removal_does_no_harm(world: MemoryWorld) -> None:
    """Its older snapshot becomes the newest: a longer tail is to be read, and that is all."""
    write(world, 3)
    one = await a_replica(world)
    one.duty.revoked = lambda partitions: None  # type: ignore[method-assign]
    world.faults.slow["append"] = 20.0
    await world.wait_until(lambda: len(world.all_records(SNAPSHOTS)) == 1)
    world.faults.slow.clear()
    write(world, 2)
    two = await a_replica(world, "two")
    two.duty.assigned({0: 0})
    await world.wait_until(lambda: len(pointers(world)) == 2)
    assert pointers(world) == [(0, 5), (0, 3)]
    assert (await from_snapshots(world)).offsets(LANE_0) == [0, 1, 2]
    late = await a_replica(world, "late")
    assert late.view.offsets(LANE_0) == [0, 1, 2, 3, 4]


# --- what it must not disturb --------------------------------------------------------------------


@scenario_test
async def test_state_and_position_are_consistent_although_it_is_read_elsewhere(
    world: MemoryWorld,
) -> None:
    async def slowly(work: Callable[[], CapturedState]) -> CapturedState:
        write(world, 100)
        await world.sleep(5)
        return work()

    write(world, 3)
    replica = Replica(world, await world.connect("one"))
    replica.duty._offload = slowly
    await world.wait_until(lambda: bool(pointers(world)))
    assert pointers(world) == [(0, 3)]
    assert (await from_snapshots(world)).offsets(LANE_0) == [0, 1, 2]
    await world.wait_until(lambda: replica.view.position(LANE_0) == 103)


@scenario_test
async def test_outage_ends_nothing(world: MemoryWorld) -> None:
    write(world, 3)
    replica = await a_replica(world)
    world.broker.available = False
    await world.sleep(100)
    world.broker.available = True
    await world.wait_until(lambda: bool(pointers(world)))
    assert not any(task.done() for task in replica.tasks)
