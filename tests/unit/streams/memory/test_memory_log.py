"""Tests of the log in memory beyond the contract: faults, zombies, retention, compaction."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import pytest

from kvlane.streams.clock import SystemClock
from kvlane.streams.errors import (
    AppendFailed,
    BrokerUnavailable,
    LogClosed,
    OwnershipLost,
    PositionLost,
)
from kvlane.streams.memory.memory_broker import AppendFate, MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.memory.memory_member import MemoryMember
from kvlane.streams.ports import Entry, Partition, Record
from kvlane.streams.topics import BATCH_JOBS, LEDGER, REGISTRY, REQUESTS
from tests.harness.memory_world import MemoryWorld, scenario_test
from workbench.testing.virtual_time import VirtualClock

HOUR_S = 3600.0
SESSION_S = 10.0
LANE = Partition(LEDGER, 0)


def entry(text: str, key: str = "k") -> Entry:
    return Entry(key.encode(), text.encode())


def values(world: MemoryWorld, topic: str = LEDGER) -> list[str]:
    return [(r.value or b"-").decode() for r in world.records(topic, 0)]


class Owner:
    """Resumes what it gets; reads nothing by itself."""

    def __init__(self) -> None:
        self.member: MemoryMember | None = None
        self.owned: set[int] = set()

    def assigned(self, starts: Mapping[int, int]) -> None:
        self.owned |= starts.keys()
        for partition in starts:
            assert self.member is not None
            self.member.resume(partition)

    def revoked(self, partitions: frozenset[int]) -> None:
        self.owned -= partitions

    async def poll(self, timeout_s: float = 1.0) -> list[Record]:
        assert self.member is not None
        return [r for rs in (await self.member.poll(timeout_s)).values() for r in rs]


class Group:
    """Two members on connections of their own, settled on one lane each."""

    def __init__(self, world: MemoryWorld) -> None:
        self.world = world
        self.logs = [MemoryLog(world.broker, name) for name in "ab"]
        self.owners = [Owner(), Owner()]

    async def settle(self) -> Group:
        for log, owner in zip(self.logs, self.owners, strict=True):
            await log.start()
            owner.member = log.member(REQUESTS, "g", owner)
        while [len(owner.owned) for owner in self.owners] != [1, 1]:
            await asyncio.gather(*(owner.poll() for owner in self.owners))
        return self


# --- what may become of an append ---


@pytest.mark.parametrize(("fate", "left"), [(AppendFate.LOST, []), (AppendFate.UNREPORTED, ["x"])])
@scenario_test
async def test_lost_append_leaves_nothing_and_an_unreported_one_is_stored(
    world: MemoryWorld, fate: AppendFate, left: list[str]
) -> None:
    log = await world.connect()
    world.faults.next_fates(LEDGER, fate)
    with pytest.raises(AppendFailed):
        await log.append(LEDGER, entry("x"), 0)
    assert values(world) == left


@scenario_test
async def test_retried_append_is_stored_twice_and_reports_the_first(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.next_fates(LEDGER, AppendFate.TWICE)
    assert (await log.append(LEDGER, entry("x"), 0)).offset == 0
    assert values(world) == ["x", "x"]


@scenario_test
async def test_late_append_is_stored_after_its_time_out(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.late = 5.0
    world.faults.next_fates(LEDGER, AppendFate.LATE)
    with pytest.raises(AppendFailed):
        await log.append(LEDGER, entry("late"), 0)
    await log.append(LEDGER, entry("elsewhere"), 1)
    assert values(world) == []
    await world.sleep(5.1)
    assert values(world) == ["late"]


@scenario_test
async def test_append_after_a_late_one_is_stored_after_it(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.late = 5.0
    world.faults.next_fates(LEDGER, AppendFate.LATE)
    with pytest.raises(AppendFailed):
        await log.append(LEDGER, entry("late"), 0)
    assert (await log.append(LEDGER, entry("next"), 0)).offset == 1
    await world.sleep(5.1)
    assert values(world) == ["late", "next"]


@scenario_test
async def test_late_append_of_a_replaced_producer_is_overtaken(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.late = 5.0
    world.faults.next_fates(LEDGER, AppendFate.OVERTAKEN)
    with pytest.raises(AppendFailed):
        await log.append(LEDGER, entry("late"), 0)
    await log.append(LEDGER, entry("next"), 0)
    await world.sleep(5.1)
    assert values(world) == ["next", "late"]


@scenario_test
async def test_acknowledged_appends_are_in_the_order_of_the_calls_among_late_ones(
    world: MemoryWorld,
) -> None:
    log = await world.connect()
    world.faults.late = 2.0
    fates = (
        AppendFate.KEPT,
        AppendFate.LATE,
        AppendFate.OVERTAKEN,
        AppendFate.KEPT,
        AppendFate.LATE,
        AppendFate.KEPT,
    )
    world.faults.next_fates(LEDGER, *fates)
    for number in range(len(fates)):
        with suppress(AppendFailed):
            await log.append(LEDGER, entry(f"{number}"), 0)
        await world.sleep(0.5)
    await world.sleep(5.0)
    assert values(world) == ["0", "1", "3", "4", "5", "2"]


@scenario_test
async def test_records_sent_before_a_crash_are_stored_after_it(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.late, world.faults.departures = 5.0, 2
    world.faults.slow["append"] = 1.0
    for number in range(3):
        world.spawn(log.append(LEDGER, entry(f"{number}"), 0))
    await world.sleep(0.5)
    log.kill()
    await world.sleep(1.0)
    assert values(world) == []
    await world.sleep(10.0)
    assert values(world) == ["0", "1"]


@scenario_test
async def test_append_of_a_cancelled_caller_may_be_stored_late(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.late = 5.0
    world.faults.slow["append"] = 1.0
    sending = world.spawn(log.append(LEDGER, entry("x"), 0))
    await world.sleep(0.5)
    sending.cancel()
    await world.sleep(4.0)
    assert values(world) == []
    await world.sleep(2.0)
    assert values(world) == ["x"]


@scenario_test
async def test_appends_arrive_in_order_whatever_their_latency(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.slow["append"] = 3.0
    first = world.spawn(log.append(LEDGER, entry("first"), 0))
    await world.sleep(1.0)
    world.faults.slow["append"] = 0.1
    await log.append(LEDGER, entry("second"), 0)
    await first
    assert values(world) == ["first", "second"]


@scenario_test
async def test_cancelled_append_is_still_stored(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.slow["append"] = 3.0
    sending = world.spawn(log.append(LEDGER, entry("x"), 0))
    await world.sleep(1.0)
    sending.cancel()
    await asyncio.wait([sending])
    assert values(world) == ["x"]


@scenario_test
async def test_close_delivers_records_in_flight(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.slow["append"] = 3.0
    sending = world.spawn(log.append(LEDGER, entry("x"), 0))
    await world.sleep(1.0)
    await log.close()
    assert values(world) == ["x"]
    sending.cancel()


@scenario_test
async def test_outage_fails_appends_and_queries_and_polls_wait(world: MemoryWorld) -> None:
    log = await world.connect()
    reader = log.reader()
    reader.assign({LANE: 0})
    world.append(LEDGER, 0)
    world.append_raw(LEDGER, 0, entry("x"))
    world.broker.available = False
    with pytest.raises(AppendFailed):
        await log.append(LEDGER, entry("y"), 0)
    with pytest.raises(BrokerUnavailable):
        await log.end_offsets(LEDGER, [0])
    assert await reader.poll(5.0) == {}
    world.broker.available = True
    assert [r.value for r in (await reader.poll(5.0))[LANE]] == [b"x"]


# --- append time ---


def times_s(world: MemoryWorld) -> list[int]:
    """Append times of the lane, seconds after its first."""
    times = [r.timestamp for r in world.records(LEDGER, 0)]
    return [(t - times[0]) // 1000 for t in times]


@scenario_test
async def test_append_time_is_the_leaders(world: MemoryWorld) -> None:
    behind = VirtualClock(asyncio.get_running_loop(), ahead_ms=-7000)
    for leader in (world.clock, behind, world.clock):
        world.broker.set_leader_clock(LEDGER, 0, leader)
        world.append_raw(LEDGER, 0, entry("x"))
        await world.sleep(10.0)
    assert times_s(world) == [0, 3, 20]
    log = await world.connect()
    first_ms = world.records(LEDGER, 0)[0].timestamp
    assert await log.offset_at(LEDGER, 0, first_ms + 5000) == 2


@scenario_test
async def test_append_time_goes_back_where_another_broker_leads(world: MemoryWorld) -> None:
    ahead = VirtualClock(asyncio.get_running_loop(), ahead_ms=7000)
    for leader in (world.clock, ahead, world.clock):
        world.broker.set_leader_clock(LEDGER, 0, leader)
        world.append_raw(LEDGER, 0, entry("x"))
        await world.sleep(1.0)
    assert times_s(world) == [0, 8, 2]
    log = await world.connect()
    first_ms = world.records(LEDGER, 0)[0].timestamp
    assert await log.offset_at(LEDGER, 0, first_ms + 2000) == 1, "the first at or after it"


# --- dead and sleeping clients ---


@scenario_test
async def test_killed_client_appends_nothing_and_its_calls_never_return(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.slow["append"] = 3.0
    sending = world.spawn(log.append(LEDGER, entry("x"), 0))
    await world.sleep(1.0)
    log.kill()
    querying = world.spawn(log.end_offsets(LEDGER, [0]))
    await world.sleep(100.0)
    assert values(world) == []
    assert not sending.done()
    assert not querying.done()


@scenario_test
async def test_lanes_of_a_cut_client_move_after_its_session(world: MemoryWorld) -> None:
    group = await Group(world).settle()
    cut_at = world.clock.now()
    group.logs[0].kill()
    while len(group.owners[1].owned) < world.lanes:
        await group.owners[1].poll()
    assert world.clock.now() - cut_at == pytest.approx(SESSION_S, abs=1.0)


@scenario_test
async def test_member_that_was_suspended_for_a_session_wakes_without_its_assignment(
    world: MemoryWorld,
) -> None:
    group = await Group(world).settle()
    sleeper, other = group.owners
    before = set(sleeper.owned)
    group.logs[0].suspend()
    while len(other.owned) < world.lanes:
        await other.poll()
    assert sleeper.owned == before
    group.logs[0].resume()
    assert sleeper.owned == set()
    assert sleeper.member is not None
    with pytest.raises(OwnershipLost):
        await sleeper.member.commit(dict.fromkeys(before, 0))
    await asyncio.gather(sleeper.poll(), other.poll())
    await asyncio.gather(sleeper.poll(), other.poll())
    assert [len(sleeper.owned), len(other.owned)] == [1, 1]


@scenario_test
async def test_short_suspension_has_no_effect(world: MemoryWorld) -> None:
    group = await Group(world).settle()
    owned = [set(owner.owned) for owner in group.owners]
    group.logs[0].suspend()
    await group.owners[1].poll(SESSION_S / 2)
    group.logs[0].resume()
    await asyncio.gather(*(owner.poll(SESSION_S) for owner in group.owners))
    assert [owner.owned for owner in group.owners] == owned


@scenario_test
async def test_member_that_does_not_poll_is_left_out(world: MemoryWorld) -> None:
    group = await Group(world).settle()
    idle, other = group.owners
    while len(other.owned) < world.lanes:
        await other.poll(60.0)
    assert idle.owned
    assert world.clock.now() == pytest.approx(300.0, abs=5.0)


@scenario_test
async def test_closed_member_does_not_rejoin_by_a_waiting_poll(world: MemoryWorld) -> None:
    group = await Group(world).settle()
    closing, other = group.owners
    assert closing.member is not None
    world.faults.slow["heartbeat"] = 1.0
    polling = world.spawn(closing.poll(30.0))
    world.broker.group(REQUESTS, "g").evict(closing.member.id)
    await world.sleep(0.5)
    await closing.member.close()
    with pytest.raises(LogClosed):
        await polling
    while len(other.owned) < world.lanes:
        await other.poll()


# --- what the broker does not keep ---


@scenario_test
async def test_records_are_deleted_after_their_retention(world: MemoryWorld) -> None:
    log = await world.connect()
    await log.append(LEDGER, entry("old"), 0)
    await world.sleep(23 * HOUR_S)
    await log.append(LEDGER, entry("young"), 0)
    await world.sleep(2 * HOUR_S)
    assert await log.start_offsets(LEDGER, [0]) == {0: 1}
    assert values(world) == ["young"]


@scenario_test
async def test_position_of_a_deleted_record_is_lost(world: MemoryWorld) -> None:
    log = await world.connect()
    reader = log.reader()
    reader.assign({LANE: 0})
    waiting = world.spawn(reader.poll(60.0))
    world.append_raw(LEDGER, 0, entry("x"))
    await waiting
    reader.assign({LANE: 0})
    await world.sleep(25 * HOUR_S)
    with pytest.raises(PositionLost):
        await reader.poll(1.0)


def bounded(max_records: int) -> MemoryBroker:
    return MemoryBroker(SystemClock(), lanes=1, max_records=max_records)


def test_full_partition_drops_its_oldest_records() -> None:
    broker = bounded(3)
    for n in range(5):
        broker.append(LEDGER, 0, [entry(str(n))])
    assert [r.value for r in broker.records(LEDGER, 0)] == [b"2", b"3", b"4"]


def test_full_partition_of_a_compacted_topic_drops_no_records() -> None:
    broker = bounded(3)
    for n in range(5):
        broker.append(REGISTRY, 0, [entry("x", key=str(n))])
    assert len(broker.records(REGISTRY, 0)) == 5


def keys(world: MemoryWorld) -> list[tuple[bytes | None, int]]:
    return [(r.key, r.offset) for r in world.records(REGISTRY, 0)]


async def two_days(world: MemoryWorld) -> None:
    """a, b, a again, b's tombstone; two days later c."""
    for key, text in (("a", "1"), ("b", "1"), ("a", "2")):
        world.append_raw(REGISTRY, 0, entry(text, key))
    world.append_raw(REGISTRY, 0, Entry(b"b", None))
    await world.sleep(49 * HOUR_S)
    world.append_raw(REGISTRY, 0, entry("1", "c"))


