"""A deployment on a real broker: its topics, and processes as `faststream run` starts them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka import provision
from kvlane.streams.kafka.kafka_log import KafkaLog
from tests.harness.topic_cleanup import delete_topics

WAIT_S = 120.0


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
