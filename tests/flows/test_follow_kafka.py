"""Tests of following a real log: replay, tail, and a second copy that begins with a snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from kvlane.streams.brokers.broker import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Ended
from kvlane.streams.topics import LEDGER, REGISTRY, SNAPSHOTS, TOPICS
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.snapshot_store import SnapshotStore
from tests.harness.recording_view import RecordingView

PARTITIONS = {LEDGER: 2, REGISTRY: 1, SNAPSHOTS: 2}
LANES = [Partition(LEDGER, lane) for lane in range(PARTITIONS[LEDGER])]
MALFORMED = Entry(b"k", b"\xc1", (("t", b"Ended"),))
BATCH = 1000
DEADLINE_S = 120.0


@pytest.fixture
async def log(kafka: Broker, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    """A log with the topics that following needs."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    configs = {t.name: t.config(1) for t in TOPICS}
    await admin.create_topics(
        [
            NewTopic(topic_prefix + name, count, 1, topic_configs=configs[name])
            for name, count in PARTITIONS.items()
        ]
    )
    log = KafkaLog(ConnectionOptions(kafka.bootstrap_servers, "test"), topic_prefix)
    await log.start()
    yield log
    await log.close()
    await admin.delete_topics([topic_prefix + name for name in PARTITIONS])
    await admin.close()


async def append(log: KafkaLog, lane: int, count: int) -> None:
    """Batches of whole records, each followed by one that is malformed."""
    publisher = RecordPublisher(log, SystemClock())
    for first in range(0, count, BATCH):
        ids = [f"request-{lane}-{n}" for n in range(first, first + BATCH)]
        await publisher.publish_batch_once(
            LEDGER, lane, [(i, Ended(id=i, code="seen")) for i in ids]
        )
        await log.append(LEDGER, MALFORMED, lane)


async def test_copy_from_a_snapshot_equals_one_from_the_log(log: KafkaLog) -> None:
    clock, snapshots = SystemClock(), SnapshotStore(log, SystemClock())
    await asyncio.gather(*(append(log, lane, 20 * BATCH) for lane in range(2)))
    first, second = RecordingView(), RecordingView()
    following = Follower(log, first, [LEDGER], clock)
    other = Follower(log, second, [LEDGER], clock, snapshots=snapshots)
    async with asyncio.timeout(DEADLINE_S):
        running = asyncio.create_task(following.run())
        await following.wait_caught_up()
        for lane in LANES:
            pointer = await snapshots.save(first, lane)
            assert pointer.position == 20 * (BATCH + 1)
            assert pointer.parts > 2

        await append(log, 1, BATCH)
        end = 21 * (BATCH + 1)
        also_running = asyncio.create_task(other.run())
        await other.wait_caught_up()
        await asyncio.gather(*(f.wait_for(LANES[1], end) for f in (following, other)))
    assert [first.state_hash(lane) for lane in LANES] == [second.state_hash(lane) for lane in LANES]
    assert (following.applied, following.malformed) == (41 * BATCH, 41)
    assert (other.applied, other.malformed) == (BATCH, 1), "the rest came from the snapshot"
    assert len(second.offsets(LANES[1])) == 21 * BATCH
    for task in (running, also_running):
        task.cancel()
    await asyncio.wait([running, also_running])
