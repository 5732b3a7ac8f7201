"""A deployment on one machine, for as long as somebody looks: connection, topics, parts.

Owns what is set up around them and that nothing is left of it.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
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
    """A started connection to a log that has its topics, and parts that are not started yet."""

    log: Log
    parts: Parts
    settings: Settings


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


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

    `changes` to the settings hold for the parts too. `builds` are for parts in this process.
    Raises BrokerUnavailable, TopicsDiffer.
    """
    changes = {**changes, "bootstrap_servers": broker.bootstrap_servers}
    settings = settings.model_copy(update=changes)
    log: Log
    parts: Parts
    with contextlib.ExitStack() as cleanup:
        if broker.kind == "memory":
            memory = MemoryBroker(clock, lanes=settings.lanes)
            parts = MemoryParts(parts_of(workers), builds, settings, memory, random.Random())
            log = memory.connect("stage")
        else:
            guard = Guard()
            cleanup.callback(guard.close)
            environment = {variable(name): _text(value) for name, value in changes.items()}
            parts = ProcessParts(parts_of(workers), environment, guard, clock)
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
            yield Stage(log, parts, settings)
        finally:
            await parts.stop()
            await log.close()


def _text(value: object) -> str:
    """A setting as the environment has it."""
    return json.dumps(value) if isinstance(value, dict) else str(value)
