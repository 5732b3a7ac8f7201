"""Tests of the reader that views share: they join it and leave it, and no record is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvlane.streams.errors import LogClosed, NewerRecord
from kvlane.streams.memory.memory_log import MemoryReader
from kvlane.streams.ports import Partition
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.records import Ended
from kvlane.streams.topics import LEDGER, REGISTRY
from kvlane.streams.views import tail_reader
from kvlane.streams.views.follower import JOIN_DISTANCE, Follower
from kvlane.streams.views.tail_reader import (
    AWAITED_GATHER_S,
    GATHER_S,
    MAX_QUEUED_RECORDS,
    TailReader,
)
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.recording_view import RecordingView
from tests.unit.streams.views.test_follower import FOR_NEWER_READERS, MALFORMED

LANE_0, LANE_1 = Partition(LEDGER, 0), Partition(LEDGER, 1)


def many(count: int) -> list[Ended]:
    return [Ended(id=f"r{i}", code="seen") for i in range(count)]


class Process:
    """A process with one log, a shared reader, and views that use it."""

    def __init__(self, world: MemoryWorld, log: Any) -> None:
        self.world, self.log = world, log
        self.tail = TailReader(log, world.clock)
        self.reading = world.spawn(self.tail.run())
        self.views: list[RecordingView] = []
        self.tasks: list[asyncio.Task[None]] = []

    def follow(self, *sources: str | Partition, **options: Any) -> Follower:
        view = RecordingView(f"view {len(self.views)}")
        follower = Follower(
            self.log, view, sources or (LEDGER,), self.world.clock, tail=self.tail, **options
        )
        self.views.append(view)
        self.tasks.append(self.world.spawn(follower.run()))
        return follower

    @property
    def readers(self) -> int:
        """Number of open readers of this process."""
        return sum(isinstance(user, MemoryReader) for user in self.log._users)


async def a_process(world: MemoryWorld) -> Process:
    return Process(world, await world.connect())


def counting(world: MemoryWorld, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Number of records decoded so far."""
    decode, decoded = RecordDecoder.decode_records, 0

    async def count(self: Any, source: Any, records: Any) -> Any:
        nonlocal decoded
        decoded += len(records)
        return await decode(self, source, records)

    monkeypatch.setattr(RecordDecoder, "decode_records", count)
    return lambda: decoded


@scenario_test
async def test_views_near_the_ends_need_one_reader(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(3))
    process = await a_process(world)
    followers = [process.follow(), process.follow(LANE_0), process.follow(REGISTRY)]
    for follower in followers:
        await asyncio.wait_for(follower.wait_caught_up(), 5)
    assert process.readers == 1
    assert process.views[0].offsets(LANE_0) == process.views[1].offsets(LANE_0) == [0, 1, 2]
    world.append(LEDGER, 0, *many(2))
    await asyncio.wait_for(followers[0].wait_for(LANE_0, 5), 5)
    await asyncio.wait_for(followers[1].wait_for(LANE_0, 5), 5)
    assert process.views[0].offsets(LANE_0) == process.views[1].offsets(LANE_0) == [0, 1, 2, 3, 4]
    assert process.views[2].offsets(LANE_0) == []


