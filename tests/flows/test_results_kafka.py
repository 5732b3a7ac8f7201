"""Tests of results on a real broker: one record per finished request, while collectors are
killed."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete

from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.codecs import encode
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.records import Chunk, End, Ended
from kvlane.streams.request import ReplyAddress, Request, ResultOptions
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES, RESULTS, lane_of
from tests.harness.kafka_processes import app_process, provisioned

REQUESTS_COUNT = 120
KILLS = 3
TOKENS = 4

pytestmark = pytest.mark.slow


@pytest.fixture
async def log(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[KafkaLog]:
    """A deployment of two lanes without processes."""
    for name, value in {
        "KVLANE_CACHE_DIR": str(tmp_path),
        "KVLANE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "KVLANE_TOPIC_PREFIX": topic_prefix,
        "KVLANE_LANES": "2",
        "KVLANE_SESSION_TIMEOUT_MS": "6000",
    }.items():
        monkeypatch.setenv(name, value)
    async with provisioned(Settings()) as log:
        yield log


@asynccontextmanager
async def topic_for_replies(servers: str, name: str) -> AsyncIterator[str]:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, 1, 1)])
        yield name
        await admin.delete_topics([name])
    finally:
        await admin.close()


async def converse(log: KafkaLog, replies: str) -> None:
    """Requests with a result, and their replies token by token, as other processes write them."""
    for number in range(REQUESTS_COUNT):
        name = f"r{number}"
        address = ReplyAddress(topic=replies, headers=(("correlation_id", name.encode()),))
        options = ResultOptions(kind="completion", custom_id=name, reply=address)
        request = Request(id=name, model="demo", token_ids=b"\1\0\0\0", result=options)
        await log.append(REQUESTS, encode(request, name))
    for seq in range(TOKENS):
        for number in range(REQUESTS_COUNT):
            name = f"r{number}"
            is_last = seq == TOKENS - 1
            chunk = Chunk(
                id=name, attempt=0, run="1", seq=seq, index=seq, token_ids=(seq,), text=f"{seq}",
                chars=seq + 1, finish_reason="stop" if is_last else None,
            )  # fmt: skip
            await log.append(RESPONSES, encode(chunk, name))
            await asyncio.sleep(0.03 if is_last else 0.01)


async def test_each_request_has_one_result_and_one_reply_whatever_is_killed(
    log: KafkaLog, kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    counted: dict[str, Counter[str]] = {}
    async with topic_for_replies(kafka.bootstrap_servers, f"replies-{topic_prefix}") as replies:
        consumer = AIOKafkaConsumer(
            topic_prefix + RESULTS,
            replies,
            bootstrap_servers=kafka.bootstrap_servers,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
        )
        await consumer.start()
        try:
            talking = asyncio.create_task(converse(log, replies))
            for kill in range(KILLS):
                with app_process("collector", tmp_path / f"collector-{kill}.log", os.environ):
                    await asyncio.sleep(5.0)
            with app_process("collector", tmp_path / "collector.log", os.environ):
                await talking
                quiet = 0
                while quiet < 6 and max(map(len, counted.values()), default=0) <= REQUESTS_COUNT:
                    found = await consumer.getmany(timeout_ms=500)
                    for tp, records in found.items():
                        for record in records:
                            result = json.loads(record.value)
                            counted.setdefault(tp.topic, Counter())[result["id"]] += 1
                            assert record.key.decode() == result["custom_id"] == result["id"]
                            assert result["body"]["choices"][0]["text"] == "0123"
                            if tp.topic == replies:
                                assert ("correlation_id", record.key) in record.headers
                    totals = [sum(counted.get(t, {}).values()) for t in consumer.subscription()]
                    quiet = quiet + 1 if min(totals) >= REQUESTS_COUNT and not found else 0
        finally:
            await consumer.stop()
    expected = Counter({f"r{number}": 1 for number in range(REQUESTS_COUNT)})
    assert counted == {topic_prefix + RESULTS: expected, replies: expected}


async def test_refusal_deleted_before_it_was_read_is_lost(
    log: KafkaLog, kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    request = Request(id="a", model="demo", result=ResultOptions(kind="completion"))
    await log.append(REQUESTS, encode(request, "a"))
    await log.append(RESPONSES, encode(End(id="a", code="invalid"), "a"))
    await log.append(LEDGER, encode(Ended(id="a", code="invalid"), "a"))
    replies = TopicPartition(topic_prefix + RESPONSES, lane_of("a", 2))
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    await admin.delete_records({replies: RecordsToDelete(before_offset=1)})
    await admin.close()
    consumer = AIOKafkaConsumer(
        topic_prefix + RESULTS,
        bootstrap_servers=kafka.bootstrap_servers,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        with app_process("collector", tmp_path / "collector.log", os.environ):
            record = await asyncio.wait_for(consumer.getone(), 60.0)
    finally:
        await consumer.stop()
    result = json.loads(record.value)
    assert (result["id"], result["status"], result["error"]["code"]) == ("a", "failed", "lost")
