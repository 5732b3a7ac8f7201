"""aiokafka's fetcher with sessions: positions, pauses, errors, leaders and brokers that change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.cluster import ClusterMetadata
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.errors import KafkaConnectionError, OffsetOutOfRangeError
from aiokafka.protocol.fetch import FetchRequest_v10, FetchRequest_v11
from aiokafka.protocol.metadata import MetadataResponse_v1
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from streams.kafka.fetch_session import REQUESTS_WITHOUT_SESSION
from streams.kafka.session_fetcher import SessionFetcher
from tests.harness.session_broker import Answer, SessionBroker

LANES = [TopicPartition("lanes", p) for p in range(4)]
NO_WAIT_S = 0.005


class Node:
    """A broker behind a connection: answers after a moment, or as it is told."""

    def __init__(self, ends: dict[TopicPartition, int]) -> None:
        self.broker = SessionBroker()
        self.broker.ends = ends
        self.versions = (4, 17)
        self.requests: list[list[TopicPartition]] = []
        """Partitions that each request lists."""
        self.is_away = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.errors: dict[TopicPartition, int] = {}
        self.error = self.throttle_ms = 0

    async def answer(self, request: Any) -> Any:
        struct = request.prepare({1: self.versions})
        data = struct.encode()
        known = {10: FetchRequest_v10, 11: FetchRequest_v11}[struct.API_VERSION].decode(data)
        wanted = [
            (TopicPartition(topic, p), at) for topic, ps in known.topics for p, _, at, _, _ in ps
        ]
        gone = [TopicPartition(t, p) for t, ps in known.forgotten_topics_data for p in ps]
        self.requests.append([tp for tp, _ in wanted] + gone)
        if self.is_away:
            raise KafkaConnectionError("away")
        answer = self.broker.fetch(known.session_id, known.session_epoch, wanted, gone)
        await asyncio.sleep(NO_WAIT_S)
        await self.answers.wait()
        if self.error or self.throttle_ms:
            answer = Answer(self.error, answer.session_id, {})
        topics = [(tp.topic, [self._fields(tp, answer, dict(wanted))]) for tp in answer.partitions]
        topics += [(tp.topic, [(tp.partition, e, -1, -1, -1, None, -1, b"")])
                   for tp, e in self.errors.items()]  # fmt: skip
        if struct.API_VERSION < 11:
            topics = [(topic, [(*p[:6], p[7]) for p in ps]) for topic, ps in topics]
        theirs = known.RESPONSE_TYPE(self.throttle_ms, answer.error, answer.session_id, topics)
        return struct.RESPONSE_TYPE.decode(
            BytesIO(bytes(struct.API_VERSION == 11 and 4) + theirs.encode())
        )

    def _fields(self, tp: TopicPartition, answer: Answer, listed: dict[TopicPartition, int]) -> Any:
        reported = answer.partitions[tp]
        sessions = self.broker.sessions
        at = self.broker.positions(answer.session_id)[tp] if sessions else listed[tp]
        records = batch(at, reported.records) if reported.records else b""
        return (tp.partition, 0, reported.end, reported.end, 0, None, -1, records)


def batch(first: int, count: int) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1_000_000)
    for number in range(count):
        builder.append(number, 0, b"key", b"%d" % (first + number), [])
    data = bytearray(builder.build())
    data[:8] = first.to_bytes(8)
    return bytes(data)


class Cluster:
    """Two brokers, and the consumer's view of their partitions."""

    _metadata_max_age_ms = 300_000

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.cluster = ClusterMetadata(metadata_max_age_ms=300_000)
        self.ends = dict.fromkeys(LANES, 5)
        self.nodes = {1: Node(self.ends), 2: Node(self.ends)}
        self.lead(dict.fromkeys(LANES, 1))

    def lead(self, leaders: dict[TopicPartition, int]) -> None:
        brokers = [(node, "host", node, None) for node in self.nodes]
        rows = [(0, tp.partition, leader, [], []) for tp, leader in leaders.items()]
        self.cluster.update_metadata(MetadataResponse_v1(brokers, 1, [(0, "lanes", False, rows)]))

    async def send(self, node: int, request: Any) -> Any:
        return await self.nodes[node].answer(request)

    def force_metadata_update(self) -> asyncio.Future[bool]:
        return self._loop.create_future()


