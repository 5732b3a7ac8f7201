"""The log over Apache Kafka: the ports of `streams/ports.py` by means of aiokafka.

Adds the prefix of the deployment to names of topics and groups, and translates every error of the
client (`streams/errors.py`), with the cause kept.

    producer.py            appending
    kafka_transactions.py  appending in transactions
    kafka_reader.py        reading without a group
    group_member.py        reading in a group
    aiokafka_client.py     connections of all clients
    client_patches/        replaced parts of aiokafka

Each reader and member has its own consumer: a consumer has one pending request per broker. So have
offset queries, which would wait behind a fetch.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, KafkaTimeoutError

from kvlane.streams.brokers.port_probe import ClientSecurity, connection_advice
from kvlane.streams.errors import (
    AccessDenied,
    AppendFailed,
    BrokerUnavailable,
    LogClosed,
    TopicMismatch,
)
from kvlane.streams.kafka.aiokafka_client import (
    REFUSAL_ERRORS,
    RETRY_S,
    LazyConsumer,
    limit_client_logs,
    to_access_denied,
)
from kvlane.streams.kafka.client_patches.client_parts import client_parts
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.group_member import KafkaMember
from kvlane.streams.kafka.kafka_reader import KafkaReader
from kvlane.streams.kafka.kafka_transactions import KafkaTransactionalWriter
from kvlane.streams.kafka.producer import Producer
from kvlane.streams.ports import Appended, Entry, Partition, RebalanceListener
from kvlane.streams.topics import OF_CLIENTS, partition_of

T = TypeVar("T")

_TOPIC_VISIBLE_S = 2.0
"""A busy broker may not list a new topic yet; after this long the topic does not exist."""


class KafkaLog:
    """Connection of one process to the topics of a deployment: `start` it first, `close` it at the
    end. `prefix`: of all topic names (`KVLANE_TOPIC_PREFIX`)."""

    def __init__(self, connection: ConnectionOptions, prefix: str = "kvlane.") -> None:
        self.connection = connection
        self.prefix = prefix
        self.request_timeout_s = connection.request_timeout_ms / 1000
        self.options: dict[str, Any] = {}
        """Options of every client of this connection; filled by `start`."""
        self._producer: Producer | None = None
        self._query_consumer: LazyConsumer | None = None
        self._stable_consumer: LazyConsumer | None = None
        """For the ends of topics that clients write in transactions."""
        self._group_consumers: dict[str, LazyConsumer] = {}
        """For the commits of groups, by group."""
        self._users: dict[KafkaReader | KafkaMember | KafkaTransactionalWriter, None] = {}
        self._outside: list[KafkaLog] = []
        self._partitions: dict[str, int] = {}
        self._finding = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._finders = Counter[str]()
        """Callers that wait for an unknown topic; later callers do not overtake them."""
        self._query_lock = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailable, and AccessDenied, also for a useless certificate."""
        if self._closed:
            raise LogClosed("the log was closed")
        limit_client_logs()
        try:
            self.options = dict(self.connection.client_options())
        except OSError as e:
            raise AccessDenied(f"the security settings cannot be used: {e}") from e
        self._producer = Producer(self.options, self.request_timeout_s)
        self._query_consumer = LazyConsumer(self.options, self.request_timeout_s)
        stable = {**self.options, "isolation_level": "read_committed"}
        self._stable_consumer = LazyConsumer(stable, self.request_timeout_s)
        try:
            async with asyncio.timeout(self._producer.append_timeout_s):
                await self._producer.ready()
        except (KafkaError, TimeoutError) as e:
            await self._producer.close()
            self._producer = None
            servers = self.connection.bootstrap_servers
            if isinstance(e, REFUSAL_ERRORS):
                raise to_access_denied(e, servers) from e
            client = ClientSecurity(self.options.get("ssl_context"), self.connection.uses_sasl)
            advice = await connection_advice(self.connection.servers, client)
            raise BrokerUnavailable(f"no Kafka at {servers}: {e!r}", correction=advice) from e
        await self._learn_partitions()

    async def close(self) -> None:
        """Leave all groups, flush queued appends, disconnect, within two request time-outs.
        Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(each.close() for each in (*self._users, *self._outside)))
        queries = (self._query_consumer, self._stable_consumer, *self._group_consumers.values())
        for consumer in queries:
            if consumer is not None:
                await consumer.close()
        if self._producer is not None:
            await self._producer.close()

    async def partitions(self, topic: str) -> int:
        """Number of partitions. Raises TopicMismatch, BrokerUnavailable, AccessDenied."""
        self._check_open()
        if topic in self._partitions and not self._finders.get(topic):
            return self._partitions[topic]
        until = asyncio.get_running_loop().time() + _TOPIC_VISIBLE_S
        self._finders[topic] += 1
        try:
            async with asyncio.timeout_at(until + self._open_producer().append_timeout_s):
                async with self._finding[topic]:
                    await self._find(topic, until)
        except TimeoutError as e:
            raise BrokerUnavailable(f"no answer about {topic}") from e
        finally:
            self._finders[topic] -= 1
        return self._partitions[topic]

    async def refresh_topics(self) -> dict[str, int]:
        """List the topics and their partition counts. Raises BrokerUnavailable, AccessDenied."""
        return await self._learn_partitions()

    async def append(self, topic: str, entry: Entry, partition: int | None = None) -> Appended:
        """Append one entry, acknowledged within three request time-outs; twice that for a topic's
        first. Raises AppendFailed (it may be in the log, now or later), RecordTooLarge,
        TopicMismatch, AccessDenied."""
        producer = self._open_producer()
        count = await self._count(topic)
        if partition is None:
            assert entry.key is not None, "an entry without a key needs a partition"
            partition = partition_of(entry.key, count)
        return await producer.append(self._existing(topic, partition), (entry,))

    async def append_batch(self, topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        producer = self._open_producer()
        await self._count(topic)
        return await producer.append(self._existing(topic, partition), entries)

    def append_many(
        self, topic: str, batches: Mapping[int, Sequence[Entry]]
    ) -> dict[int, asyncio.Future[Appended]]:
        producer = self._open_producer()
        if topic not in self._partitions or self._finders.get(topic):
            return {
                partition: asyncio.ensure_future(self.append_batch(topic, partition, entries))
                for partition, entries in batches.items()
            }
        futures: dict[int, asyncio.Future[Appended]] = {}
        for partition, entries in batches.items():
            try:
                futures[partition] = producer.append(self._existing(topic, partition), entries)
            except TopicMismatch as e:
                futures[partition] = asyncio.get_running_loop().create_future()
                futures[partition].set_exception(e)
        return futures

    async def start_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        tps = await self._all_existing(topic, partitions)
        offsets = await self._retry_query(topic, lambda consumer: consumer.beginning_offsets(tps))
        return {tp.partition: offset for tp, offset in offsets.items()}

    async def end_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        tps = await self._all_existing(topic, partitions)
        offsets = await self._retry_query(
            topic,
            lambda consumer: consumer.end_offsets(tps),
            self._stable_consumer if topic in OF_CLIENTS else None,
        )
        return {tp.partition: offset for tp, offset in offsets.items()}

    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        # The end is taken first: records appended between the two queries are behind it.
        end = (await self.end_offsets(topic, [partition]))[partition]
        tp = self._existing(topic, partition)
        found = await self._retry_query(
            topic, lambda consumer: consumer.offsets_for_times({tp: max(0, timestamp_ms)})
        )
        return end if found[tp] is None else int(found[tp].offset)

    async def committed_offsets(self, topic: str, group: str) -> dict[int, int]:
        tps = await self._all_existing(topic, range(await self.partitions(topic)))
        client = self._group_consumers.get(group)
        if client is None:
            # Without a subscription it is no member of the group.
            options = {"group_id": self.prefix + group, "enable_auto_commit": False}
            client = LazyConsumer({**self.options, **options}, self.request_timeout_s)
            self._group_consumers[group] = client
        found = await self._retry_query(
            topic, lambda consumer: client_parts().committed(consumer, tps), client
        )
        return {tp.partition: offset for tp, offset in found.items()}

    async def foreign_partitions(self, topics: Collection[str]) -> dict[str, int]:
        known = await self._all_topics()
        return {topic: len(known.partitions_for_topic(topic) or ()) for topic in topics}

    def outside(self) -> KafkaLog:
        """A connection to topics by their whole names, with a producer of its own."""
        self._check_open()
        log = KafkaLog(self.connection, prefix="")
        self._outside.append(log)
        return log

    def reader(self, *, moving: bool = True, gather_s: float = 0.0) -> KafkaReader:
        self._check_open()
        reader = KafkaReader(self, moving=moving, gather_s=gather_s)
        self._users[reader] = None
        return reader

    def member(self, topic: str, group: str, ownership: RebalanceListener) -> KafkaMember:
        self._check_open()
        member = KafkaMember(self, topic, group, ownership)
        self._users[member] = None
        return member

    def transactional_writer(self, name: str) -> KafkaTransactionalWriter:
        self._check_open()
        writer = KafkaTransactionalWriter(self, name)
        self._users[writer] = None
        return writer

    # --- for the readers and members of this connection ---

    def full_name(self, partition: Partition) -> TopicPartition:
        return TopicPartition(self.prefix + partition.topic, partition.partition)

    def forget(self, user: KafkaReader | KafkaMember | KafkaTransactionalWriter) -> None:
        self._users.pop(user, None)

    async def _retry_query(
        self,
        topic: str,
        query: Callable[[AIOKafkaConsumer], Awaitable[T]],
        client: LazyConsumer | None = None,
    ) -> T:
        """Retry a query until it is answered, at most as long as an append waits."""
        self._check_open()
        client = client or self._query_consumer
        assert client is not None
        assert self._producer is not None
        error: Exception | None = None
        try:
            async with asyncio.timeout(self._producer.append_timeout_s):
                while True:
                    try:
                        consumer = await client.ready(self.request_timeout_s)
                        if consumer is not None:
                            return await query(consumer)
                    except KafkaError as e:
                        if isinstance(e, REFUSAL_ERRORS):
                            raise to_access_denied(e, topic) from e
                        error = e
                        if isinstance(e, KafkaTimeoutError):
                            # The client keeps its old leaders; a new one does not.
                            client.drop()
                    self._check_open()
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as e:
            raise BrokerUnavailable(f"no answer about {topic}: {error!r}") from (error or e)

    async def _count(self, topic: str) -> int:
        """The partitions of a topic that is to be written to."""
        try:
            return await self.partitions(topic)
        except BrokerUnavailable as e:
            raise AppendFailed(f"{topic}: {e}") from e

    async def _find(self, topic: str, until: float) -> None:
        """Ask until the topic is known; once at least, and up to a time. Raises as `partitions`."""
        while topic not in self._partitions and topic not in await self._learn_partitions():
            if asyncio.get_running_loop().time() > until:
                raise TopicMismatch(
                    f"topic {self.prefix}{topic} does not exist, or is not visible to this client: "
                    "run `kvlane topics create`"
                )
            await asyncio.sleep(RETRY_S)

    async def _learn_partitions(self) -> dict[str, int]:
        found: dict[str, int] = {}
        async with self._query_lock:
            known = await self._all_topics()
            for topic in known.topics():
                if topic.startswith(self.prefix):
                    count = len(known.partitions_for_topic(topic))
                    found[topic.removeprefix(self.prefix)] = count
            self._partitions |= found
        return found

    async def _all_topics(self) -> Any:
        """List all topics: brokers may create a topic that is requested by name."""
        producer = self._open_producer()
        try:
            async with asyncio.timeout(producer.append_timeout_s):
                return await (await producer.ready()).client.fetch_all_metadata()
        except (KafkaError, TimeoutError) as e:
            self._check_open()
            if isinstance(e, REFUSAL_ERRORS):
                raise to_access_denied(e, "topics") from e
            raise BrokerUnavailable(f"no answer about topics: {e!r}") from e

    async def _all_existing(self, topic: str, partitions: Sequence[int]) -> list[TopicPartition]:
        await self.partitions(topic)
        return [self._existing(topic, p) for p in partitions]

    def _existing(self, topic: str, partition: int) -> TopicPartition:
        if not 0 <= partition < self._partitions[topic]:
            raise TopicMismatch(f"no partition {partition} of topic {self.prefix}{topic}")
        return TopicPartition(self.prefix + topic, partition)

    def _open_producer(self) -> Producer:
        self._check_open()
        assert self._producer is not None
        return self._producer

    def _check_open(self) -> None:
        if self._closed or self._producer is None:
            raise LogClosed(f"the log was {'closed' if self._closed else 'not started'}")
