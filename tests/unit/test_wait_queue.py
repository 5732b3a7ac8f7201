"""Who is woken by a bell, and in which order."""

from __future__ import annotations

import asyncio

from app.wait_queue import Priority, QueueName, WaitQueue
from tests.harness.memory_world import MemoryWorld, scenario_test


async def _waiting(
    world: MemoryWorld, queue: WaitQueue, received: list[str], *names: tuple[str, str, Priority]
) -> None:
    async def wait(who: str, name: str, rank: Priority) -> None:
        await queue.wait(100.0, (name,), rank)
        received.append(who)

    for each in names:
        world.spawn(wait(*each))
    await world.sleep(1)


@scenario_test
async def test_waiters_are_woken_by_rank_and_then_by_arrival(world: MemoryWorld) -> None:
    queue, received = WaitQueue(), list[str]()
    await _waiting(
        world, queue, received, ("a", "m", (0, 5)), ("b", "m", (0, 4)), ("c", "n", (-1, 9)),
        ("d", "m", (0, 4)), ("e", "x", (-2, 0)),
    )  # fmt: skip
    for _ in range(6):
        queue.notify_one([("m",), ("n",)])
        await world.sleep(1)
    assert received == ["c", "b", "d", "a"], "e came under another name"


@scenario_test
async def test_rank_can_depend_on_the_queue_at_wake_up(world: MemoryWorld) -> None:
    queue, received, worth = WaitQueue(), list[str](), {"m": 2.0, "n": 1.0}
    await _waiting(
        world, queue, received, ("a", "m", (0, 1)), ("b", "n", (0, 2)), ("c", "n", (0, 1)),
        ("d", "m", (-1, 3)),
    )  # fmt: skip

    def rank_now(name: QueueName, rank: Priority) -> Priority:
        return rank[0], worth[name[0]], rank[1]

    for _ in range(2):
        queue.notify_one([("m",), ("n",)], rank_now)
        await world.sleep(1)
    worth["m"] = 0.5
    for _ in range(2):
        queue.notify_one([("m",), ("n",)], rank_now)
        await world.sleep(1)
    assert received == ["d", "c", "a", "b"]


@scenario_test
async def test_every_waiter_is_woken_once(world: MemoryWorld) -> None:
    queue, received = WaitQueue(), list[str]()
    await _waiting(world, queue, received, ("a", "m", (1,)), ("b", "n", (0,)))
    queue.notify_all()
    queue.notify_all()
    await world.sleep(1)
    assert sorted(received) == ["a", "b"]


@scenario_test
async def test_cancelled_or_expired_waiter_is_not_woken(world: MemoryWorld) -> None:
    queue, received = WaitQueue(), list[str]()
    task = world.spawn(queue.wait(100.0, ("m",)))
    await _waiting(world, queue, received, ("late", "m", (3,)))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    queue.notify_one([("m",)])
    await world.sleep(1)
    assert received == ["late"]
    short = world.spawn(queue.wait(1.0, ("m",)))
    await world.sleep(2)
    assert short.done()
    queue.notify_one([("m",)])


@scenario_test
async def test_many_notifications_at_once_wake_as_many_in_order(world: MemoryWorld) -> None:
    queue, received = WaitQueue(), list[str]()
    names = [(f"{n}", "m", (float(-n),)) for n in range(50)]
    await _waiting(world, queue, received, *names)
    for _ in range(20):
        queue.notify_one([("m",)])
    await _waiting(world, queue, received, ("last", "m", (9.0,)))
    assert received == [f"{n}" for n in range(49, 29, -1)]
    for _ in range(40):
        queue.notify_one([("m",)])
    await world.sleep(1)
    assert received == [*(f"{n}" for n in range(49, -1, -1)), "last"]
