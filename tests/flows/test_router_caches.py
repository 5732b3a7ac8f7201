"""The router by what workers hold: requests go where their prefix is, unless too much is there."""

from __future__ import annotations

import random

from app.engine.simulated import SimulatedEngine
from app.lifetime import Lifetime
from app.routing.plan import replan
from app.settings import Settings
from app.worker import Worker
from streams.codecs import pack_tokens
from streams.records import (
    Assigned,
    Assignment,
    End,
    Finished,
    Hints,
    PrefillDone,
    Request,
    StopConditions,
)
from streams.topics import LEDGER, REQUESTS, RESPONSES
from tests.routers import Hand, read, route, some, write
from tests.worlds import World, in_world

SIZE = 16
PREFIX = list(range(1000, 1000 + 40 * SIZE))


def ask(world: World, name: str, *tail: int) -> None:
    tokens = pack_tokens([*PREFIX, *tail])
    write(world, REQUESTS, Request(id=name, model="demo", token_ids=tokens, deadline_s=100))


async def decision(world: World, name: str) -> Assigned:
    return (await some(world, lambda: read(world, LEDGER, Assigned, name)))[0]


@in_world
async def test_requests_with_a_prefix_go_where_it_is(world: World) -> None:
    workers = [Hand(world, f"w{n}", block_size=SIZE) for n in range(4)]
    workers[2].holds(PREFIX, SIZE)
    await route(world)
    for n in range(5):
        ask(world, f"a{n}", n, n)
        decided = await decision(world, f"a{n}")
        assert decided.worker == "w2"
        assert decided.cached_tokens_predicted == len(PREFIX)
        assert decided.prefill_tokens == 2
        assert replan(decided) == ("w2", workers[2].epoch, 0)
        run = workers[2].start((await some(world, lambda: workers[2].told(Assignment), n + 1))[n])
        workers[2].finish(run, "stop")


@in_world
async def test_what_the_cache_no_longer_holds_is_forgotten_at_once(world: World) -> None:
    holder, other = Hand(world, "w1", block_size=SIZE), Hand(world, "w2", block_size=SIZE)
    holder.holds(PREFIX, SIZE)
    await route(world)
    holder.holds(PREFIX[: 4 * SIZE], SIZE, first_event_id=2)
    other.holds(PREFIX, SIZE)
    await world.sleep(0.1)
    ask(world, "a")
    assert (await decision(world, "a")).worker == "w2"


@in_world
async def test_an_overloaded_holder_spills_until_its_prefill_is_done(world: World) -> None:
    holder, other = Hand(world, "w1", block_size=SIZE), Hand(world, "w2", block_size=SIZE)
    holder.holds(PREFIX, SIZE)
    await route(world, policy="dynamo")
    long = range(5000, 5000 + 60 * SIZE)
    ask(world, "long", *long)
    run = holder.start((await some(world, lambda: holder.told(Assignment)))[0])
    for n in range(2):
        ask(world, f"spilled{n}")
        assert (await decision(world, f"spilled{n}")).worker == "w2"
    done = PrefillDone(run=1, **run)
    write(world, LEDGER, done)
    holder.finish(run, "stop")
    await world.sleep(0.1)
    ask(world, "back")
    assert (await decision(world, "back")).worker == "w1"
    assert len(other.told(Assignment)) == 2


@in_world
async def test_an_unreachable_pin_is_refused_by_name(world: World) -> None:
    Hand(world)
    await route(world)
    pinned = Request(id="a", model="demo", hints=Hints(backend_instance_id="w9"), deadline_s=100)
    write(world, REQUESTS, pinned)
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "pinned_gone"
    assert "w9 is gone" in end.message


@in_world
async def test_a_router_that_starts_knows_what_was_cached_before(world: World) -> None:
    workers = [Hand(world, f"w{n}", block_size=SIZE) for n in range(8)]
    for _ in range(2000):
        workers[3].beat()
    workers[3].holds(PREFIX, SIZE)
    ask(world, "a")
    await route(world)
    assert (await decision(world, "a")).worker == "w3"


async def serve(world: World, name: str) -> None:
    life = Lifetime(name, world.clock, random.Random(name))
    engine = SimulatedEngine(world.clock, model="demo")
    settings = Settings(_env_file=None, worker_id=name, router_id="-")
    await Worker(await world.connect(name), settings, life, engine).start()


@in_world
async def test_what_engines_cache_is_predicted_to_the_block(world: World) -> None:
    """Workers with engines: what a router expects to be cached is what the engine finds cached."""
    for n in range(4):
        await serve(world, f"w{n}")
    await route(world)
    await world.sleep(2.0)
    stop = StopConditions(max_tokens=3)
    places = set()
    for n in range(6):
        tokens = pack_tokens([*PREFIX, *range(n * 100, n * 100 + 40)])
        name = f"a{n}"
        write(world, REQUESTS, Request(id=name, model="demo", token_ids=tokens, stop=stop))
        (finished,) = await some(world, lambda name=name: read(world, LEDGER, Finished, name))
        decided = await decision(world, name)
        assert finished.cached_tokens == decided.cached_tokens_predicted
        assert decided.cached_tokens_predicted == (len(PREFIX) if n else 0)
        places.add(decided.worker)
        await world.sleep(0.1)
    assert len(places) == 1
