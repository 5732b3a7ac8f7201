"""Tests of deferred prompts: references in the order of arrival, and reservations for the next
ones."""

from __future__ import annotations

import asyncio

from kvlane.app.lanes.scheduler import wait_for_room
from kvlane.app.routing.queueing.deferred_prompts import (
    MAX_CONCURRENT_FETCHES,
    DeferredPrompts,
    QueueSize,
)
from kvlane.app.routing.queueing.fair_share import QueueKey
from tests.harness.memory_world import MemoryWorld, scenario_test

ONE = QueueSize(1, 10, 100)
A, B = QueueKey("m", "a"), QueueKey("m", "b")


class DeferredQueue:
    """Deferred requests, and room for so many of each class."""

    def __init__(self, world: MemoryWorld, **room: int) -> None:
        self.world, self.has_room = world, room
        self.deferred = DeferredPrompts[str](self._fits)
        self.went: list[str] = []

    def _fits(self, queue: QueueKey) -> bool:
        return self.deferred.granted_in_class(queue) < self.has_room.get(queue.class_name, 0)

    async def come(self, *keys: str, queue: QueueKey = A, within_s: float = 60) -> None:
        for key in keys:
            self.world.spawn(self._wait(key, queue, within_s))
        await self.world.sleep(0)

    async def _wait(self, key: str, queue: QueueKey, within_s: float) -> None:
        if await wait_for_room(self.deferred, key, queue, ONE, within_s):
            self.went.append(key)

    async def make_room(self, **room: int) -> None:
        self.has_room = room
        self.deferred.grant_next()
        await self.world.sleep(0)


@scenario_test
async def test_prompts_are_admitted_in_order_of_arrival(world: MemoryWorld) -> None:
    queue = DeferredQueue(world)
    await queue.come("1", "2", "3")
    assert (queue.went, queue.deferred.size) == ([], QueueSize(3, 30, 300))
    await queue.make_room(a=2)
    assert (queue.went, queue.deferred.size) == (["1", "2"], ONE)
    assert queue.deferred.granted == QueueSize(2, 20, 200)
    assert queue.deferred.release("1")
    assert not queue.deferred.release("1")
    await queue.make_room(a=2)
    assert queue.went == ["1", "2", "3"]


@scenario_test
async def test_oldest_goes_first_among_classes_with_room(world: MemoryWorld) -> None:
    queue = DeferredQueue(world)
    await queue.come("1", queue=A)
    await queue.come("2", "3", queue=B)
    await queue.come("4", queue=A)
    await queue.make_room(b=1)
    assert queue.went == ["2"]
    await queue.make_room(a=1, b=2)
    assert sorted(queue.went) == ["1", "2", "3"]
    assert (queue.deferred.has_waiting(A), queue.deferred.has_waiting(B)) == (True, False)


@scenario_test
async def test_expired_or_cancelled_prompt_leaves_nothing(world: MemoryWorld) -> None:
    queue = DeferredQueue(world)
    await queue.come("1", within_s=5)
    task = world.spawn(wait_for_room(queue.deferred, "2", A, ONE, 60))
    await world.sleep(6)
    assert queue.deferred.size == ONE
    task.cancel()
    await world.sleep(0)
    assert queue.deferred.size == QueueSize()
    assert not queue.deferred.has_waiting(A)
    await queue.make_room(a=5)
    assert (queue.went, queue.deferred.granted) == ([], QueueSize())


@scenario_test
async def test_reservation_ends_with_a_task_that_is_cancelled_at_that_moment(
    world: MemoryWorld,
) -> None:
    queue = DeferredQueue(world)
    for cancels_first in (True, False):
        task = world.spawn(wait_for_room(queue.deferred, "1", A, ONE, 60))
        await world.sleep(0)
        if cancels_first:
            task.cancel()
        await asyncio.sleep(0) if not cancels_first else None
        queue.has_room = {"a": 1}
        queue.deferred.grant_next()
        task.cancel()
        await asyncio.wait([task])
        queue.deferred.release("1")  # as whoever asked for room does
        queue.has_room = {}
        assert queue.deferred.granted == QueueSize()
        assert queue.deferred.size == QueueSize()


@scenario_test
async def test_few_bodies_are_fetched_at_the_same_time(world: MemoryWorld) -> None:
    queue = DeferredQueue(world)
    await queue.come(*map(str, range(100)))
    await queue.make_room(a=1000)
    assert len(queue.went) == MAX_CONCURRENT_FETCHES
