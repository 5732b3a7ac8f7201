"""The router finds out which workers are dead."""

from __future__ import annotations

from streams.records import (
    Lost,
)
from tests.routers import Hand, route, some
from tests.worlds import World, in_world


@in_world
async def test_a_lost_epoch_that_still_beats_is_told_again(world: World) -> None:
    worker = Hand(world)
    await route(world)
    worker.beating.cancel()
    await some(world, lambda: worker.told(Lost))
    worker.beat()
    await some(world, lambda: worker.told(Lost), 2)


@in_world
async def test_an_outage_of_the_broker_kills_nobody(world: World) -> None:
    worker = Hand(world)
    await route(world)
    await world.sleep(3)
    worker.beating.cancel()
    world.broker.available = False
    await world.sleep(30)
    world.broker.available = True
    worker.beating = world.spawn(worker._beat())
    await world.sleep(20)
    assert worker.told(Lost) == []
