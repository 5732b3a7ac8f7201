"""What a router reads when it starts, and what of it is news to those who wait."""

from __future__ import annotations

from typing import Any

from app.router import Router
from streams.codecs import decode
from streams.ports import Entry
from streams.records import Assignment, Lost, RunProgress, Tombstone
from streams.topics import DEAD_LETTERS, KV_EVENTS, REGISTRY, REQUESTS, partition_of
from tests.routers import PROMPT, Hand, route, some, write
from tests.worlds import World, in_world


def count_finds(router: Router) -> list[Any]:
    """How often a request looked for a place."""
    found: list[Any] = []
    find = router._context.places.find

    def counted(*asked: Any) -> Any:
        found.append(asked)
        return find(*asked)

    router._context.places.find = counted  # type: ignore[method-assign]
    return found


@in_world
async def test_an_id_is_recognised_for_as_long_as_the_window_says(world: World) -> None:
    worker = Hand(world)
    first = await route(world, "r1", dedup_window_s=4000)
    write(world, REQUESTS, PROMPT)
    run = worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    worker.finish(run, "stop")
    await first.stop()
    await first._life.end()
    await world.sleep(3000)
    await route(world, "r2", dedup_window_s=4000)
    write(world, REQUESTS, PROMPT)
    await world.sleep(5)
    assert len(worker.told(Assignment)) == 1


@in_world
async def test_heartbeats_of_long_ago_are_not_read(world: World) -> None:
    worker = Hand(world)
    await world.sleep(3600)
    router = await route(world)
    assert router._context.fleet_follower.applied < 100
    write(world, REQUESTS, PROMPT)
    assert await some(world, lambda: worker.told(Assignment))


@in_world
async def test_a_worker_that_died_long_ago_and_has_a_card_still_is_declared_lost_again(
    world: World,
) -> None:
    """The router that declared it lost died before it wrote the tombstone."""
    dead, living = Hand(world, "w1"), Hand(world, "w2")
    dead.beating.cancel()
    where = partition_of(b"w1", world.broker.partitions[KV_EVENTS])
    world.append(KV_EVENTS, where, Lost(worker="w1", epoch=dead.epoch), key="w1")
    await world.sleep(3600)
    await route(world)
    write(world, REQUESTS, PROMPT)
    assert await some(world, lambda: living.told(Assignment))
    await world.until(
        lambda: (
            Tombstone(key="worker/w1", epoch=dead.epoch)
            in [decode(r) for r in world.records(REGISTRY, 0)]
        ),
        within_s=20,
    )
    assert dead.told(Assignment) == []


@in_world
async def test_heartbeats_that_say_nothing_new_wake_nobody(world: World) -> None:
    workers = [Hand(world, f"w{n}", model="other") for n in range(10)]
    needed = Hand(world, "w")
    needed.state = "draining"
    router = await route(world)
    write(world, REQUESTS, PROMPT)
    await world.sleep(1)
    finds = count_finds(router)
    await world.sleep(20)
    assert len(finds) <= 21
    assert workers[0].told(Assignment) == []


@in_world
async def test_who_waits_is_woken_by_a_worker_that_is_ready_again(world: World) -> None:
    worker = Hand(world)
    worker.state = "draining"
    await route(world)
    write(world, REQUESTS, PROMPT)
    await world.sleep(5.5)
    worker.state = "ready"
    worker.beat()
    await world.until(lambda: bool(worker.told(Assignment)), within_s=0.1)


@in_world
async def test_who_waits_is_woken_by_a_worker_that_is_heard_of_again(world: World) -> None:
    worker = Hand(world)
    await route(world)
    await world.sleep(1)
    worker.beating.cancel()
    await world.sleep(7)
    write(world, REQUESTS, PROMPT)
    await world.sleep(0.5)
    assert worker.told(Assignment) == []
    worker.beat()
    await world.until(lambda: bool(worker.told(Assignment)), within_s=0.1)


@in_world
async def test_heartbeats_alone_do_not_make_the_router_look_at_every_request(
    world: World,
) -> None:
    worker = Hand(world)
    router = await route(world)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    await world.sleep(1)
    looks: list[int] = []
    for owner in router._owners.values():
        owner.check_all = lambda: looks.append(1)  # type: ignore[method-assign]
    for _ in range(100):
        worker.beat()
        await world.sleep(0.01)
    ticks = 2 * 4 + 2  # of two lanes, four times a second
    assert len(looks) <= ticks


@in_world
async def test_a_lane_is_hashed_once_for_a_run_that_goes_on(world: World) -> None:
    worker = Hand(world)
    router = await route(world)
    worker.running = [RunProgress(id=f"r{n}", attempt=0, phase="aggregated") for n in range(50)]
    await world.sleep(10)
    info = router._lane_of.cache_info()
    assert info.misses == 50
    assert info.hits >= 300


@in_world
async def test_prompts_that_cannot_be_read_are_kept_only_if_the_settings_say_so(
    world: World,
) -> None:
    unreadable = Entry(b"a", b"\xc1 secret", (("t", b"Request"),))
    for name, keep in (("r1", False), ("r2", True)):
        router = await route(world, name, keep_prompts=keep)
        world.append_raw(REQUESTS, 0, unreadable)
        (letter, *_) = reversed(await some(world, lambda: world.everywhere(DEAD_LETTERS), 1 + keep))
        assert (letter.value == unreadable.value) == keep
        await router.stop()
        await router._life.end()
