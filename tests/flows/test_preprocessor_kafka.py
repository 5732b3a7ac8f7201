"""Tests of the preprocessor as `faststream run` starts it, on a real broker."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from faststream import FastStream
from msgspec import structs

from kvlane.app import preprocessor
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import publish_files
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.prompts.prompt_source import PromptSource
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import AnyRecord, decode, encode
from kvlane.streams.kafka.aiokafka_client import SILENT_TIMEOUTS
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Entry, Partition, Record
from kvlane.streams.records import Cancel, Refused, RouterCapacity
from kvlane.streams.request import Request
from kvlane.streams.topics import BATCH, CAPACITY, DEAD_LETTERS, PROMPTS, REGISTRY, REQUESTS
from tests.harness.kafka_processes import WAIT_S, provisioned

LANES = 2
SESSION_MS = 2000
PATIENCE_S = SILENT_TIMEOUTS * SESSION_MS / 1000 + 1
"""A member that is not polled for so long leaves its group."""

pytestmark = [
    pytest.mark.slow,
    # FastStream 0.7 tells of its own next version.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:faststream"),
]


@pytest.fixture
async def log(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[KafkaLog]:
    """A deployment whose only model is the one of the demo."""
    monkeypatch.setenv("KVLANE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KVLANE_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("KVLANE_LANES", str(LANES))
    async with provisioned(Settings()) as log:
        artifacts = ArtifactStore(log, SystemClock(), InlinePool(), None)
        card = await publish_files(
            "demo", read_folder(DEMO_MODEL_FOLDER), artifacts, context_length=512
        )
        await log.append(REGISTRY, encode(card, "model/demo"))
        yield log


@asynccontextmanager
async def running() -> AsyncIterator[FastStream]:
    """The preprocessor's application, from its start to its end in good order."""
    app = preprocessor.app
    task = asyncio.create_task(app.run())
    try:
        yield app
    finally:
        app.exit()
        await task


async def read(log: KafkaLog, topic: str) -> list[Record]:
    """Everything that a topic holds now."""
    count = await log.partitions(topic)
    ends = await log.end_offsets(topic, range(count))
    reader = log.reader()
    sources = {Partition(topic, p): 0 for p in range(count)}
    reader.assign(sources)
    found: list[Record] = []
    try:
        while any(reader.position(s) < ends[s.partition] for s in sources):
            for records in (await reader.poll(0.2)).values():
                found += records
    finally:
        await reader.close()
    return found


async def some(log: KafkaLog, topic: str, enough: Callable[[list[Record]], bool]) -> list[Record]:
    clock = SystemClock()
    deadline = clock.now() + WAIT_S
    while not enough(found := await read(log, topic)):
        assert clock.now() < deadline, f"{len(found)} records of {topic} only"
        await clock.sleep(0.1)
    return found


async def until(holds: Callable[[], object]) -> None:
    clock = SystemClock()
    deadline = clock.now() + WAIT_S
    while not holds():
        assert clock.now() < deadline
        await clock.sleep(0.1)


async def send(log: KafkaLog, *ids: str, topic: str = PROMPTS) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for request_id in ids:
        value = json.dumps({"id": request_id, "body": body}).encode()
        await log.append(topic, Entry(request_id.encode(), value))


@asynccontextmanager
async def started(name: str) -> AsyncIterator[Preprocessor]:
    """A preprocessor with short time-outs, and a connection of its own."""
    settings = Settings(session_timeout_ms=SESSION_MS)
    ctx = ProcessContext(name)
    log = open_log(settings, name)
    await log.start()
    process = Preprocessor(log, settings, ctx, InlinePool())
    await process.start()
    try:
        yield process
        await process.stop()
        assert ctx.error is None
    finally:
        await ctx.cancel_tasks()
        await log.close()


def source_of(process: Preprocessor, topic: str) -> PromptSource:
    return process.prompts if topic == PROMPTS else process._batch


def owned(process: Preprocessor, topic: str) -> int:
    return len(source_of(process, topic)._claims)


def waits(process: Preprocessor, topic: str) -> bool:
    return source_of(process, topic).is_paused


def ids_of(records: list[Record], kind: type[AnyRecord] = Request) -> list[str]:
    decoded = [decode(r) for r in records]
    return sorted(r.id for r in decoded if isinstance(r, kind) and hasattr(r, "id"))


