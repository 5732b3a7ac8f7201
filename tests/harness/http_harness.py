"""A gateway on a real socket, with router and workers in this process, for OpenAI's client.

Owns its parts: none of them may fail, and none is left. The log is the test's; time is real, since
sockets know no other.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from kvlane.app.engine.interface import Engine
from kvlane.app.gateway import Gateway
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.clock import SystemClock
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log

WAIT_S = 120.0

Connect = Callable[[str], Awaitable[Log]]
"""Returns a started log for the process of this name."""


class HttpHarness:
    """A gateway and a router; workers are started on demand. `close` it."""

    def __init__(self, connect: Connect, **over: Any) -> None:
        self._connect = connect
        self.settings = Settings(http_port=0, drain_grace_s=1, **over)
        self.contexts: list[ProcessContext] = []

    async def open(self) -> None:
        await Router(*await self.process_arguments("router")).start()
        self.gateway = Gateway(*await self.process_arguments("gateway"))
        await self.gateway.start()
        self.openai = openai.AsyncOpenAI(
            base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        )

    async def start_worker(self, name: str, make: Callable[[ProcessContext], Engine]) -> Worker:
        log, settings, ctx = await self.process_arguments(name)
        worker = Worker(log, settings, ctx, make(ctx), worker_id=name)
        await worker.start()
        return worker

    async def process_arguments(self, name: str) -> tuple[Log, Settings, ProcessContext]:
        ctx = ProcessContext(name, rng=random.Random(name))
        self.contexts.append(ctx)
        return await self._connect(name), self.settings, ctx

    async def close(self) -> None:
        await self.openai.close()
        await self.gateway.stop()
        for ctx in self.contexts:
            assert ctx.error is None
            await ctx.cancel_tasks()


def connect_to(broker: MemoryBroker) -> Connect:
    async def connect(name: str) -> Log:
        log = MemoryLog(broker, name)
        await log.start()
        return log

    return connect


async def until(condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    deadline = clock.now() + WAIT_S
    while not condition():
        assert clock.now() < deadline, "it never came true"
        await clock.sleep(0.01)
