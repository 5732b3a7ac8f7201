"""A gateway on a real socket, with router and workers in this process: OpenAI's client may ask it.

Owns its parts: none of them may fail, and none is left. The log is the test's; time is real, since
sockets know no other.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from app.engine.contract import Engine
from app.gateway import Gateway
from app.lifetime import Lifetime
from app.router import Router
from app.settings import Settings
from app.worker import Worker
from streams.clock import SystemClock
from streams.memory.broker import MemoryBroker
from streams.ports import Log

WAIT_S = 20.0

Connect = Callable[[str], Awaitable[Log]]
"""Gives the part of this name a log that has started."""


class Front:
    """Gateway and router; workers move in when they are asked to. `close` it."""

    def __init__(self, connect: Connect, **over: Any) -> None:
        self._connect = connect
        self.settings = Settings(http_port=0, drain_grace_s=1, **over)
        self.lives: list[Lifetime] = []

    async def open(self) -> None:
        await Router(*await self.part("router")).start()
        self.gateway = Gateway(*await self.part("gateway"))
        await self.gateway.start()
        self.openai = openai.AsyncOpenAI(
            base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        )

    async def employ(self, name: str, make: Callable[[Lifetime], Engine]) -> Worker:
        """A worker that has started."""
        log, settings, life = await self.part(name)
        worker = Worker(log, settings, life, make(life), worker_id=name)
        await worker.start()
        return worker

    async def part(self, name: str) -> tuple[Log, Settings, Lifetime]:
        """What a process of this name is made of."""
        life = Lifetime(name, rng=random.Random(name))
        self.lives.append(life)
        return await self._connect(name), self.settings, life

    async def close(self) -> None:
        await self.openai.close()
        await self.gateway.stop()
        for life in self.lives:
            assert life.failed is None
            await life.end()


def to(broker: MemoryBroker) -> Connect:
    """Connections to a log in memory."""

    async def connect(name: str) -> Log:
        log = broker.connect(name)
        await log.start()
        return log

    return connect


async def until(condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    deadline = clock.now() + WAIT_S
    while not condition():
        assert clock.now() < deadline, "it never came true"
        await clock.sleep(0.01)
