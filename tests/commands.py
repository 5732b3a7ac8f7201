"""Commands over the log in memory: what they would ask Kafka, they ask it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app import publishing
from streams.memory.broker import MemoryBroker, MemoryLog


def over(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    """Let all commands connect to this broker, whatever the settings say; the broker again."""

    @asynccontextmanager
    async def kafka(settings: object, name: str) -> AsyncIterator[MemoryLog]:
        log = broker.connect(name)
        await log.start()
        yield log
        await log.close()

    monkeypatch.setattr(publishing, "kafka", kafka)
    return broker