@scenario_test
async def test_compaction_keeps_the_last_record_of_each_key(world: MemoryWorld) -> None:
    await two_days(world)
    world.broker.compact(REGISTRY)
    assert keys(world) == [(b"a", 2), (b"c", 4)]


@scenario_test
async def test_compaction_keeps_young_records(world: MemoryWorld) -> None:
    await two_days(world)
    world.append_raw(REGISTRY, 0, entry("2", "c"))
    world.broker.compact(REGISTRY)
    assert keys(world) == [(b"a", 2), (b"c", 4), (b"c", 5)]


@scenario_test
async def test_tombstones_are_kept_a_day_longer_than_their_records(world: MemoryWorld) -> None:
    world.append_raw(REGISTRY, 0, entry("1", "b"))
    world.append_raw(REGISTRY, 0, Entry(b"b", None))
    await world.sleep(25 * HOUR_S)
    world.append_raw(REGISTRY, 0, entry("1", "c"))
    world.broker.compact(REGISTRY)
    assert keys(world) == [(b"b", 1), (b"c", 2)]


@scenario_test
async def test_tombstones_stay_until_all_readers_have_them(world: MemoryWorld) -> None:
    world.append_raw(REGISTRY, 0, Entry(b"a", None), Entry(b"b", None), entry("1", "c"))
    reader = (await world.connect()).reader()
    reader.assign({Partition(REGISTRY, 0): 1})
    await world.sleep(2)
    world.broker.compact_all(lag_ms=0)
    assert keys(world) == [(b"b", 1), (b"c", 2)]