@scenario_test
async def test_record_is_decoded_once_for_all_views(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await a_process(world)
    followers = [process.follow(), process.follow(), process.follow()]
    for follower in followers:
        await asyncio.wait_for(follower.wait_caught_up(), 5)
    decoded = counting(world, monkeypatch)
    world.append(LEDGER, 0, *many(7))
    world.append_raw(LEDGER, 0, MALFORMED)
    for follower in followers:
        await asyncio.wait_for(follower.wait_for(LANE_0, 8), 5)
    assert decoded() == 8
    assert [follower.malformed for follower in followers] == [1, 1, 1]
    assert [follower.applied for follower in followers] == [7, 7, 7]


@scenario_test
async def test_view_far_from_the_end_reads_alone_until_it_is_near(world: MemoryWorld) -> None:
    process = await a_process(world)
    early = process.follow()
    await asyncio.wait_for(early.wait_caught_up(), 5)
    world.append(LEDGER, 0, *many(3 * JOIN_DISTANCE))
    late = process.follow()
    assert process.readers == 1
    seen = set()
    while not late.caught_up:
        await asyncio.sleep(0)
        seen.add(process.readers)
    assert seen >= {2}
    await world.sleep(1)
    assert process.readers == 1
    await asyncio.wait_for(early.wait_for(LANE_0, 3 * JOIN_DISTANCE), 5)
    assert process.views[0].offsets(LANE_0) == process.views[1].offsets(LANE_0)


@scenario_test
async def test_view_that_joins_behind_the_others_misses_nothing(world: MemoryWorld) -> None:
    world.faults.gathers = True
    process = await a_process(world)
    early = process.follow()
    await asyncio.wait_for(early.wait_caught_up(), 5)
    for _ in range(20):
        world.append(LEDGER, 0, *many(50))
        late = process.follow()
        await asyncio.wait_for(late.wait_caught_up(), 5)
        await world.sleep(GATHER_S / 3)
    end = 20 * 50
    await world.sleep(1)
    for view in process.views:
        assert view.offsets(LANE_0) == list(range(end))


@scenario_test
async def test_records_arrive_together(world: MemoryWorld) -> None:
    polls = 0

    def count(*_: Any) -> None:
        nonlocal polls
        polls += 1

    world.faults.gathers = True
    process = await a_process(world)
    follower = process.follow(LANE_0, on_applied=count)
    await asyncio.wait_for(follower.wait_caught_up(), 5)
    for _ in range(1000):
        world.append(LEDGER, 0, *many(1))
        await world.sleep(0.001)
    assert polls <= 1 / GATHER_S + 2
    assert 1000 - len(process.views[0].offsets(LANE_0)) <= 1000 * GATHER_S


@scenario_test
async def test_awaited_records_arrive_sooner(world: MemoryWorld) -> None:
    world.faults.gathers = True
    process = await a_process(world)
    follower = process.follow(LANE_0)
    await asyncio.wait_for(follower.wait_caught_up(), 5)

    async def longest_lag() -> int:
        """Records that are behind, at most; one is appended each millisecond."""
        lags = []
        for _ in range(200):
            world.append(LEDGER, 0, *many(1))
            await world.sleep(0.001)
            lags.append(world.broker.log(*LANE_0).end - follower.positions()[LANE_0])
        return max(lags[50:])

    process.tail.count_awaited(1)
    process.tail.count_awaited(1)
    assert await longest_lag() <= 1000 * AWAITED_GATHER_S + 1
    process.tail.count_awaited(-1)
    assert await longest_lag() <= 1000 * AWAITED_GATHER_S + 1
    process.tail.count_awaited(-1)
    assert await longest_lag() >= 1000 * GATHER_S - 1


@scenario_test
async def test_reader_without_subscribers_reads_nothing(world: MemoryWorld) -> None:
    process = await a_process(world)
    follower = process.follow()
    await asyncio.wait_for(follower.wait_caught_up(), 5)
    process.tasks[0].cancel()
    await asyncio.wait(process.tasks)
    await world.sleep(2)
    world.faults.sent.clear()
    await world.sleep(60)
    assert "poll" not in world.faults.sent


# --- views that do not keep up -------------------------------------------------------------------


@scenario_test
async def test_paused_view_blocks_no_other(world: MemoryWorld) -> None:
    process = await a_process(world)
    slow, quick = process.follow(), process.follow()
    await asyncio.wait_for(slow.wait_caught_up(), 5)
    await asyncio.wait_for(quick.wait_caught_up(), 5)
    async with slow.paused():
        for _ in range(10):
            world.append(LEDGER, 0, *many(MAX_QUEUED_RECORDS // 4))
            end = world.broker.log(LEDGER, 0).end
            await asyncio.wait_for(quick.wait_for(LANE_0, end), 1)
        assert process.views[0].offsets(LANE_0) == []
        (behind,) = [s for s in process.tail._subscriptions if s.positions[LANE_0] == end]
        assert behind._queued_records == 0
    await asyncio.wait_for(slow.wait_for(LANE_0, end), 5)
    assert process.views[0].offsets(LANE_0) == list(range(end))
    await world.sleep(1)
    assert process.readers == 1
    assert len(process.tail._subscriptions) == 2


# --- losses and errors ---------------------------------------------------------------------------


@scenario_test
async def test_only_the_views_that_missed_records_are_rebuilt(world: MemoryWorld) -> None:
    process = await a_process(world)
    ledger, other = process.follow(LANE_0), process.follow(LANE_1, REGISTRY)
    await asyncio.wait_for(ledger.wait_caught_up(), 5)
    await asyncio.wait_for(other.wait_caught_up(), 5)
    world.broker.available = False
    world.append(LEDGER, 0, *many(10))
    world.append(LEDGER, 1, *many(2))
    world.broker.delete_records(LEDGER, 0, 6)
    await world.sleep(5)
    world.broker.available = True
    await asyncio.wait_for(ledger.wait_for(LANE_0, 10), 5)
    await asyncio.wait_for(other.wait_for(LANE_1, 2), 5)
    assert (ledger.rebuilds, other.rebuilds) == (1, 0)
    assert process.views[0].offsets(LANE_0) == [6, 7, 8, 9]
    assert process.views[1].offsets(LANE_1) == [0, 1]
    assert ledger.caught_up
    await world.sleep(1)
    assert len(process.tail._subscriptions) == 2


@scenario_test
async def test_loss_of_one_view_does_not_affect_one_that_is_ahead(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(10))
    tail = TailReader(await world.connect(), world.clock)
    with tail.subscribe({LANE_0: 2}, tuple) as behind, tail.subscribe({LANE_0: 8}, tuple) as ahead:
        world.broker.delete_records(LEDGER, 0, 6)
        world.spawn(tail.run())
        with pytest.raises(Exception, match="wanted offset 2"):
            await asyncio.wait_for(behind.next(), 5)
        batches = await asyncio.wait_for(ahead.next(), 5)
        assert batches is not None
        assert [r.offset for batch in batches for r in batch.records] == [8, 9]


@scenario_test
async def test_record_for_newer_readers_ends_every_follower(world: MemoryWorld) -> None:
    process = await a_process(world)
    follower = process.follow()
    await asyncio.wait_for(follower.wait_caught_up(), 5)
    world.append_raw(LEDGER, 0, FOR_NEWER_READERS)
    await asyncio.wait([process.reading, *process.tasks])
    for task in (process.reading, *process.tasks):
        with pytest.raises(NewerRecord, match="ledger:0:0"):
            task.result()
    with pytest.raises(NewerRecord):
        await process.follow().run()
    assert process.readers == 0


@scenario_test
async def test_follower_of_a_stopped_reader_ends(world: MemoryWorld) -> None:
    process = await a_process(world)
    follower = process.follow()
    await asyncio.wait_for(follower.wait_caught_up(), 5)
    process.reading.cancel()
    await asyncio.wait(process.tasks, timeout=5)
    with pytest.raises(LogClosed):
        process.tasks[0].result()


@scenario_test
async def test_view_that_joins_while_records_are_decoded_gets_them(world: MemoryWorld) -> None:
    """A lookup in the registry may suspend the decoding of a poll."""
    process = await a_process(world)
    first = process.follow(LANE_0)
    await asyncio.wait_for(first.wait_caught_up(), 5)
    goes_on = asyncio.Event()
    decode = tail_reader.decode_batches

    async def slowly(*args: Any) -> Any:
        decoded = await decode(*args)
        if decoded:
            await goes_on.wait()
        return decoded

    tail_reader.decode_batches = slowly
    try:
        world.append(LEDGER, 0, *many(5))
        await world.sleep(1)
        second = process.follow(LANE_0, start=lambda _: asyncio.sleep(0, 3))
        await world.sleep(1)
        goes_on.set()
        await asyncio.wait_for(first.wait_for(LANE_0, 5), 5)
        await asyncio.wait_for(second.wait_for(LANE_0, 5), 5)
    finally:
        tail_reader.decode_batches = decode
    assert process.views[0].offsets(LANE_0) == [0, 1, 2, 3, 4]
    assert process.views[1].offsets(LANE_0) == [3, 4]
