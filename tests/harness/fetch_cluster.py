"""Brokers that take fetch requests as bytes and answer with bytes, without a network."""

import asyncio
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from aiokafka import TopicPartition
from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.fetch import FetchRequest_v10, FetchRequest_v11
from aiokafka.protocol.metadata import MetadataResponse_v1
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from tests.harness.session_broker import Answer, SessionBroker

ANSWER_S = 0.005


class FetchNode:
    """A broker behind a connection: answers after a moment, or as it is told."""

    def __init__(self, ends: dict[TopicPartition, int]) -> None:
        self.broker = SessionBroker()
        self.broker.ends = ends
        self.versions = (4, 17)
        self.requests: list[list[TopicPartition]] = []
        """Partitions that each request lists."""
        self.waits: list[tuple[int, int]] = []
        """Least bytes and longest wait, in ms, of each request."""
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
        self.waits.append((known.min_bytes, known.max_wait_time))
        if self.is_away:
            raise KafkaConnectionError("away")
        await self.answers.wait()
        answer = self.broker.fetch(known.session_id, known.session_epoch, wanted, gone)
        await asyncio.sleep(ANSWER_S)
        if self.error or self.throttle_ms:
            answer = Answer(self.error, answer.session_id, {})
        topics = [(tp.topic, [self._fields(tp, answer, dict(wanted))]) for tp in answer.partitions]
        topics += [
            (tp.topic, [(tp.partition, e, -1, -1, -1, None, -1, b"")])
            for tp, e in self.errors.items()
        ]
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


class FetchCluster:
    """Two brokers, and the consumer's view of their partitions; in the place of a client.

    Each partition, of topic `lanes`, ends at 5; the first broker leads all.
    """

    _metadata_max_age_ms = 300_000

    def __init__(self, lanes: Sequence[TopicPartition]) -> None:
        self._loop = asyncio.get_running_loop()
        self.cluster = ClusterMetadata(metadata_max_age_ms=300_000)
        self.ends = dict.fromkeys(lanes, 5)
        self.nodes = {1: FetchNode(self.ends), 2: FetchNode(self.ends)}
        self.lead(dict.fromkeys(lanes, 1))

    def lead(self, leaders: dict[TopicPartition, int]) -> None:
        brokers = [(node, "host", node, None) for node in self.nodes]
        rows = [(0, tp.partition, leader, [], []) for tp, leader in leaders.items()]
        self.cluster.update_metadata(MetadataResponse_v1(brokers, 1, [(0, "lanes", False, rows)]))

    async def send(self, node: int, request: Any) -> Any:
        return await self.nodes[node].answer(request)

    def force_metadata_update(self) -> asyncio.Future[bool]:
        return self._loop.create_future()
