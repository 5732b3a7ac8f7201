"""`kvlane demo`: a broker, a router, a preprocessor and three workers on this machine.

Owns the stage: what is started, where, and that nothing is left of it. What is shown on it is
`app/story.py`'s, the parts' lives are `app/fleet.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from rich.console import Console

from app import worker
from app.fleet import Build, Fleet, MemoryFleet, ProcessFleet, parts_of
from app.preprocessor import Preprocessor
from app.router import Router
from app.settings import Settings, variable
from app.story import Story
from streams import provision
from streams.clock import Clock, SystemClock
from streams.kafka import KafkaLog
from streams.localbroker import Broker, Kind, obtain
from streams.memory import MemoryBroker
from streams.ports import Log
from streams.watchdog import Guard

WORKERS = 3
CONTEXT_LENGTH = 131_072
"""The longest prompt of the trace has 87 169 tokens."""


def run(
    settings: Settings, prompts: Sequence[str], console: Console, kind: Literal["auto"] | Kind
) -> bool:
    """The whole demo, from nothing to nothing; whether every text was right.

    Raises BrokerUnavailable, TopicsDiffer, FleetError.
    """
    with obtain(
        kind,
        bootstrap_servers=settings.bootstrap_servers,
        report=lambda line: console.print(line, style="dim", markup=False),
    ) as broker:
        console.print(f"broker: {broker.description}", style="dim", markup=False)
        return asyncio.run(_show(settings, prompts, console, broker))


async def _show(
    settings: Settings, prompts: Sequence[str], console: Console, broker: Broker
) -> bool:
    clock = SystemClock()
    changes: dict[str, Any] = {
        "bootstrap_servers": broker.bootstrap_servers,
        "context_length": CONTEXT_LENGTH,
    }
    if broker.kind == "env":  # somebody's cluster: stay out of the way of what is there
        changes["topic_prefix"] = f"{settings.topic_prefix}demo."
    settings = settings.model_copy(update=changes)
    async with _stage(settings, changes, broker, clock) as (log, fleet):
        return await Story(log, fleet, clock, console, WORKERS).tell(prompts)


@asynccontextmanager
async def _stage(
    settings: Settings, changes: dict[str, Any], broker: Broker, clock: Clock
) -> AsyncIterator[tuple[Log, Fleet]]:
    """A connection to the log and a fleet, not started yet; both are gone afterwards."""
    log: Log
    fleet: Fleet
    with contextlib.ExitStack() as cleanup:
        if broker.kind == "memory":
            memory = MemoryBroker(clock, lanes=settings.lanes)
            builds: dict[str, Build] = {
                "worker": worker.build,
                "router": Router,
                "preprocessor": Preprocessor,
            }
            fleet = MemoryFleet(parts_of(WORKERS), builds, settings, memory, random.Random())
            log = memory.connect("demo")
        else:
            guard = Guard()
            cleanup.callback(guard.close)
            environment = {variable(name): str(value) for name, value in changes.items()}
            fleet = ProcessFleet(parts_of(WORKERS), environment, guard, clock)
            log = KafkaLog(settings.connection("demo"), prefix=settings.topic_prefix)
        try:
            await log.start()
            if isinstance(log, KafkaLog):
                await provision.create(
                    log,
                    lanes=settings.lanes,
                    replication=settings.replication,
                    min_insync=settings.min_insync,
                )
            yield log, fleet
        finally:
            await fleet.stop()
            await log.close()
