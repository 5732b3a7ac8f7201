"""Tests of attaching to streams of a real log, while others attach in the same lane."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from kvlane.streams.brokers.broker import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.responses.reply_reader import ReplyReader
from kvlane.streams.topics import RESPONSES, TOPICS
from workbench.bench.streaming.attach_latency import (
    BATCH,
    AttachScale,
    attach_report,
    fill_lane,
    measure_attaches,
)

FORM = AttachScale(chunks=20 * BATCH, attaches_per_s=20.0, seconds=3.0)


@pytest.fixture
async def log(kafka: Broker, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    """A log with one lane of `responses`."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    configs = {t.name: t.config(1) for t in TOPICS}
    topic = NewTopic(topic_prefix + RESPONSES, 1, 1, topic_configs=configs[RESPONSES])
    await admin.create_topics([topic])
    log = KafkaLog(ConnectionOptions(kafka.bootstrap_servers, "test"), topic_prefix)
    await log.start()
    yield log
    await log.close()
    await admin.delete_topics([topic_prefix + RESPONSES])
    await admin.close()


async def test_every_attached_client_gets_text_at_a_high_attach_rate(log: KafkaLog) -> None:
    clock = SystemClock()
    ids = await fill_lane(log, clock, FORM.chunks, lambda _: None)
    replies = ReplyReader(log, clock, 1)
    replies.start()
    found = await measure_attaches(clock, replies, ids, FORM, lambda _: None)
    await replies.close()
    assert len(found.waits_s) == FORM.attaches_per_s * FORM.seconds
    assert None not in found.waits_s, attach_report(found, FORM).rows
