"""The order of a process's life: what ends it, and when."""

from __future__ import annotations

import asyncio

import pytest

from app.lifetime import Lifetime, live
from tests.worlds import World, in_world


class Part:
    """A process that takes its time; `starts` and `stops` are set when it may go on."""

    def __init__(self, world: World) -> None:
        self.life = Lifetime("part", world.clock)
        self.starts, self.stops, self.asked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.story: list[str] = []
        self.living = world.spawn(live(self.life, self.start, self.stop, self.asked))

    async def start(self) -> None:
        self.story.append("starts")
        try:
            await self.starts.wait()
        except asyncio.CancelledError:
            self.story.append("start broken off")
            raise
        self.story.append("started")

    async def stop(self) -> None:
        self.story.append("stops")
        await self.stops.wait()
        self.story.append("stopped")

    async def ended(self) -> None:
        await asyncio.wait_for(self.living, 5)


async def fails() -> None:
    raise ZeroDivisionError


@in_world
async def test_what_has_started_is_stopped_in_good_order(world: World) -> None:
    part = Part(world)
    part.starts.set()
    part.stops.set()
    await world.sleep(1)
    part.life.spawn("work", world.sleep(1e9))
    part.asked.set()
    await part.ended()
    assert part.story == ["starts", "started", "stops", "stopped"]
    assert part.life.tasks == 0


@in_world
async def test_being_asked_to_stop_breaks_a_start_off(world: World) -> None:
    part = Part(world)
    await world.sleep(1)
    part.asked.set()
    await part.ended()
    assert part.story == ["starts", "start broken off"]


@in_world
async def test_an_error_in_the_background_ends_a_start_that_waits_for_it(world: World) -> None:
    part = Part(world)
    await world.sleep(1)
    part.life.spawn("work", fails())
    with pytest.raises(ZeroDivisionError):
        await part.ended()
    assert part.story == ["starts", "start broken off"]


@in_world
async def test_a_start_that_fails_is_an_error(world: World) -> None:
    part = Part(world)
    part.start = fails  # type: ignore[method-assign]
    part.living.cancel()
    with pytest.raises(ZeroDivisionError):
        await live(part.life, part.start, part.stop, part.asked)
    assert part.story == []


@in_world
async def test_an_error_later_ends_the_process_without_a_stop(world: World) -> None:
    part = Part(world)
    part.starts.set()
    await world.sleep(1)
    part.life.spawn("work", fails())
    with pytest.raises(ZeroDivisionError):
        await part.ended()
    assert part.story == ["starts", "started"]


@in_world
async def test_an_error_ends_a_stop_that_does_not_come_to_its_end(world: World) -> None:
    part = Part(world)
    part.starts.set()
    await world.sleep(1)
    part.asked.set()
    await world.sleep(1)
    part.life.spawn("work", fails())
    with pytest.raises(ZeroDivisionError):
        await part.ended()
    assert part.story == ["starts", "started", "stops"]
