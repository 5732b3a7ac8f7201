"""A deployment on one machine, for as long as somebody looks: connection, topics, fleet.

Owns what is set up around a fleet and that nothing is left of it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from app.demo.parts import Build, MemoryParts, Parts, ProcessParts, parts_of
from app.settings import Settings, variable
from streams import provision
from streams.brokers.local import Broker
from streams.brokers.watchdog import Guard
from streams.clock import Clock
from streams.kafka.log import KafkaLog
from streams.memory.broker import MemoryBroker
from streams.ports import Log


class Stage(NamedTuple):
    """A started connection to a log that has its topics, and a fleet that is not started yet."""

    log: Log
    fleet: Parts
    settings: Settings


@asynccontextmanager
async def stage(
    settings: Settings,
    broker: Broker,
    clock: Clock,
    *,
    workers: int,
    changes: Mapping[str, Any],
    builds: Mapping[str, Build],
) -> AsyncIterator[Stage]:
    """Set up on a broker that runs; everything but the broker is gone afterwards.

    `changes` to the settings hold for the parts too. `builds` are for a fleet in this process.
    Raises BrokerUnavailable, TopicsDiffer.
    """
    changes = {**changes, "bootstrap_servers": broker.bootstrap_servers}
    settings = settings.model_copy(update=changes)
    log: Log
    fleet: Parts
    with contextlib.ExitStack() as cleanup:
        if broker.kind == "memory":
            memory = MemoryBroker(clock, lanes=settings.lanes)
            fleet = MemoryParts(parts_of(workers), builds, settings, memory, random.Random())
            log = memory.connect("stage")
        else:
            guard = Guard()
            cleanup.callback(guard.close)
            environment = {variable(name): str(value) for name, value in changes.items()}
            fleet = ProcessParts(parts_of(workers), environment, guard, clock)
            log = KafkaLog(settings.connection("stage"), prefix=settings.topic_prefix)
        try:
            await log.start()
            if isinstance(log, KafkaLog):
                await provision.create(
                    log,
                    lanes=settings.lanes,
                    replication=settings.replication,
                    min_insync=settings.min_insync,
                )
            yield Stage(log, fleet, settings)
        finally:
            await fleet.stop()
            await log.close()