async def test_prompts_of_any_kind_are_answered_and_committed(log: KafkaLog) -> None:
    await send(log, "a")
    async with running():
        await log.append(PROMPTS, Entry(b"bad", b"not json"))
        await log.append(PROMPTS, Entry(None, b"\xff"), 0)
        await log.append(PROMPTS, Entry(b"empty", None))
        await send(log, *(f"r{n}" for n in range(30)))
        found = await some(log, REQUESTS, lambda r: len(r) >= 33)
        await some(log, DEAD_LETTERS, lambda r: len(r) == 3)
    assert ids_of(found) == sorted(["a", *(f"r{n}" for n in range(30))])
    assert ids_of(found, Refused) == ["bad", "empty"]
    async with running():
        await send(log, "later")
        await some(log, REQUESTS, lambda r: len(r) >= 34)
    assert len(await read(log, REQUESTS)) == 34  # nothing was read twice


async def test_only_prompts_of_committed_transactions_run(log: KafkaLog) -> None:
    producers = [
        AIOKafkaProducer(**log.options, transactional_id=f"{log.prefix}{name}")
        for name in ("committed", "aborted", "open")
    ]
    committed, aborted, left_open = producers
    for producer in producers:
        await producer.start()
    try:
        async with running():
            for each in (committed, aborted):
                await each.begin_transaction()
            for number in range(10):
                await send(log, f"plain-{number}")
                await send_in(committed, log, f"committed-{number}")
                await send_in(aborted, log, f"aborted-{number}")
            await committed.commit_transaction()
            await aborted.abort_transaction()
            await left_open.begin_transaction()
            await send_in(left_open, log, "open")
            await send(log, "aborted-0")
            found = await some(log, REQUESTS, lambda r: len(r) >= 21)
    finally:
        for producer in producers:
            await producer.stop()
    names = [f"{kind}-{n}" for kind in ("plain", "committed") for n in range(10)]
    assert ids_of(found) == sorted([*names, "aborted-0"])


async def send_in(producer: AIOKafkaProducer, log: KafkaLog, request_id: str) -> None:
    """Send a prompt in the transaction of a producer."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    value = json.dumps({"id": request_id, "body": body}).encode()
    await producer.send_and_wait(log.prefix + PROMPTS, value, request_id.encode())


async def test_failure_ends_the_process_and_commits_nothing(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: PromptSource, __: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(PromptSource, "publish_requests", fails)
        await send(log, "a", "b")
        with pytest.raises(SystemExit) as ended:
            async with asyncio.timeout(WAIT_S):  # in this task: SystemExit of another ends the loop
                await preprocessor.app.run()
        assert isinstance(ended.value.__cause__, ZeroDivisionError)
    async with running():
        await some(log, REQUESTS, lambda r: ids_of(r) == ["a", "b"])


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
async def test_prompts_that_wait_longer_than_time_outs_survive_a_rebalance(
    log: KafkaLog, topic: str
) -> None:
    room = RouterCapacity(router="r", positions=dict.fromkeys(range(LANES), 0))

    async def report() -> None:
        while True:
            await asyncio.sleep(1)
            await log.append(CAPACITY, encode(room, "r"), 0)

    await log.append(CAPACITY, encode(room, "r"), 0)  # lanes without a report may get prompts
    reporting = asyncio.create_task(report())
    names = sorted(f"r{n}" for n in range(300))
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(started("first"))
        await send(log, *names, topic=topic)
        await until(lambda: waits(first, topic))
        await asyncio.sleep(PATIENCE_S)
        assert owned(first, topic) == await log.partitions(topic), "it has left its group"
        second = await stack.enter_async_context(started("second"))
        await until(lambda: owned(first, topic) and owned(second, topic) and waits(second, topic))
        await asyncio.sleep(PATIENCE_S)
        assert owned(first, topic) + owned(second, topic) == await log.partitions(topic)
        assert await read(log, REQUESTS) == []
        room = structs.replace(
            room, requests=10**6, tokens=10**9, bytes=10**9, batch_requests=10**6
        )
        found = await some(log, REQUESTS, lambda r: len(r) >= len(names))
        await asyncio.sleep(2)
        assert ids_of(await read(log, REQUESTS)) == ids_of(found) == names
    reporting.cancel()


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
async def test_faststream_publish_reaches_a_running_preprocessor(log: KafkaLog, topic: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    message = json.dumps({"id": "a", "body": body, "kind": "cancel"})
    async with running():
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "faststream", "publish", "kvlane.app.preprocessor:app", message,
            "--topic", log.prefix + topic,
        )  # fmt: skip
        assert await command.wait() == 0
        await some(log, REQUESTS, lambda r: ids_of(r, Cancel) == ["a"])
    (prompt,) = await read(log, topic)
    assert prompt.key == b"a"
