"""Reading a stretch: all of it, nothing beyond it, and not for ever."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from streams.errors import PositionLost
from streams.memory.broker import MemoryLog
from streams.ports import Partition
from streams.records import Ended
from streams.stretch import stretch
from streams.topics import LEDGER
from tests.worlds import World, in_world

LANE = Partition(LEDGER, 0)
HOUR_S = 3600.0


async def offsets(
    world: World, log: MemoryLog, start: int, end: int, at_once: int = 3
) -> list[int]:
    records = stretch(log, world.clock, LANE, start, end, timeout_s=60.0, at_once=at_once)
    async with aclosing(records):
        return [record.offset async for record in records]


def fill(world: World, count: int) -> None:
    world.append(LEDGER, 0, *(Ended(id=f"r{n}", code="seen") for n in range(count)))


@in_world
async def test_a_stretch_ends_where_it_was_told_to(world: World) -> None:
    fill(world, 20)
    log = await world.connect()
    assert await offsets(world, log, 4, 11) == list(range(4, 11))


@in_world
async def test_an_empty_stretch_is_read_without_waiting(world: World) -> None:
    fill(world, 3)
    log = await world.connect()
    assert await offsets(world, log, 3, 3) == []
    assert world.clock.now() == 0.0


@in_world
async def test_an_outage_within_a_stretch_ends_by_the_time_that_was_given(world: World) -> None:
    fill(world, 3)
    log = await world.connect()
    world.broker.available = False
    with pytest.raises(TimeoutError, match=r"ledger\[0\]: reading to 3"):
        await offsets(world, log, 0, 3)
    assert 60 < world.clock.now() < 65


@in_world
async def test_records_that_are_gone_are_told(world: World) -> None:
    fill(world, 3)
    log = await world.connect()
    await world.sleep(25 * HOUR_S)
    with pytest.raises(PositionLost):
        await offsets(world, log, 0, 3)


@in_world
async def test_nothing_is_left_behind_by_who_leaves_early(world: World) -> None:
    fill(world, 20)
    log = await world.connect()
    records = stretch(log, world.clock, LANE, 0, 20, timeout_s=60.0, at_once=3)
    async with aclosing(records):
        async for record in records:
            assert record.offset == 0
            break
    assert not log._users
