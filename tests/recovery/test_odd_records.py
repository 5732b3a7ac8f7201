"""Tests of malformed records on every topic of a real broker while requests run.

Beside the records of `tests/malformed_records.py`: header names that are not UTF-8, all
compressions, and batches that decompress to far more than they should. Every request gets the
answer of its engine, no process ends, and none grows. `KVLANE_TEST_ODD_RECORDS=20000` for the
long form.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from kvlane.app.local.deployment import DeploymentPart
from kvlane.app.local.processes import free_port
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.codecs import decode
from kvlane.streams.errors import RecordError
from kvlane.streams.kafka import provision
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Partition
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Result
from kvlane.streams.topics import RESULTS, TOPICS
from tests.deployments import Deployment
from tests.harness.http_and_kafka_clients import ANSWER_S, CLOCK, DeploymentClients
from tests.harness.topic_cleanup import delete_topics
from tests.malformed_records import MalformedRecords

log = logging.getLogger(__name__)

RECORDS = int(os.environ.get("KVLANE_TEST_ODD_RECORDS", "2000"))
REQUESTS = max(30, RECORDS // 100)
WARM = 0.3
"""Of the records and requests, before memory is measured for the first time."""
GROWTH_BYTES = 20 * 1024 * 1024
LANES = 4
IN_A_BATCH = 10
BOMB_EVERY = 50  # batches
BOMB_BYTES = 64 * 1024 * 1024
KEYED = {topic.name for topic in TOPICS if topic.compacts or topic.retention_ms is None}
"""Compacted topics: brokers take no record without a key there."""
NAME = "a name to break"
PARTS = ("worker", "worker", "router", "preprocessor", "collector", "indexer", "gateway")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


class Stranger:
    """Publishes batches whose bytes are its own."""

    def __init__(self, producer: AIOKafkaProducer, prefix: str, counts: dict[str, int]) -> None:
        self._producer = producer
        self._prefix = prefix
        self._counts = counts
        self._odd = MalformedRecords(7)
        self._random = random.Random(7)
        self._batches = 0
        self.published: Counter[str] = Counter()
        """Records that brokers took, by topic."""
        self.refused = 0

    async def publish(self, count: int) -> None:
        """So many records; what the broker does not take is counted."""
        until = self.published.total() + count
        while self.published.total() < until:
            topic = self._random.choice(TOPICS)
            partition = self._random.randrange(self._counts[topic.name])
            try:
                await self._send(topic.name, partition)
            except Exception:  # noqa: BLE001  # a record that the broker refuses harms nothing
                self.refused += 1
            await asyncio.sleep(0)

    async def _send(self, topic: str, partition: int) -> None:
        self._batches += 1
        codec = self._random.randrange(5)
        if self._batches % BOMB_EVERY == 0:
            entries: list[tuple[Any, ...]] = [(b"odd-1", bytes(BOMB_BYTES), [("t", b"Request")])]
            codec = 1 + self._batches // BOMB_EVERY % 4
        else:
            entries = [(e.key, e.value, list(e.headers)) for e in self._entries(topic)]
        making = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 1 << 30)
        for number, (key, value, headers) in enumerate(entries):
            making.append(number, 1000, key, value, headers)
        batch = self._producer.create_batch()
        for _ in entries:
            batch.append(key=None, value=b"", timestamp=None)
        batch.close()
        batch._buffer = _broken(bytearray(making.build()))
        sent = await self._producer.send_batch(batch, self._prefix + topic, partition=partition)
        await sent
        self.published[topic] += len(entries)

    def _entries(self, topic: str) -> list[Any]:
        odd = [self._odd.draw(topic).entry for _ in range(IN_A_BATCH)]
        if self._random.random() < 0.3:
            odd[0] = odd[0]._replace(headers=((NAME, b"1"), *odd[0].headers))
        return [e._replace(key=e.key or b"odd") if topic in KEYED else e for e in odd]


def _broken(data: bytearray) -> bytes:
    """The batch, with a name of a header that is no UTF-8 in place of the marker."""
    at = data.find(NAME.encode())
    if at >= 0:
        data[at : at + len(NAME)] = b"\xff" * len(NAME)
        data[17:21] = struct.pack(">I", calc_crc32c(bytes(data[21:])))
    return bytes(data)


@asynccontextmanager
async def opened(
    kafka: Broker, cache: Path
) -> AsyncIterator[tuple[Deployment, DeploymentClients, Stranger]]:
    prefix, port = f"odd{random.randbytes(4).hex()}.", free_port()
    common: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap_servers,
        "topic_prefix": prefix,
        "lanes": LANES,
        "cache_dir": cache,
        "max_attempts": 10,
        "worker_timeout_s": 10,
        "session_timeout_ms": 10000,
    }
    own: dict[str, dict[str, Any]] = {
        "gateway": {"http_port": port},
        "indexer": {"indexer_port": free_port()},
    }
    parts = [DeploymentPart(f"{kind}-{n}", kind, own.get(kind, {})) for n, kind in enumerate(PARTS)]
    settings = Settings(**common)
    log = KafkaLog(settings.kafka_connection("users"), prefix=prefix)
    await log.start()
    await provision.create_topics(log, lanes=LANES, replication=1, min_insync=1)
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap_servers, max_request_size=1 << 26)
    await producer.start()
    deployment = Deployment(parts, common)
    users = DeploymentClients(log, settings, (f"http://127.0.0.1:{port}",))
    try:
        deployment.launch(*deployment.parts)
        await deployment.wait_ready(*deployment.parts)
        await users.judge.load()
        await users.wait_model()
        counts = {topic.name: await log.partitions(topic.name) for topic in TOPICS}
        async with users.client:
            yield deployment, users, Stranger(producer, prefix, counts)
    finally:
        deployment.close()
        await producer.stop()
        for client in users.openai:
            await client.close()
        await log.close()
        await delete_topics(kafka.bootstrap_servers, prefix)


async def send(users: DeploymentClients, count: int) -> None:
    """Every second one over HTTP, the others on Kafka; each answer is what the engine says, and
    each of the latter has a result."""
    requested = []
    for number in range(count):
        body = {"model": "demo", "prompt": f"Tell me about {number}.", "max_tokens": 12}
        if number % 2:
            one = await users.judge.expect_answer("", "completion", body)
            await users.complete(0, "completion", body, one)
        else:
            one = await users.judge.expect_answer(users.client.new_request_id(), "completion", body)
            await users.client.publish(Prompt(id=one.id, kind="completion", body=body, result=True))
            await users.read(one)
        requested.append(one)
    await wait_results(users.log, {one.id for one in requested[::2]})
    wrong = [(a.id, a.finish_reason) for a in requested if not a.is_correct]
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:5]}"


async def wait_results(log: KafkaLog, ids: set[str]) -> None:
    """Wait until each of these requests has a result."""
    reader, missing = log.reader(), set(ids)
    reader.assign({Partition(RESULTS, lane): 0 for lane in range(LANES)})
    deadline = CLOCK.now() + ANSWER_S
    while missing:
        assert CLOCK.now() < deadline, f"no result of {len(missing)}: {sorted(missing)[:5]}"
        for records in (await reader.poll(0.5)).values():
            for record in records:
                try:
                    got = decode(record)
                except RecordError:
                    continue
                if isinstance(got, Result) and got.status == "completed":
                    missing.discard(got.id)
    await reader.close()


def resident(deployment: Deployment) -> dict[str, int]:
    """Bytes of each process."""
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        name: page * int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        for name, process in sorted(deployment.processes.items())
    }


async def test_requests_are_answered_and_no_process_ends_or_grows(
    kafka: Broker, tmp_path: Path
) -> None:
    async with opened(kafka, tmp_path) as (deployment, users, stranger):
        await send(users, 4)
        first = resident(deployment)
        measured = []
        for share in (WARM, 1 - WARM):
            await asyncio.gather(
                stranger.publish(int(RECORDS * share)), send(users, int(REQUESTS * share))
            )
            await send(users, 4)  # behind all that was published
            deployment.check()
            measured.append(resident(deployment))
        # Shown by `--log-cli-level=WARNING`.
        log.warning("%s records, %d batches refused", stranger.published, stranger.refused)
        for name, size in measured[-1].items():
            sizes = (first[name], measured[0][name], size)
            log.warning("%s: %s MB", name, " ".join(f"{each / 2**20:.1f}" for each in sizes))
        assert stranger.published.total() >= RECORDS
        least = min(stranger.published[topic.name] for topic in TOPICS)
        assert least > RECORDS / len(TOPICS) / 5, "a topic was drawn or accepted too seldom"
        grown = {n: size - measured[0][n] for n, size in measured[-1].items()}
        assert max(grown.values()) <= GROWTH_BYTES, grown
