"""Who is woken by a bell, and in which order."""

from __future__ import annotations

import asyncio

from app.bell import Bell, Name, Rank
from tests.worlds import World, in_world


async def _waiting(
    world: World, bell: Bell, heard: list[str], *names: tuple[str, str, Rank]
) -> None:
    async def wait(who: str, name: str, rank: Rank) -> None:
        await bell.wait(100.0, (name,), rank)
        heard.append(who)

    for each in names:
        world.spawn(wait(*each))
    await world.sleep(1)


@in_world
async def test_one_is_woken_by_rank_and_then_by_coming(world: World) -> None:
    bell, heard = Bell(), list[str]()
    await _waiting(
        world, bell, heard, ("a", "m", (0, 5)), ("b", "m", (0, 4)), ("c", "n", (-1, 9)),
        ("d", "m", (0, 4)), ("e", "x", (-2, 0)),
    )  # fmt: skip
    for _ in range(6):
        bell.ring_one([("m",), ("n",)])
        await world.sleep(1)
    assert heard == ["c", "b", "d", "a"], "e came under another name"


@in_world
async def test_what_a_rank_is_worth_can_change_by_name(world: World) -> None:
    bell, heard, worth = Bell(), list[str](), {"m": 2.0, "n": 1.0}
    await _waiting(
        world, bell, heard, ("a", "m", (0, 1)), ("b", "n", (0, 2)), ("c", "n", (0, 1)),
        ("d", "m", (-1, 3)),
    )  # fmt: skip

    def rank_now(name: Name, rank: Rank) -> Rank:
        return rank[0], worth[name[0]], rank[1]

    for _ in range(2):
        bell.ring_one([("m",), ("n",)], rank_now)
        await world.sleep(1)
    worth["m"] = 0.5
    for _ in range(2):
        bell.ring_one([("m",), ("n",)], rank_now)
        await world.sleep(1)
    assert heard == ["d", "c", "a", "b"]


@in_world
async def test_everybody_is_woken_once(world: World) -> None:
    bell, heard = Bell(), list[str]()
    await _waiting(world, bell, heard, ("a", "m", (1,)), ("b", "n", (0,)))
    bell.ring()
    bell.ring()
    await world.sleep(1)
    assert sorted(heard) == ["a", "b"]


@in_world
async def test_who_is_cancelled_or_out_of_time_is_woken_no_more(world: World) -> None:
    bell, heard = Bell(), list[str]()
    task = world.spawn(bell.wait(100.0, ("m",)))
    await _waiting(world, bell, heard, ("late", "m", (3,)))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    bell.ring_one([("m",)])
    await world.sleep(1)
    assert heard == ["late"]
    short = world.spawn(bell.wait(1.0, ("m",)))
    await world.sleep(2)
    assert short.done()
    bell.ring_one([("m",)])
