"""A deployment on the log in memory that has served requests, for tests of what is told of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from app.audit.capture import capture
from app.audit.moments import Period
from app.captured import AnyLine, written
from app.engine.batch import Shape
from app.engine.simulated import SimulatedEngine
from app.lifetime import Lifetime
from app.router import Router
from app.worker import Worker
from indexer.keys import KeySecret, derive
from streams.clock import Clock
from streams.codecs import decode, pack_tokens
from streams.ids import RequestIds
from streams.records import (
    Finished,
    Hints,
    Request,
    RoutingConstraints,
    SessionControl,
    StopConditions,
)
from streams.topics import LEDGER, REQUESTS
from tests.gateways import settings_of
from tests.routers import write
from tests.worlds import World

SECRET = derive(b"of one file")
SHAPE = Shape(block_size=16, blocks=400)
"""Small, so that prompts are evicted and caches differ from what routers expect."""


async def staff(world: World, workers: int = 3, **over: Any) -> None:
    """Routers and workers with simulated engines and small caches."""
    for name in ("r1", "r2"):
        life = Lifetime(name, world.clock, random.Random(name))
        await Router(await world.connect(name), settings_of(**over), life, name).start()
    for number in range(workers):
        name = f"w{number}"
        life = Lifetime(name, world.clock, random.Random(name))
        engine = SimulatedEngine(world.clock, SHAPE, model="demo", context_length=4096)
        settings = settings_of(taints=("odd",)) if False else settings_of()
        await Worker(await world.connect(name), settings, life, engine, worker_id=name).start()
    await world.sleep(2)


def requests(world: World, count: int, seed: int = 7) -> list[Request]:
    """Conversations of this world."""
    return conversations(world.clock, random.Random(seed), count)


def conversations(clock: Clock, rng: random.Random, count: int) -> list[Request]:
    """Conversations that go on, some with hints; ids say when they were drawn."""
    ids = RequestIds(clock, rng)
    talks = [[rng.randrange(30_000) for _ in range(rng.randint(5, 600))] for _ in range(12)]
    made = []
    for _ in range(count):
        number = rng.randrange(len(talks))
        talk = talks[number] = talks[number][-2000:]
        talk += [rng.randrange(30_000) for _ in range(rng.randint(1, 90))]
        hints = Hints(
            session_control=SessionControl(session_id=f"s{number}") if number % 2 else None,
            expected_output_tokens=rng.choice([None, None, 40]),
            routing_constraints=RoutingConstraints(preferred_taints={"odd": 1.5})
            if number == 3
            else None,
        )
        made.append(
            Request(
                id=ids.new(), model="demo", token_ids=pack_tokens(talk), hints=hints,
                stop=StopConditions(max_tokens=rng.randint(1, 40)), deadline_s=300,
                cache_salt="pepper" if number == 4 else "",
            )
        )  # fmt: skip
    return made


async def serve(world: World, asked: Sequence[Request], every_s: float = 0.02) -> None:
    """Ask, one after the other, and wait until all are answered."""
    for request in asked:
        write(world, REQUESTS, request)
        await world.sleep(every_s)
    await world.until(lambda: len(answered(world)) >= len(asked), within_s=300)
    await world.sleep(1)


def answered(world: World) -> set[str]:
    """Requests of which a run ended as it should."""
    told = [decode(record) for record in world.everywhere(LEDGER)]
    return {r.id for r in told if isinstance(r, Finished) and r.code in ("stop", "length")}


async def captured(
    world: World, from_ms: int = 0, to_ms: int | None = None, secret: KeySecret = SECRET
) -> list[AnyLine]:
    """The lines of a period, by default of all there is."""
    period = Period(from_ms, world.clock.wall_ms() + 1 if to_ms is None else to_ms)
    log = await world.connect("capture")
    async with aclosing(capture(log, world.clock, period, secret)) as lines:
        return [line async for line in lines]


def put(lines: Sequence[AnyLine], file: Path) -> Path:
    """Write lines into a file."""
    with written(file) as out:
        for line in lines:
            out.write(line)
    return file
