"""Tests of wait queues: a notification wakes each waiting task once."""

from __future__ import annotations

import asyncio

from kvlane.app.wait_queue import WaitQueue
from tests.harness.memory_world import MemoryWorld, scenario_test


@scenario_test
async def test_notification_wakes_all_tasks_that_wait(world: MemoryWorld) -> None:
    queue, received = WaitQueue(), list[str]()

    async def wait(name: str) -> None:
        await queue.wait(100.0)
        received.append(name)

    queue.notify_all()
    for name in "ab":
        world.spawn(wait(name))
    await world.sleep(1)
    assert received == []
    queue.notify_all()
    queue.notify_all()
    await world.sleep(1)
    assert received == ["a", "b"]


@scenario_test
async def test_wait_ends_with_its_time_or_its_task(world: MemoryWorld) -> None:
    queue = WaitQueue()
    cancelled, short = world.spawn(queue.wait(100.0)), world.spawn(queue.wait(1.0))
    await world.sleep(0)
    cancelled.cancel()
    queue.notify_all()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert (cancelled.cancelled(), short.done()) == (True, True)
    late = world.spawn(queue.wait(1.0))
    await world.sleep(2)
    assert late.done()
