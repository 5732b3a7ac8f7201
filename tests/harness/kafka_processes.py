"""A deployment on a real broker: its topics, and processes as `faststream run` starts them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.collector import Collector
from kvlane.app.engine.interface import Engine
from kvlane.app.gateway import Gateway
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka import provision
from kvlane.streams.kafka.kafka_log import KafkaLog
from tests.harness.topic_cleanup import delete_topics

WAIT_S = 120.0


def set_environment(
    monkeypatch: pytest.MonkeyPatch, kafka: Broker, topic_prefix: str, **settings: object
) -> None:
    """Let all `Settings`, here and in processes, be of this broker and prefix, and have these."""
    of_broker = {"bootstrap_servers": kafka.bootstrap_servers, "topic_prefix": topic_prefix}
    for name, value in {**of_broker, **settings}.items():
        monkeypatch.setenv(f"KVLANE_{name.upper()}", str(value))


@asynccontextmanager
async def provisioned(settings: Settings, replication: int = 1) -> AsyncIterator[KafkaLog]:
    """A log with all topics of these settings, which are deleted at the end."""
    log = open_log(settings, "test")
    await log.start()
    try:
        await provision.create_topics(
            log, lanes=settings.lanes, replication=replication, min_insync=1
        )
        yield log
    finally:
        await log.close()
        await delete_topics(settings.bootstrap_servers, settings.topic_prefix)


class KafkaParts:
    """Parts of a deployment in this process, by name, each on its own connection to a broker."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: dict[str, tuple[KafkaLog, ProcessContext, Any]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._running)

    async def start(
        self, name: str, kind: type[Router | Preprocessor | Collector | Gateway]
    ) -> Any:
        """`name`: also of a router in its decisions."""
        settings = self._settings.model_copy(update={"router_id": name})
        return await self._start(name, lambda log, ctx: kind(log, settings, ctx))

    async def start_worker(self, name: str, engine: Engine) -> None:
        await self._start(
            name, lambda log, ctx: Worker(log, self._settings, ctx, engine, worker_id=name)
        )

    async def _start(self, name: str, make: Callable[[KafkaLog, ProcessContext], Any]) -> Any:
        log, ctx = open_log(self._settings, name), ProcessContext(name)
        await log.start()
        part = make(log, ctx)
        self._running[name] = log, ctx, part
        await part.start()
        return part

    async def kill(self, *names: str) -> None:
        for name in names:
            log, ctx, _ = self._running.pop(name)
            await ctx.cancel_tasks()
            await log.close()

    async def stop(self) -> None:
        """Stop all but the workers, which are killed, since they would drain. Raises the error of a
        part that has failed."""
        for name in reversed(self.names):
            _, ctx, part = self._running[name]
            if ctx.error is not None:
                raise ctx.error
            if not isinstance(part, Worker):
                await part.stop()
            await self.kill(name)


@contextmanager
def app_process(
    kind: str, output: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process `app.KIND:app` with this environment (its own by default), killed at the end."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "faststream", "run", f"kvlane.app.{kind}:app"],
            stdout=file, stderr=subprocess.STDOUT, env=env or os.environ, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def wait_answered(
    process: subprocess.Popen[bytes],
    http: httpx.AsyncClient,
    path: str,
    accepts: Callable[[httpx.Response], object],
    headers: Mapping[str, str] | None = None,
) -> None:
    """Wait until a process gives an accepted answer; it may not listen yet."""
    clock = SystemClock()
    deadline = clock.now() + WAIT_S
    while True:
        assert process.poll() is None, "the process has ended"
        assert clock.now() < deadline, "the process is not ready"
        try:
            if accepts(await http.get(path, headers=headers)):
                return
        except httpx.TransportError:
            pass
        await clock.sleep(0.1)


async def kvlane(*arguments: str) -> str:
    """The output of a command, which has an event loop of its own and so runs in a thread."""
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