@scenario_test
async def test_compaction_of_all_topics_leaves_those_that_delete_by_age(world: MemoryWorld) -> None:
    """With a lag of its own, for a test that compacts in between."""
    for topic in (LEDGER, BATCH_JOBS, REGISTRY):
        world.append_raw(topic, 0, entry("1"), entry("2"), entry("3"))
    await world.sleep(2)
    world.broker.compact_all(lag_ms=1000)
    assert [len(world.records(t, 0)) for t in (LEDGER, BATCH_JOBS, REGISTRY)] == [3, 1, 1]


@scenario_test
async def test_readers_skip_the_gaps_of_compaction(world: MemoryWorld) -> None:
    await two_days(world)
    world.broker.compact(REGISTRY)
    log = await world.connect()
    reader = log.reader()
    source = Partition(REGISTRY, 0)
    reader.assign({source: 0})
    records = (await reader.poll(1.0))[source]
    assert [r.offset for r in records] == [2, 4]
    assert reader.position(source) == 5
    assert await log.offset_at(REGISTRY, 0, records[1].timestamp) == 4


@scenario_test
async def test_compaction_runs_after_enough_records(world: MemoryWorld) -> None:
    for _ in range(1100):
        world.append_raw(REGISTRY, 0, entry("x", "same"))
        await world.sleep(0.2 * HOUR_S)
    assert len(world.records(REGISTRY, 0)) < 1000


@scenario_test
async def test_broker_time_never_goes_back(world: MemoryWorld) -> None:
    clock = VirtualClock(world.clock._loop)
    broker = MemoryBroker(clock, lanes=1)
    first = broker.append(LEDGER, 0, [entry("x")]).timestamp_ms
    clock._ahead_ms = -5000
    assert broker.append(LEDGER, 0, [entry("y")]).timestamp_ms == first
