"""A deployment on the log in memory that has served requests, for tests of captures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from kvlane.app.audit.capture_lines import capture_period
from kvlane.app.audit.time_range import TimeRange
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.traces.capture_format import AnyCaptureLine, created_capture
from kvlane.app.worker import Worker
from kvlane.indexer.block_hashes import KeySecret, derive_secret
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.ids import RequestIds
from kvlane.streams.records import Finished
from kvlane.streams.request import (
    Hints,
    Request,
    RoutingConstraints,
    SessionControl,
    StopConditions,
)
from kvlane.streams.topics import LEDGER, REQUESTS
from tests.harness.fake_worker import append_record
from tests.harness.gateway_harness import memory_settings
from tests.harness.memory_world import MemoryWorld

SECRET = derive_secret(b"of one file")
SHAPE = EngineLimits(block_size=16, cache_blocks=400)
"""Small, so that prompts are evicted and caches differ from what routers expect."""


async def start_deployment(world: MemoryWorld, workers: int = 3, **over: Any) -> None:
    """Routers and workers with simulated engines and small caches."""
    for name in ("r1", "r2"):
        ctx = ProcessContext(name, world.clock, random.Random(name))
        await Router(await world.connect(name), memory_settings(**over), ctx, name).start()
    for number in range(workers):
        name = f"w{number}"
        ctx = ProcessContext(name, world.clock, random.Random(name))
        engine = SimulatedEngine(world.clock, SHAPE, model="demo", context_length=4096)
        settings = memory_settings()
        await Worker(await world.connect(name), settings, ctx, engine, worker_id=name).start()
    await world.sleep(2)


def make_requests(world: MemoryWorld, count: int, seed: int = 7) -> list[Request]:
    return conversations(world.clock, random.Random(seed), count)


def conversations(clock: Clock, rng: random.Random, count: int) -> list[Request]:
    """Requests of growing conversations, some with hints; ids contain their time."""
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


async def serve_requests(
    world: MemoryWorld, sent: Sequence[Request], every_s: float = 0.02
) -> None:
    """Publish requests one after the other, and wait until all are answered."""
    for request in sent:
        append_record(world, REQUESTS, request)
        await world.sleep(every_s)
    await world.wait_until(lambda: len(answered_ids(world)) >= len(sent), within_s=300)
    await world.sleep(1)


def answered_ids(world: MemoryWorld) -> set[str]:
    """Ids of requests with a successful run."""
    got = [decode(record) for record in world.all_records(LEDGER)]
    return {r.id for r in got if isinstance(r, Finished) and r.code in ("stop", "length")}


async def capture_lines(
    world: MemoryWorld, from_ms: int = 0, to_ms: int | None = None, secret: KeySecret = SECRET
) -> list[AnyCaptureLine]:
    """The capture lines of a period, by default of the whole log."""
    period = TimeRange(from_ms, world.clock.wall_ms() + 1 if to_ms is None else to_ms)
    log = await world.connect("capture")
    async with aclosing(capture_period(log, world.clock, period, secret)) as lines:
        return [line async for line in lines]


def write_capture(lines: Sequence[AnyCaptureLine], file: Path) -> Path:
    with created_capture(file) as out:
        for line in lines:
            out.write_line(line)
    return file
