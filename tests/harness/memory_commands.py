"""CLI commands on the log in memory, in place of Kafka."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvlane.app.commands import kafka_client
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog


def connect_commands(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    """Let all commands connect to this broker, whatever the settings; returns the broker."""

    @asynccontextmanager
    async def kafka(settings: object, name: str) -> AsyncIterator[MemoryLog]:
        log = MemoryLog(broker, name)
        await log.start()
        yield log
        await log.close()

    monkeypatch.setattr(kafka_client, "connect_kafka", kafka)
    return broker
