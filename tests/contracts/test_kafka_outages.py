"""Tests of one broker that hangs, dies and comes back: its clients continue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from kvlane.streams.brokers.broker_factory import JvmBroker, JvmNode
from kvlane.streams.errors import AppendFailed, BrokerUnavailable, LogClosed, TopicMismatch
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Appended, Entry, Partition
from kvlane.streams.topics import LEDGER, REQUESTS, TOPICS
from tests.harness.record_traffic import RecordTraffic

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PARTITIONS = 4
REQUEST_TIMEOUT_S = 2.0
PATIENCE_S = 3 * REQUEST_TIMEOUT_S  # of an append


@pytest.fixture(scope="module")
def broker() -> Iterator[JvmBroker]:
    """A broker of this module's own, since it is hurt."""
    try:
        broker = JvmBroker(report=lambda _: None).start()
    except BrokerUnavailable as reason:
        pytest.fail(f"no broker: {reason}", pytrace=False)
    with broker:
        yield broker


@pytest.fixture
def node(broker: JvmBroker) -> Iterator[JvmNode]:
    node = broker.node(1)
    yield node
    node.resume()
    if not node.is_alive:
        node.spawn()
    node.wait_ready()


@pytest.fixture
async def log(broker: JvmBroker, node: JvmNode, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    config = next(t for t in TOPICS if t.name == LEDGER).config(1)
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    ledger = NewTopic(topic_prefix + LEDGER, PARTITIONS, 1, topic_configs=config)
    async with asyncio.timeout(30):
        # One that was paused is no member of its cluster for a moment.
        while admin._client.cluster.controller is None:
            await asyncio.sleep(0.2)
            await admin._client.force_metadata_update()
        while True:
            created = await admin.create_topics([ledger])
            if not any(code for _, code, *_ in created.topic_errors):
                break
            await asyncio.sleep(0.2)
    await admin.close()
    log = KafkaLog(
        ConnectionOptions(
            broker.bootstrap_servers,
            "test",
            request_timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
            session_timeout_ms=3000,
        ),
        topic_prefix,
    )
    await log.start()
    yield log
    await log.close()


async def hang(node: JvmNode) -> None:
    """Pause, and give all its threads time to stop."""
    node.pause()
    await asyncio.sleep(0.2)


async def kill(node: JvmNode) -> None:
    await asyncio.to_thread(node.kill)


async def start(node: JvmNode) -> None:
    await asyncio.to_thread(node.start)


async def test_hang_within_the_patience_of_an_append_fails_nothing(
    log: KafkaLog, node: JvmNode
) -> None:
    """The broker gets requests twice, before and after the client gave them up, and keeps one."""
    async with RecordTraffic(log, LEDGER, PARTITIONS) as traffic:
        await traffic.wait_acknowledged(20)
        await hang(node)
        await asyncio.sleep(1.5 * REQUEST_TIMEOUT_S)
        node.resume()
        await traffic.wait_acknowledged(20)
        await traffic.settle()
    assert traffic.longest_stall_s > REQUEST_TIMEOUT_S, "the broker did not hang"
    assert (traffic.failed, traffic.lost, traffic.duplicated) == ({}, [], [])
    assert (traffic.reordered, traffic.out_of_order) == ([], 0)


async def test_restart_loses_and_doubles_nothing(
    log: KafkaLog, node: JvmNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with RecordTraffic(log, LEDGER, PARTITIONS) as traffic:
        await traffic.wait_acknowledged(20)
        caplog.clear()
        await kill(node)
        await asyncio.sleep(0.5)
        await start(node)
        await traffic.wait_acknowledged(20)
        lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
        await traffic.settle()
    assert (traffic.lost, traffic.duplicated) == ([], [])
    assert (traffic.reordered, traffic.out_of_order) == ([], 0)
    assert traffic.given_twice == 0 or traffic.revocations
    assert len(lines) < 30, "the client writes as much in a second when nobody stops it"


async def test_appends_fail_in_time_during_a_long_hang_and_resume_after_it(
    log: KafkaLog, node: JvmNode
) -> None:
    async with RecordTraffic(log, LEDGER, PARTITIONS) as traffic:
        await traffic.wait_acknowledged(20)
        await hang(node)
        await traffic.wait_failure(within_s=PATIENCE_S + 2)
        node.resume()
        await traffic.wait_acknowledged(20)
        await traffic.settle()
    assert (traffic.lost, traffic.duplicated) == ([], [])
    assert traffic.out_of_order == 0


async def test_reader_and_member_made_during_an_outage_begin_after_it(
    log: KafkaLog, node: JvmNode
) -> None:
    await log.append(LEDGER, Entry(b"key", b"0 0"), 0)
    await kill(node)
    async with RecordTraffic(log, LEDGER, PARTITIONS) as traffic:
        await asyncio.sleep(1)
        assert not traffic.claims
        await start(node)
        await traffic.wait_acknowledged(5)
        await traffic.settle()
    assert traffic.log_of[0][0] == (0, 0)


async def test_first_append_to_a_topic_may_fall_into_an_outage(
    log: KafkaLog, node: JvmNode
) -> None:
    """The client asks where a topic lies when it first writes to it."""
    entry = Entry(b"key", b"first")
    async with contextlib.AsyncExitStack() as cleanup:
        logs = [log, KafkaLog(log.connection, log.prefix), KafkaLog(log.connection, log.prefix)]
        for other in logs[1:]:
            await other.start()
            cleanup.push_async_callback(other.close)

        async def append_in_each_way() -> list[object]:
            return await asyncio.gather(
                logs[0].append(LEDGER, entry, 0),
                logs[1].append_batch(LEDGER, 0, [entry]),
                logs[2].append_many(LEDGER, {0: [entry]})[0],
                return_exceptions=True,
            )

        await kill(node)
        assert [type(error) for error in await append_in_each_way()] == [AppendFailed] * 3
        await start(node)
        assert [type(result) for result in await append_in_each_way()] == [Appended] * 3


async def test_append_to_a_topic_that_was_never_seen_fails_retryably_in_an_outage(
    log: KafkaLog, node: JvmNode
) -> None:
    await kill(node)
    with pytest.raises(AppendFailed):
        await log.append(REQUESTS, Entry(b"key", b"first"), 0)
    await start(node)
    with pytest.raises(TopicMismatch):
        await log.append(REQUESTS, Entry(b"key", b"first"), 0)


async def test_poll_during_an_outage_comes_back_empty_in_its_time(
    log: KafkaLog, node: JvmNode
) -> None:
    reader = log.reader()
    reader.assign({Partition(LEDGER, 0): 0})
    await reader.poll(0.1)
    await hang(node)
    begun = asyncio.get_running_loop().time()
    assert await reader.poll(0.5) == {}
    assert asyncio.get_running_loop().time() - begun < 2


async def test_queries_during_an_outage_raise_broker_unavailable(
    log: KafkaLog, node: JvmNode
) -> None:
    await log.end_offsets(LEDGER, [0])
    await hang(node)
    async with asyncio.timeout(PATIENCE_S + 2):
        with pytest.raises(BrokerUnavailable):
            await log.end_offsets(LEDGER, [0])


async def test_start_without_a_broker_is_bounded(broker: JvmBroker, node: JvmNode) -> None:
    await hang(node)
    log = KafkaLog(ConnectionOptions(broker.bootstrap_servers, "test", request_timeout_ms=1000))
    async with asyncio.timeout(10):
        with pytest.raises(BrokerUnavailable):
            await log.start()


@pytest.mark.parametrize("hurt", ["killed", "paused"])
async def test_close_during_an_outage_is_bounded(log: KafkaLog, node: JvmNode, hurt: str) -> None:
    before = asyncio.all_tasks()
    async with RecordTraffic(log, LEDGER, PARTITIONS) as traffic:
        await traffic.wait_acknowledged(5)
        if hurt == "killed":
            await kill(node)
        else:
            await hang(node)
        waiting = asyncio.create_task(log.append(LEDGER, Entry(b"key", b"0 0"), 0))
        await asyncio.sleep(0.5)
        async with asyncio.timeout(4 * REQUEST_TIMEOUT_S):
            await log.close()
        with pytest.raises((LogClosed, AppendFailed)):
            await waiting
    if left := asyncio.all_tasks() - before:  # requests under way end by their own time-outs
        await asyncio.wait(left, timeout=2 * REQUEST_TIMEOUT_S)
    assert asyncio.all_tasks() <= before