class Consumer:
    """Fetcher and subscription of a consumer that was told its positions."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node = cluster.nodes[1]
        self.subscription = SubscriptionState()
        self.fetcher = Fetcher(
            cluster, self.subscription, prefetch_backoff=0.0, retry_backoff_ms=20
        )
        SessionFetcher.install(SimpleNamespace(_fetcher=self.fetcher))
        self.values: Counter[tuple[TopicPartition, int]] = Counter()

    def assign(self, positions: dict[TopicPartition, int]) -> None:
        self.subscription.assign_from_user(set(positions))
        for tp, at in positions.items():
            self.fetcher.seek_to(tp, at)

    def state(self, tp: TopicPartition) -> Any:
        return self.subscription.subscription.assignment.state_value(tp)

    async def read(self) -> None:
        for tp, records in (await self.fetcher.fetched_records((), timeout=0.02)).items():
            for record in records:
                assert record.value == b"%d" % record.offset
                self.values[tp, record.offset] += 1

    async def until(self, so: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not so():
                await self.read()

    async def until_steady(self) -> None:
        """Until a session is open and nothing changes."""
        await self.until(lambda: len(self.node.requests) > REQUESTS_WITHOUT_SESSION + 2)
        await self.until(lambda: not self.node.requests[-1])


@pytest.fixture
async def consumer() -> AsyncIterator[Consumer]:
    made = Consumer(Cluster())
    yield made
    await made.fetcher.close()


async def test_steady_fetches_list_no_partition(consumer: Consumer) -> None:
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    before = len(consumer.node.requests)
    await consumer.until(lambda: len(consumer.node.requests) >= before + 5)
    assert consumer.node.requests[before:] == [[]] * (len(consumer.node.requests) - before)


async def test_records_of_one_partition_list_that_one_alone(consumer: Consumer) -> None:
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    before = len(consumer.node.requests)
    consumer.cluster.ends[LANES[2]] = 8
    await consumer.until(lambda: len(consumer.values) == 3)
    await consumer.until_steady()
    assert {tp for listed in consumer.node.requests[before:] for tp in listed} == {LANES[2]}
    assert set(consumer.values) == {(LANES[2], at) for at in (5, 6, 7)}
    assert set(consumer.values.values()) == {1}
    assert consumer.state(LANES[2]).highwater == 8


async def test_seek_while_a_fetch_is_under_way_reads_from_there(consumer: Consumer) -> None:
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    consumer.fetcher.seek_to(LANES[0], 2)
    await consumer.until(lambda: (LANES[0], 4) in consumer.values)
    assert {at for _, at in consumer.values} == {2, 3, 4}


async def test_paused_partition_is_not_fetched_until_it_is_resumed(consumer: Consumer) -> None:
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    consumer.state(LANES[1]).pause()
    before = len(consumer.node.requests)
    await consumer.until(lambda: any(consumer.node.requests[before:]))
    consumer.cluster.ends[LANES[1]] = 6
    before = len(consumer.node.requests)
    await consumer.until(lambda: len(consumer.node.requests) >= before + 5)
    assert not consumer.values
    assert not any(consumer.node.requests[before:])
    consumer.state(LANES[1]).resume()
    await consumer.until(lambda: (LANES[1], 5) in consumer.values)


async def test_new_assignment_learns_the_ends_again(consumer: Consumer) -> None:
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    consumer.assign(dict.fromkeys(LANES[:2], 5))
    await consumer.until(lambda: all(consumer.state(tp).highwater == 5 for tp in LANES[:2]))


async def test_partition_that_another_broker_leads_is_fetched_there(consumer: Consumer) -> None:
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    consumer.cluster.lead(dict.fromkeys(LANES, 1) | {LANES[3]: 2})
    consumer.cluster.ends[LANES[3]] = 7
    await consumer.until(lambda: (LANES[3], 6) in consumer.values)
    await consumer.until_steady()
    [session] = consumer.node.broker.sessions.values()
    assert LANES[3] not in session.partitions


async def test_partition_without_a_leader_waits_for_one(consumer: Consumer) -> None:
    consumer.cluster.lead(dict.fromkeys(LANES, 1) | {LANES[3]: -1})
    consumer.cluster.ends[LANES[3]] = 6
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    assert not consumer.values
    consumer.cluster.lead(dict.fromkeys(LANES, 1))
    await consumer.until(lambda: (LANES[3], 5) in consumer.values)


@pytest.mark.parametrize("loses", ["session", "epoch", "connection"])
async def test_lost_session_is_replaced(consumer: Consumer, loses: str) -> None:
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    if loses == "session":
        consumer.node.broker.sessions.clear()
    elif loses == "epoch":
        next(iter(consumer.node.broker.sessions.values())).epoch += 1
    else:
        consumer.node.is_away = True
        await asyncio.sleep(0.1)
        consumer.node.is_away = False
    consumer.cluster.ends[LANES[0]] = 6
    await consumer.until(lambda: (LANES[0], 5) in consumer.values)
    consumer.node.requests.clear()
    await consumer.until_steady()
    assert len(consumer.node.broker.sessions) == 1
    assert consumer.values.total() == 1


async def test_error_of_a_whole_response_is_retried_with_a_pause(consumer: Consumer) -> None:
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    consumer.node.error = 56  # KAFKA_STORAGE_ERROR
    before = len(consumer.node.requests)
    await asyncio.sleep(0.2)
    assert len(consumer.node.requests) - before < 12
    consumer.node.error = 0
    consumer.cluster.ends[LANES[0]] = 6
    await consumer.until(lambda: (LANES[0], 5) in consumer.values)


async def test_position_outside_the_log_is_an_error_of_the_poll(consumer: Consumer) -> None:
    consumer.fetcher._default_reset_strategy = 0
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    consumer.node.errors = {LANES[1]: 1}
    with pytest.raises(OffsetOutOfRangeError):
        await consumer.until(lambda: False)


async def test_response_of_one_broker_is_none_about_anothers_partitions(
    consumer: Consumer,
) -> None:
    consumer.cluster.lead(dict.fromkeys(LANES, 1) | {LANES[3]: 2})
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    consumer.cluster.nodes[2].answers.clear()
    await asyncio.sleep(4 * NO_WAIT_S)
    known_ms = {tp: consumer.state(tp).timestamp for tp in LANES}
    await asyncio.sleep(0.1)
    later = [tp for tp in LANES if consumer.state(tp).timestamp != known_ms[tp]]
    assert later == LANES[:3]


async def test_throttled_response_is_about_no_partition(consumer: Consumer) -> None:
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until_steady()
    consumer.node.throttle_ms = 100
    await asyncio.sleep(4 * NO_WAIT_S)
    known_ms = consumer.state(LANES[0]).timestamp
    await asyncio.sleep(0.1)
    assert consumer.state(LANES[0]).timestamp == known_ms


async def test_broker_without_version_11_is_asked_by_aiokafkas_own_code(
    consumer: Consumer,
) -> None:
    consumer.node.versions = (4, 10)
    consumer.cluster.ends[LANES[0]] = 8
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until(lambda: len(consumer.values) == 3)
    await consumer.until(lambda: consumer.state(LANES[1]).highwater == 5)
    assert consumer.state(LANES[1]).timestamp
    assert not consumer.node.broker.sessions
