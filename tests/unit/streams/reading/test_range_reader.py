"""Tests of reading a range: all of it, nothing beyond it, and within a time limit."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from kvlane.streams.errors import BrokerUnavailable, PositionLost
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Partition
from kvlane.streams.reading.range_reader import NO_DATA_TIMEOUT_S, read_range
from kvlane.streams.records import Ended
from kvlane.streams.topics import LEDGER
from tests.harness.memory_world import MemoryWorld, scenario_test

LANE = Partition(LEDGER, 0)
HOUR_S = 3600.0


async def offsets(
    world: MemoryWorld, log: MemoryLog, start: int, end: int, at_once: int = 3
) -> list[int]:
    starts, ends = {LANE: start}, {LANE: end}
    pieces = read_range(log, world.clock, starts, ends, timeout_s=60.0, batch_size=at_once)
    async with aclosing(pieces):
        return [record.offset async for piece in pieces for record in piece.records]


def fill(world: MemoryWorld, count: int) -> None:
    world.append(LEDGER, 0, *(Ended(id=f"r{n}", code="seen") for n in range(count)))


@scenario_test
async def test_range_ends_at_its_given_offset(world: MemoryWorld) -> None:
    fill(world, 20)
    log = await world.connect()
    assert await offsets(world, log, 4, 11) == list(range(4, 11))


@scenario_test
async def test_empty_range_is_read_without_waiting(world: MemoryWorld) -> None:
    fill(world, 3)
    log = await world.connect()
    assert await offsets(world, log, 3, 3) == []
    assert world.clock.now() == 0.0


@scenario_test
async def test_outage_within_a_range_ends_by_the_given_time(world: MemoryWorld) -> None:
    fill(world, 3)
    log = await world.connect()
    world.broker.available = False
    with pytest.raises(TimeoutError, match=r"ledger\[0\]: reading to 3"):
        await offsets(world, log, 0, 3)
    assert 60 < world.clock.now() < 65


@scenario_test
async def test_deleted_records_are_reported(world: MemoryWorld) -> None:
    fill(world, 3)
    log = await world.connect()
    await world.sleep(25 * HOUR_S)
    with pytest.raises(PositionLost):
        await offsets(world, log, 0, 3)


@scenario_test
async def test_early_exit_releases_the_reader(world: MemoryWorld) -> None:
    fill(world, 20)
    log = await world.connect()
    pieces = read_range(log, world.clock, {LANE: 0}, {LANE: 20}, batch_size=3)
    async with aclosing(pieces):
        async for piece in pieces:
            assert piece.records[0].offset == 0
            break
    assert not log._users


@scenario_test
async def test_several_partitions_are_read_to_their_ends_with_progress(world: MemoryWorld) -> None:
    fill(world, 5)
    world.append(LEDGER, 1, *(Ended(id=f"r{n}", code="seen") for n in range(4)))
    other, received = Partition(LEDGER, 1), list[tuple[int, int]]()
    starts, ends = {LANE: 1, other: 0}, {LANE: 5, other: 3}
    read: dict[Partition, list[int]] = {LANE: [], other: []}
    async for source, records, position in read_range(
        await world.connect(), world.clock, starts, ends, batch_size=2,
        progress=lambda done, total: received.append((done, total)),
    ):  # fmt: skip
        read[source] += [record.offset for record in records]
        assert position == read[source][-1] + 1
    assert read == {LANE: [1, 2, 3, 4], other: [0, 1, 2]}
    assert (received[0], received[-1]) == ((0, 7), (7, 7))
    assert received == sorted(received)


@scenario_test
async def test_without_a_limit_only_silence_ends_a_range(world: MemoryWorld) -> None:
    fill(world, 20)
    log = await world.connect()
    world.faults.slow["poll"] = 20.0
    reached = []

    async def read() -> None:
        async for piece in read_range(log, world.clock, {LANE: 0}, {LANE: 20}, batch_size=5):
            reached.append(piece.position)
            world.broker.available = piece.position < 15

    with pytest.raises(BrokerUnavailable, match="no records for"):
        await read()
    assert reached == [5, 10, 15]
    assert world.clock.now() > 3 * 20.0 + NO_DATA_TIMEOUT_S
