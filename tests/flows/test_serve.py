"""Tests of processes as `faststream run` starts them: their ends during the start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest

from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode
from kvlane.streams.ports import Partition
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.records import Heartbeat
from kvlane.streams.topics import KV_EVENTS
from tests.harness.kafka_processes import provisioned

LANES = 2
ENDS_WITHIN_S = 10.0
"""A process that is told to end must not wait for a broker."""

pytestmark = pytest.mark.slow

BROKEN = """
import asyncio
from kvlane.app.runtime.process import faststream_app

class Broken:
    def __init__(self, log, settings, life):
        self.life = life

    async def start(self):
        self.life.spawn("work", self.work())
        print("START UNDER WAY", flush=True)
        await asyncio.get_running_loop().create_future()

    async def work(self):
        {work}

    async def stop(self):
        print("STOPPED", flush=True)

app = faststream_app("broken", Broken)
"""

MORTAL = """
from kvlane.app.engine.interface import EngineDead
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.runtime.process import faststream_app
from kvlane.app.worker import Worker

class Mortal(EchoEngine):
    async def generate(self, request, context):
        raise EngineDead("the GPU is gone")
        yield

def build(log, settings, life):
    return Worker(log, settings, life, Mortal(life.clock, 0.02))

app = faststream_app("worker", build)
"""

Run = Callable[..., "Process"]


class Process:
    def __init__(self, app: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.output = folder / "output.log"
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "faststream", "run", app, "--app-dir", str(folder)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
            )

    async def sends(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in self.text:
                assert self._process.poll() is None, self.text
                await SystemClock().sleep(0.05)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    async def code(self, within_s: float = ENDS_WITHIN_S) -> int:
        return await asyncio.to_thread(self._process.wait, within_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started: list[Process] = []

    def start(app: str, **environment: str) -> Process:
        started.append(Process(app, tmp_path, environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
async def deployment(kafka: Broker, topic_prefix: str) -> AsyncIterator[dict[str, str]]:
    """What the environment says of a deployment with LANES lanes."""
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES
    )
    async with provisioned(settings):
        yield {
            "KVLANE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "KVLANE_TOPIC_PREFIX": topic_prefix,
            "KVLANE_LANES": str(LANES),
        }


async def test_broker_that_is_not_there_is_an_error(run: Run) -> None:
    process = run("kvlane.app.router:app", KVLANE_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert await process.code(60) == 1
    assert "KVLANE_BOOTSTRAP_SERVERS" in process.text
    assert "Traceback" not in process.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_a_process_that_waits_for_a_broker(
    run: Run, silent: str, number: signal.Signals
) -> None:
    process = run(
        "kvlane.app.router:app", KVLANE_BOOTSTRAP_SERVERS=silent, KVLANE_REQUEST_TIMEOUT_MS="60000"
    )
    await process.sends("router starts")
    process.terminate(number)
    assert await process.code() == 0


async def test_signal_ends_a_slow_start(
    run: Run, deployment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN.format(work="pass"))
    process = run("broken:app", **deployment)
    await process.sends("START UNDER WAY")
    process.terminate()
    assert await process.code() == 0
    assert "STOPPED" not in process.text


async def test_error_in_the_background_ends_a_start(
    run: Run, deployment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN.format(work="raise ZeroDivisionError"))
    process = run("broken:app", **deployment)
    assert await process.code(60) == 1
    assert "ZeroDivisionError" in process.text


async def test_process_with_other_lanes_does_not_start(
    run: Run, deployment: dict[str, str]
) -> None:
    process = run("kvlane.app.preprocessor:app", **deployment | {"KVLANE_LANES": str(LANES + 1)})
    assert await process.code(60) == 1
    assert f"set KVLANE_LANES={LANES}" in process.text
    assert "Traceback" not in process.text


async def test_ready_process_stops_in_order(run: Run, deployment: dict[str, str]) -> None:
    process = run("kvlane.app.router:app", **deployment)
    await process.sends("router is ready")
    process.terminate()
    assert await process.code() == 0
    assert "router stops" in process.text


async def heartbeats(deployment: dict[str, str]) -> list[Heartbeat]:
    """All that there are, in the order in which they were appended."""
    settings = Settings(
        bootstrap_servers=deployment["KVLANE_BOOTSTRAP_SERVERS"],
        topic_prefix=deployment["KVLANE_TOPIC_PREFIX"],
    )
    log = open_log(settings, "test")
    await log.start()
    numbers = range(await log.partitions(KV_EVENTS))
    ends = await log.end_offsets(KV_EVENTS, numbers)
    starts = {Partition(KV_EVENTS, n): 0 for n in numbers}
    found = []
    async for piece in read_range(
        log, SystemClock(), starts, {p: ends[p.partition] for p in starts}
    ):
        found += [(record.timestamp, decode(record)) for record in piece.records]
    await log.close()
    found.sort(key=lambda each: each[0])
    return [record for _, record in found if isinstance(record, Heartbeat)]


async def test_worker_whose_engine_dies_reports_it_and_ends_with_an_error(
    run: Run, deployment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "mortal.py").write_text(MORTAL)
    process = run("mortal:app", KVLANE_HEALTH_PROBE_IDLE_S="0.5", **deployment)
    await process.sends("worker is ready")
    assert await process.code(30) == 1
    assert "the GPU is gone" in process.text
    first, *_, last = await heartbeats(deployment)
    assert first.state == "ready"
    assert (last.state, last.reason) == ("unhealthy", "the engine is dead: the GPU is gone")
