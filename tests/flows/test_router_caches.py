"""Tests of routing by caches: requests go to their prefix, unless too much load is there."""

from __future__ import annotations

import random

from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.routing.selection.select import recompute_choice
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Assigned, Assignment, End, Finished, PrefillDone
from kvlane.streams.request import Hints, Request, StopConditions
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES
from tests.harness.fake_worker import (
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test

SIZE = 16
PREFIX = list(range(1000, 1000 + 40 * SIZE))


def send(world: MemoryWorld, name: str, *tail: int) -> None:
    tokens = pack_tokens([*PREFIX, *tail])
    append_record(world, REQUESTS, Request(id=name, model="demo", token_ids=tokens, deadline_s=100))


async def decision(world: MemoryWorld, name: str) -> Assigned:
    return (await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned, name)))[0]


@scenario_test
async def test_requests_with_a_prefix_go_where_it_is(world: MemoryWorld) -> None:
    workers = [FakeWorker(world, f"w{n}", block_size=SIZE) for n in range(4)]
    workers[2].publish_blocks(PREFIX, SIZE)
    await start_router(world)
    for n in range(5):
        send(world, f"a{n}", n, n)
        decided = await decision(world, f"a{n}")
        assert decided.worker == "w2"
        assert decided.cached_tokens_predicted == len(PREFIX)
        assert decided.prefill_tokens == 2
        assert recompute_choice(decided) == ("w2", workers[2].epoch, 0)
        run = workers[2].start(
            (await wait_for_items(world, lambda: workers[2].received(Assignment), n + 1))[n]
        )
        workers[2].finish(run, "stop")


@scenario_test
async def test_evicted_blocks_are_removed_at_once(world: MemoryWorld) -> None:
    holder, other = (
        FakeWorker(world, "w1", block_size=SIZE),
        FakeWorker(world, "w2", block_size=SIZE),
    )
    holder.publish_blocks(PREFIX, SIZE)
    await start_router(world)
    holder.publish_blocks(PREFIX[: 4 * SIZE], SIZE, first_event_id=2)
    other.publish_blocks(PREFIX, SIZE)
    await world.sleep(0.1)
    send(world, "a")
    assert (await decision(world, "a")).worker == "w2"


@scenario_test
async def test_overloaded_holder_spills_until_its_prefill_is_done(world: MemoryWorld) -> None:
    holder, other = (
        FakeWorker(world, "w1", block_size=SIZE),
        FakeWorker(world, "w2", block_size=SIZE),
    )
    holder.publish_blocks(PREFIX, SIZE)
    await start_router(world, policy="dynamo")
    long = range(5000, 5000 + 60 * SIZE)
    send(world, "long", *long)
    run = holder.start((await wait_for_items(world, lambda: holder.received(Assignment)))[0])
    for n in range(2):
        send(world, f"spilled{n}")
        assert (await decision(world, f"spilled{n}")).worker == "w2"
    done = PrefillDone(run=1, **run)
    append_record(world, LEDGER, done)
    holder.finish(run, "stop")
    await world.sleep(0.1)
    send(world, "back")
    assert (await decision(world, "back")).worker == "w1"
    assert len(other.received(Assignment)) == 2


@scenario_test
async def test_unreachable_pin_is_refused_by_name(world: MemoryWorld) -> None:
    FakeWorker(world)
    await start_router(world)
    pinned = Request(id="a", model="demo", hints=Hints(backend_instance_id="w9"), deadline_s=100)
    append_record(world, REQUESTS, pinned)
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "pinned_gone"
    assert "w9 is gone" in end.message


@scenario_test
async def test_started_router_has_the_earlier_cache_state(world: MemoryWorld) -> None:
    workers = [FakeWorker(world, f"w{n}", block_size=SIZE) for n in range(8)]
    for _ in range(2000):
        workers[3].send_heartbeat()
    workers[3].publish_blocks(PREFIX, SIZE)
    send(world, "a")
    await start_router(world)
    assert (await decision(world, "a")).worker == "w3"


async def serve(world: MemoryWorld, name: str) -> None:
    ctx = ProcessContext(name, world.clock, random.Random(name))
    engine = SimulatedEngine(world.clock, model="demo")
    settings = Settings(_env_file=None, worker_id=name, router_id="-")
    await Worker(await world.connect(name), settings, ctx, engine).start()


@scenario_test
async def test_cached_blocks_of_engines_are_predicted_exactly(world: MemoryWorld) -> None:
    """Workers with engines: what a router expects to be cached is what the engine finds cached."""
    for n in range(4):
        await serve(world, f"w{n}")
    await start_router(world)
    await world.sleep(2.0)
    stop = StopConditions(max_tokens=3)
    places = set()
    for n in range(6):
        tokens = pack_tokens([*PREFIX, *range(n * 100, n * 100 + 40)])
        name = f"a{n}"
        append_record(world, REQUESTS, Request(id=name, model="demo", token_ids=tokens, stop=stop))
        (finished,) = await wait_for_items(
            world, lambda name=name: read_records(world, LEDGER, Finished, name)
        )
        decided = await decision(world, name)
        assert finished.cached_tokens == decided.cached_tokens_predicted
        assert decided.cached_tokens_predicted == (len(PREFIX) if n else 0)
        places.add(decided.worker)
        await world.sleep(0.1)
    assert len(places) == 1
