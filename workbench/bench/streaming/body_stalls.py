"""Event loop stalls of a gateway from one body, and of a preprocessor from one prompt.

Each shape (`body_shapes.py`) is sent several times, over a real socket and as a record. A timer of
the same loop runs every millisecond meanwhile; its largest delay is the stall, limited by the CPU
time of this process in that time, since other processes delay it as well. The least of several
rounds counts. There is no router and no engine: a request counts as taken once its record is
appended, and is dropped then. Topics are in memory.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvlane.app.commands.simulation.report import Report, at_most
from kvlane.app.gateway import Gateway
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import publish_folder
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER
from kvlane.app.preprocess.thread_pool import ThreadPool
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import encode
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.records import EngineConfig, WorkerCard
from kvlane.streams.topics import PROMPTS, REGISTRY, REQUESTS
from workbench.bench.streaming.body_shapes import SHAPE_NAMES, BodyShape, body_shape

STALL_LIMIT_MS = 50.0
TICK_S = 0.001
SOCKET_TIMEOUT_S = 60.0
CONTEXT_LENGTH = 131_072
MODEL_NAMES = ("files", "bytes")
"""A model with tokenizer and template, and one with bytes as tokens."""
_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


class BodyScale(NamedTuple):
    """Amount of work: requests per shape."""

    rounds: int


QUICK = BodyScale(rounds=3)
FULL = BodyScale(rounds=10)


class LoopDelayProbe:
    """Measures the delay of a timer of this event loop."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_S)
            late, used = time.perf_counter() - began - TICK_S, time.process_time() - cpu
            self.worst_s = max(self.worst_s, min(late, used))

    async def longest_stall_during(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """The longest stall in ms while `work` is awaited, and its result."""
        await asyncio.sleep(5 * TICK_S)
        self.worst_s = 0.0
        result = await work()
        await asyncio.sleep(5 * TICK_S)
        return 1000 * self.worst_s, result


async def bench_bodies(
    _: Settings,
    scale: BodyScale,
    _print_line: Callable[[str], None],
    progress: Callable[[float], None],
) -> Report:
    """Run it; `progress` gets shares of the whole."""
    wanted = [(model, name) for model in MODEL_NAMES for name in SHAPE_NAMES]
    rows: list[dict[str, Any]] = []
    async with _parts() as (broker, gateway, preprocessor, ticker):
        for model, name in wanted:
            shape = body_shape(name, model)
            row: dict[str, Any] = {"shape": shape.name, "model": model, "gateway ms": ""}
            if shape.kind in _PATHS:
                post = partial(_post, gateway, broker, shape)
                row["gateway ms"], row["answer"] = await _least(scale, ticker, post)
            handle = partial(_handle, preprocessor, broker, shape)
            row["preprocessor ms"], row["record"] = await _least(scale, ticker, handle)
            rows.append(row)
            progress(1 / len(wanted))
    thresholds = []
    for side in ("gateway", "preprocessor"):
        worst = max(rows, key=lambda row: row[f"{side} ms"] or 0.0)
        value = worst[f"{side} ms"]
        name = f"longest stall of a {side} ({worst['shape']}, model of {worst['model']})"
        thresholds.append(at_most(name, value, "ms", STALL_LIMIT_MS))
    return Report("bodies", rows, thresholds)


async def _least(
    form: BodyScale, ticker: LoopDelayProbe, work: Callable[[], Any]
) -> tuple[float, str]:
    stall, result = min([await ticker.longest_stall_during(work) for _ in range(form.rounds)])
    return round(stall, 1), result


@asynccontextmanager
async def _parts() -> AsyncGenerator[
    tuple[MemoryBroker, Gateway, Preprocessor, LoopDelayProbe], None
]:
    """A gateway on a socket and a preprocessor, with workers that exist as cards only."""
    clock = SystemClock()
    broker = MemoryBroker(clock, lanes=1)
    settings = Settings(http_port=0, http_host="127.0.0.1", drain_grace_s=0)
    log = MemoryLog(broker, "bench")
    await log.start()
    card = await publish_folder(
        "files",
        DEMO_MODEL_FOLDER,
        ArtifactStore(log, clock, ThreadPool(), None),
        context_length=CONTEXT_LENGTH,
    )
    await log.append(REGISTRY, encode(card, "model/files"))
    for slot, model in enumerate(MODEL_NAMES):
        config = EngineConfig(model=model, context_length=CONTEXT_LENGTH)
        worker = WorkerCard(id=model, slot=slot, model=model, config=config)
        key = f"worker/{model}"
        appended = await log.append(REGISTRY, encode(worker, key))
        worker = WorkerCard(id=model, slot=slot, model=model, config=config, epoch=appended.offset)
        await log.append(REGISTRY, encode(worker, key))
    contexts = [ProcessContext(name) for name in ("gateway", "preprocessor")]
    gateway = Gateway(log, settings, contexts[0])
    preprocessor = Preprocessor(log, settings, contexts[1])
    await gateway.start()
    await preprocessor.start()
    ticker = LoopDelayProbe()
    ticking = asyncio.create_task(ticker.run())
    try:
        yield broker, gateway, preprocessor, ticker
    finally:
        ticking.cancel()
        await preprocessor.stop()
        await gateway.stop()
        for ctx in contexts:
            await ctx.cancel_tasks()


async def _post(gateway: Gateway, broker: MemoryBroker, shape: BodyShape) -> str:
    """Send a body; the status of the answer, or "taken" once the request is on its topic."""
    host, port = urlsplit(gateway.url).hostname, urlsplit(gateway.url).port
    _drop(broker)
    with socket.create_connection((host, port)) as client:
        client.settimeout(SOCKET_TIMEOUT_S)
        head = (
            f"POST {_PATHS[shape.kind]} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"content-type: application/json\r\ncontent-length: {len(shape.body)}\r\n\r\n"
        )
        answer = asyncio.create_task(asyncio.to_thread(_sent, client, head.encode(), shape.body))
        while not answer.done() and "Request" not in _types(broker):
            await asyncio.wait([answer], timeout=0.01)
        if not answer.done():
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            await answer
            return "taken"
        return answer.result()


def _sent(client: socket.socket, head: bytes, body: bytes) -> str:
    """Runs in a thread; "" when the connection ended first."""
    try:
        client.sendall(head)
        client.sendall(body)
        answer = client.recv(4096)
    except OSError:
        return ""
    return answer.split(b" ", 2)[1].decode() if answer else ""


async def _handle(preprocessor: Preprocessor, broker: MemoryBroker, shape: BodyShape) -> str:
    """Handle a record; the type of the record that is appended."""
    _drop(broker)
    value = b'{"id":"a","kind":"%s","body":%s}' % (shape.kind.encode(), shape.body)
    await preprocessor.prompts.publish_requests([MemoryRecord(PROMPTS, 0, 0, 0, b"a", value, ())])
    return _types(broker)[-1]


def _drop(broker: MemoryBroker) -> None:
    """Delete the appended records."""
    broker.delete_records(REQUESTS, 0, broker.log(REQUESTS, 0).end)


def _types(broker: MemoryBroker) -> list[str]:
    """Types of the appended records."""
    return [(dict(record.headers)["t"] or b"").decode() for record in broker.records(REQUESTS, 0)]
