"""Tests of the contract of the log: one suite for the log in memory and a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import count
from typing import Any, Protocol

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.client import AIOKafkaClient, ConnectionGroup

from kvlane.streams.clock import SystemClock
from kvlane.streams.errors import (
    LogClosed,
    OwnershipLost,
    PositionLost,
    RecordTooLarge,
    TopicMismatch,
)
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.group_member import KafkaMember
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Entry, Log, Member, Partition, Reader, Record
from kvlane.streams.topics import MAX_RECORD_BYTES, partition_of

PARTITIONS = 4
WAIT_S = 30.0  # a deadline for things that come at once or, with a broker's groups, in seconds
SESSION_MS = 2000  # of members of groups
HOUR_MS = 3_600_000


class Broker(Protocol):
    """A broker under test; topics are made for one test each."""

    async def topic(self, partitions: int = PARTITIONS, name: str = "") -> str: ...
    async def connect(self) -> Log: ...
    async def cut_off(self, log: Log) -> None: ...
    async def reconnect(self, log: Log) -> None: ...
    async def delete_records(self, topic: str, partition: int, before: int) -> None: ...


class InMemory:
    def __init__(self) -> None:
        self.broker = MemoryBroker(
            SystemClock(), lanes=PARTITIONS, session_timeout_s=SESSION_MS / 1000
        )
        self._numbers = count()
        self._logs: list[Log] = []

    async def topic(self, partitions: int = PARTITIONS, name: str = "") -> str:
        name = name or f"topic-{next(self._numbers)}"
        self.broker.create_topic(name, partitions, HOUR_MS)
        return name

    async def connect(self) -> Log:
        log = MemoryLog(self.broker, f"client-{next(self._numbers)}")
        await log.start()
        self._logs.append(log)
        return log

    async def cut_off(self, log: Log) -> None:
        assert isinstance(log, MemoryLog)
        log.cut_off()

    async def reconnect(self, log: Log) -> None:
        assert isinstance(log, MemoryLog)
        log.reconnect()

    async def delete_records(self, topic: str, partition: int, before: int) -> None:
        self.broker.delete_records(topic, partition, before)

    async def close(self) -> None:
        for log in self._logs:
            await log.close()


class RealKafka:
    """The adapter to a real broker: topics as `streams/topics.py` configures them."""

    _topics = count()

    def __init__(self, bootstrap_servers: str, prefix: str) -> None:
        self._bootstrap = bootstrap_servers
        self._prefix = prefix
        self._admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
        self._logs: list[Log] = []

    async def start(self) -> None:
        await self._admin.start()

    async def topic(self, partitions: int = PARTITIONS, name: str = "") -> str:
        name = name or f"topic-{next(self._topics)}"
        config = {
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(MAX_RECORD_BYTES),
        }
        new = NewTopic(self._prefix + name, partitions, 1, topic_configs=config)
        await self._admin.create_topics([new])
        return name

    async def connect(self) -> Log:
        connection = ConnectionOptions(
            self._bootstrap, client_id="contract", session_timeout_ms=SESSION_MS
        )
        log = KafkaLog(connection, prefix=self._prefix)
        await log.start()
        self._logs.append(log)
        return log

    async def cut_off(self, log: Log) -> None:
        """Close the connections to coordinators of groups, and open no other."""
        assert isinstance(log, KafkaLog)
        for client in _clients_of_members(log):
            client._get_conn = partial(_unless_coordinator, client._get_conn)
            for (_, purpose), connection in list(client._conns.items()):
                if purpose == ConnectionGroup.COORDINATION:
                    connection.close()

    async def reconnect(self, log: Log) -> None:
        assert isinstance(log, KafkaLog)
        for client in _clients_of_members(log):
            del client._get_conn

    async def delete_records(self, topic: str, partition: int, before: int) -> None:
        name = TopicPartition(self._prefix + topic, partition)
        await self._admin.delete_records({name: RecordsToDelete(before_offset=before)})

    async def close(self) -> None:
        for log in self._logs:
            await log.close()
        await self._admin.close()


def _clients_of_members(log: KafkaLog) -> list[AIOKafkaClient]:
    members = [user for user in log._users if isinstance(user, KafkaMember)]
    return [m._consumer._client for m in members if m._consumer is not None]


async def _unless_coordinator(connect: Any, node: int, **options: Any) -> Any:
    if options.get("group") == ConnectionGroup.COORDINATION:
        return None
    return await connect(node, **options)


@pytest.fixture(params=["twin", pytest.param("kafka", marks=pytest.mark.kafka)])
def make_broker(request: pytest.FixtureRequest) -> Callable[[], Any]:
    if request.param == "twin":
        return InMemory
    kafka = request.getfixturevalue("kafka")
    prefix = request.getfixturevalue("topic_prefix")
    return lambda: RealKafka(kafka.bootstrap_servers, prefix)


@pytest.fixture
async def broker(make_broker: Callable[[], Any]) -> AsyncIterator[Broker]:
    made = make_broker()
    if isinstance(made, RealKafka):
        await made.start()
    yield made
    await made.close()


@pytest.fixture
async def log(broker: Broker) -> Log:
    return await broker.connect()


class Owner:
    """Writes down what it is told; resumes at once unless told not to."""

    def __init__(self, *, resume: bool = True) -> None:
        self.member: Member | None = None
        self.owned: dict[int, int] = {}
        self.revocations: list[frozenset[int]] = []
        self._resume = resume

    def assigned(self, starts: Any) -> None:
        self.owned.update(starts)
        for partition in starts if self._resume else ():
            assert self.member is not None
            self.member.resume(partition)

    def revoked(self, partitions: frozenset[int]) -> None:
        self.revocations.append(partitions)
        for partition in partitions:
            self.owned.pop(partition, None)


def joined(log: Log, topic: str, *, resume: bool = True) -> tuple[Member, Owner]:
    owner = Owner(resume=resume)
    owner.member = log.member(topic, f"group-of-{topic}", owner)
    return owner.member, owner


def entry(text: str, key: str = "k") -> Entry:
    return Entry(key.encode(), text.encode())


def reader_of(log: Log, topic: str) -> Reader:
    """A reader of partition 0 from its beginning."""
    reader = log.reader()
    reader.assign({Partition(topic, 0): 0})
    return reader


async def read(reader: Reader | Member, n: int) -> list[Record]:
    """Poll until `n` records have come; fewer when the deadline is over."""
    got: list[Record] = []
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    while len(got) < n and loop.time() < deadline:
        for records in (await reader.poll(0.5)).values():
            got += records
    return got


async def until(members: list[Member], true: Callable[[], bool]) -> list[Record]:
    """Poll all members side by side until the condition holds; what they read meanwhile."""
    got: list[Record] = []
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    while not true():
        assert loop.time() < deadline, "the group did not settle"
        for batches in await asyncio.gather(*(m.poll(0.1) for m in members)):
            for records in batches.values():
                got += records
    return got


def values(records: list[Record]) -> list[bytes | None]:
    return [r.value for r in records]


class TestAppending:
    async def test_offsets_count_up_from_zero(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic()
        offsets = [(await log.append(topic, entry("x"), 2)).offset for _ in range(3)]
        assert offsets == [0, 1, 2]

    async def test_partition_follows_from_the_key(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic()
        keys = [f"request-{i}" for i in range(8)]
        partitions = [(await log.append(topic, entry("x", k))).partition for k in keys]
        assert partitions == [partition_of(k.encode(), PARTITIONS) for k in keys]

    async def test_time_is_the_brokers_and_never_goes_back(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        other = await broker.connect()
        logs = [log, other, log, other]
        times = [(await one.append(topic, entry("x"), 0)).timestamp_ms for one in logs]
        reader = reader_of(log, topic)
        assert times == sorted(times)
        assert [r.timestamp for r in await read(reader, 4)] == times

    async def test_batch_keeps_its_order(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        batch = [entry(str(i), f"key-{i}") for i in range(50)]
        appended = await log.append_batch(topic, 0, batch)
        reader = reader_of(log, topic)
        records = await read(reader, 50)
        assert appended.offset == 0
        assert [(r.key, r.value) for r in records] == [(e.key, e.value) for e in batch]

    async def test_batches_of_two_clients_are_not_mixed(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        other = await broker.connect()
        a, b = ([entry(name)] * 20 for name in "ab")
        await asyncio.gather(
            *(log.append_batch(topic, 0, a) for _ in range(5)),
            *(other.append_batch(topic, 0, b) for _ in range(5)),
        )
        reader = reader_of(log, topic)
        records = values(await read(reader, 200))
        assert all(len(set(records[i : i + 20])) == 1 for i in range(0, 200, 20))

    async def test_appends_of_one_client_keep_their_order(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        sent = [str(i) for i in range(100)]
        await asyncio.gather(*(log.append(topic, entry(text), 0) for text in sent))
        reader = reader_of(log, topic)
        assert values(await read(reader, 100)) == [text.encode() for text in sent]

    async def test_too_large_record_is_refused_and_not_appended(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic(1)
        with pytest.raises(RecordTooLarge):
            await log.append(topic, Entry(b"k", bytes(MAX_RECORD_BYTES + 1)))
        assert await log.end_offsets(topic, [0]) == {0: 0}

    async def test_record_of_several_megabytes_goes_through(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        large = bytes(range(256)) * (4 * 4096)
        await log.append(topic, Entry(b"k", large))
        reader = reader_of(log, topic)
        assert values(await read(reader, 1)) == [large]

    async def test_too_large_batch_is_refused_and_not_appended(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic(1)
        with pytest.raises(RecordTooLarge):
            await log.append_batch(topic, 0, [Entry(b"k", bytes(300_000))] * 4)
        assert await log.end_offsets(topic, [0]) == {0: 0}

    async def test_batch_of_one_record_may_be_as_large_as_a_record(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic(1)
        await log.append_batch(topic, 0, [Entry(b"k", bytes(3_000_000))])
        assert await log.end_offsets(topic, [0]) == {0: 1}

    async def test_headers_and_tombstones_come_back_as_they_were(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic(1)
        headers = (("t", b"Tombstone"), ("epoch", b"12"), ("t", b""))
        await log.append(topic, Entry(b"worker/1", None, headers))
        reader = reader_of(log, topic)
        [record] = await read(reader, 1)
        assert (record.key, record.value) == (b"worker/1", None)
        assert tuple((k, bytes(v)) for k, v in record.headers) == headers


class TestAppendingToMany:
    async def test_each_batch_is_in_its_partition(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(3)
        sent = {p: [entry(f"{p}/{i}") for i in range(p + 1)] for p in range(3)}
        futures = log.append_many(topic, sent)
        appended = {p: await future for p, future in futures.items()}
        assert {p: a[:2] for p, a in appended.items()} == {p: (p, 0) for p in range(3)}
        reader = log.reader()
        reader.assign({Partition(topic, p): 0 for p in range(3)})
        records = await read(reader, 6)
        for p, entries in sent.items():
            of_p = [r for r in records if r.partition == p]
            assert values(of_p) == [e.value for e in entries]
            assert {r.timestamp for r in of_p} == {appended[p].timestamp_ms}

    async def test_calls_for_one_partition_keep_their_order(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(2)
        futures, waits = [], []
        for i in range(20):
            batches = {p: [entry(f"{i}a"), entry(f"{i}b")] for p in (i % 2, 1 - i % 2)}
            futures += log.append_many(topic, batches).values()
            if i % 5 == 0:  # other ways to append keep the order too
                waits.append(asyncio.ensure_future(log.append(topic, entry(f"{i}c"), 0)))
                waits.append(asyncio.ensure_future(log.append_batch(topic, 1, [entry(f"{i}c")])))
                await asyncio.sleep(0)
        offsets = [(await future)[:2] for future in futures]
        await asyncio.gather(*waits)
        reader = log.reader()
        reader.assign({Partition(topic, p): 0 for p in range(2)})
        records = await read(reader, 88)
        wanted = [f"{i}{x}".encode() for i in range(20) for x in ("abc" if i % 5 == 0 else "ab")]
        for p in range(2):
            assert values([r for r in records if r.partition == p]) == wanted
        firsts = sorted((r.partition, r.offset) for r in records if r.value.endswith(b"a"))  # type: ignore[union-attr]
        assert sorted(offsets) == firsts

    async def test_many_calls_without_waiting_are_all_appended(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic(1)
        large = bytes(100_000)  # several batches of 1 MiB
        futures = [
            log.append_many(topic, {0: [Entry(b"%d" % i, large), Entry(b"%d" % i, b"")]})[0]
            for i in range(40)
        ]
        assert [(await future).offset for future in futures] == list(range(0, 80, 2))
        reader = reader_of(log, topic)
        keys = [r.key for r in await read(reader, 80)]
        assert keys == [b"%d" % (i // 2) for i in range(80)]

    async def test_error_concerns_its_partition_only(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(2)
        futures = log.append_many(
            topic, {0: [Entry(b"k", bytes(300_000))] * 4, 1: [entry("x")], 2: [entry("y")]}
        )
        assert (await futures[1]).offset == 0
        with pytest.raises(RecordTooLarge):
            await futures[0]
        with pytest.raises(TopicMismatch):
            await futures[2]
        assert await log.end_offsets(topic, [0, 1]) == {0: 0, 1: 1}

    async def test_cancelled_append_leaves_the_others(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(2)
        futures = log.append_many(topic, {0: [entry("x")], 1: [entry("y")]})
        futures[0].cancel()
        assert (await futures[1]).offset == 0
        assert (await log.append(topic, entry("z"), 0)).offset in (0, 1)

    async def test_topic_that_was_made_after_connecting(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(2)
        first = log.append_many(topic, {0: [entry("a")], 1: [entry("b")]})
        second = log.append_many(topic, {0: [entry("c")], 1: [entry("d")]})
        assert [(await second[p]).offset for p in (0, 1)] == [1, 1]
        assert [(await first[p]).offset for p in (0, 1)] == [0, 0]

    async def test_unknown_topic_fails_every_partition(self, log: Log) -> None:
        futures = log.append_many("never-made", {0: [entry("a")], 1: [entry("b")]})
        for future in futures.values():
            with pytest.raises(TopicMismatch):
                await future


class TestAsking:
    async def test_partitions_of_a_topic(self, broker: Broker, log: Log) -> None:
        assert await log.partitions(await broker.topic(3)) == 3

    async def test_unknown_topic_differs(self, broker: Broker, log: Log) -> None:
        with pytest.raises(TopicMismatch):
            await log.partitions("never-made")

    async def test_start_and_end_offsets(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(2)
        for _ in range(3):
            await log.append(topic, entry("x"), 1)
        await broker.delete_records(topic, 1, 2)
        assert await log.start_offsets(topic, [0, 1]) == {0: 0, 1: 2}
        assert await log.end_offsets(topic, [0, 1]) == {0: 0, 1: 3}

    async def test_offset_at_a_time(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        first = await log.append(topic, entry("x"))
        await asyncio.sleep(0.01)  # so that the next append has another broker time
        second = await log.append(topic, entry("y"))
        assert second.timestamp_ms > first.timestamp_ms
        assert await log.offset_at(topic, 0, first.timestamp_ms) == 0
        assert await log.offset_at(topic, 0, first.timestamp_ms + 1) == 1
        assert await log.offset_at(topic, 0, second.timestamp_ms + 1) == 2


class TestReading:
    async def test_from_the_given_position(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        for i in range(5):
            await log.append(topic, entry(str(i)))
        reader = log.reader()
        reader.assign({Partition(topic, 0): 3})
        records = await read(reader, 2)
        assert [(r.partition, r.offset, r.value) for r in records] == [(0, 3, b"3"), (0, 4, b"4")]
        assert reader.position(Partition(topic, 0)) == 5

    async def test_new_assignment_replaces_the_former_one(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(2)
        for partition in (0, 1):
            await log.append(topic, entry(f"in {partition}"), partition)
        reader = reader_of(log, topic)
        assert values(await read(reader, 1)) == [b"in 0"]
        await log.append(topic, entry("more"), 0)
        reader.assign({Partition(topic, 1): 0})
        assert values(await read(reader, 1)) == [b"in 1"]
        assert await reader.poll(0.2) == {}

    async def test_going_back_reads_again(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        await log.append(topic, entry("x"))
        reader = log.reader()
        for _ in range(2):
            reader.assign({Partition(topic, 0): 0})
            assert values(await read(reader, 1)) == [b"x"]

    async def test_poll_is_bounded(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        await log.append_batch(topic, 0, [entry(str(i)) for i in range(10)])
        reader = reader_of(log, topic)
        sizes = [sum(map(len, (await reader.poll(5.0, max_records=4)).values())) for _ in "abc"]
        assert sizes == [4, 4, 2]

    async def test_records_of_a_poll_are_in_offset_order(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(2)
        for i in range(20):
            await log.append(topic, entry(str(i)), i % 2)
        reader = log.reader()
        reader.assign({Partition(topic, p): 0 for p in (0, 1)})
        records = await read(reader, 20)
        for partition in (0, 1):
            assert [r.offset for r in records if r.partition == partition] == list(range(10))

    async def test_waiting_poll_wakes_when_data_arrives(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        reader = reader_of(log, topic)
        waiting = asyncio.create_task(reader.poll(WAIT_S))
        await asyncio.sleep(0.1)
        await log.append(topic, entry("x"))
        async with asyncio.timeout(WAIT_S / 2):
            batches = await waiting
        assert values(list(batches[Partition(topic, 0)])) == [b"x"]

    async def test_empty_poll_ends_after_its_time(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        reader = reader_of(log, topic)
        async with asyncio.timeout(WAIT_S):
            assert await reader.poll(0.05) == {}

    async def test_records_of_other_keys_are_skipped(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        source = Partition(topic, 0)
        for batch in range(3):
            entries = [Entry(b"%d" % key, b"%d" % batch, ()) for key in range(5)]
            await log.append_batch(topic, 0, [*entries, Entry(None, b"no key", ())])
        reader = log.reader()
        keys = {b"1"}
        reader.assign({source: 2}, keys)
        records = await read(reader, 2)
        assert [(r.offset, r.key, r.value) for r in records] == [(7, b"1", b"1"), (13, b"1", b"2")]
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while reader.position(source) < 18:
            assert asyncio.get_running_loop().time() < deadline
            assert await reader.poll(0.1) == {}
        keys.add(b"later")
        await log.append(topic, entry("x"), 0)
        await log.append(topic, Entry(b"later", b"y", ()), 0)
        assert [r.offset for r in await read(reader, 1)] == [19]
        reader.assign({source: 0})
        assert len(await read(reader, 20)) == 20

    async def test_deleted_records_are_a_lost_position(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        for i in range(5):
            await log.append(topic, entry(str(i)))
        await broker.delete_records(topic, 0, 3)
        reader = log.reader()
        reader.assign({Partition(topic, 0): 1})
        with pytest.raises(PositionLost) as lost:
            await read(reader, 1)
        assert (lost.value.topic, lost.value.partition) == (topic, 0)
        assert (lost.value.wanted, lost.value.start) == (1, 3)
        reader.assign({Partition(topic, 0): 3})
        assert values(await read(reader, 2)) == [b"3", b"4"]

    async def test_two_readers_do_not_disturb_each_other(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        await log.append(topic, entry("x"))
        readers = [log.reader(), log.reader()]
        for reader in readers:
            reader.assign({Partition(topic, 0): 0})
        assert [values(await read(r, 1)) for r in readers] == [[b"x"], [b"x"]]


class TestGroups:
    async def test_single_member_owns_all_from_the_logs_start(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic()
        await log.append(topic, entry("x"), 1)
        member, owner = joined(log, topic)
        assert values(await read(member, 1)) == [b"x"]
        assert owner.owned == dict.fromkeys(range(PARTITIONS), 0)

    async def test_two_members_share_by_range(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic()
        other = await broker.connect()
        (a, owner_a), (b, owner_b) = joined(log, topic), joined(other, topic)
        await until([a, b], lambda: len(owner_a.owned) == len(owner_b.owned) == 2)
        shares = sorted([sorted(owner_a.owned), sorted(owner_b.owned)])
        assert shares == [[0, 1], [2, 3]]

    async def test_partitions_of_a_leaving_member_move(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic()
        other = await broker.connect()
        (a, owner_a), (b, owner_b) = joined(log, topic), joined(other, topic)
        await until([a, b], lambda: len(owner_a.owned) == len(owner_b.owned) == 2)
        await b.close()
        await until([a], lambda: len(owner_a.owned) == PARTITIONS)

    async def test_closing_the_connection_leaves_the_group(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic()
        other = await broker.connect()
        (a, owner_a), (b, owner_b) = joined(log, topic), joined(other, topic)
        await until([a, b], lambda: len(owner_a.owned) == len(owner_b.owned) == 2)
        await other.close()
        await until([a], lambda: len(owner_a.owned) == PARTITIONS)

    async def test_new_owner_starts_at_the_committed_offset(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        for i in range(5):
            await log.append(topic, entry(str(i)))
        first, _ = joined(log, topic)
        await read(first, 5)
        await first.commit({0: 3})
        await first.close()
        second, owner = joined(log, topic)
        assert values(await read(second, 2)) == [b"3", b"4"]
        assert owner.owned == {0: 3}

    async def test_uncommitted_records_come_back(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        await log.append(topic, entry("x"))
        first, _ = joined(log, topic)
        assert values(await read(first, 1)) == [b"x"]
        await first.close()
        second, owner = joined(log, topic)
        assert values(await read(second, 1)) == [b"x"]
        assert owner.owned == {0: 0}

    async def test_member_cut_off_from_its_coordinator_gives_up_before_another_takes_over(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic()
        other = await broker.connect()
        (a, owner_a), (b, owner_b) = joined(log, topic), joined(other, topic)
        await until([a, b], lambda: len(owner_a.owned) == len(owner_b.owned) == 2)
        owned_by_both: list[int] = []

        def take(starts: Any) -> None:
            owned_by_both.extend(set(starts) & set(owner_a.owned))
            Owner.assigned(owner_b, starts)

        owner_b.assigned = take  # type: ignore[method-assign]
        await broker.cut_off(log)
        await log.append(topic, entry("x"), 0)  # all else can be reached
        await until([a, b], lambda: len(owner_b.owned) == PARTITIONS)
        assert (owner_a.owned, owned_by_both) == ({}, [])
        await broker.reconnect(log)
        await until([a, b], lambda: len(owner_a.owned) == len(owner_b.owned) == 2)

    async def test_member_cut_off_from_its_coordinator_gives_up_without_being_polled(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic()
        member, owner = joined(log, topic)
        await until([member], lambda: len(owner.owned) == PARTITIONS)
        await broker.cut_off(log)
        await asyncio.sleep(SESSION_MS / 1000 + 0.2)
        assert owner.owned == {}
        with pytest.raises(OwnershipLost):
            await member.commit({0: 0})
        await broker.reconnect(log)
        await until([member], lambda: len(owner.owned) == PARTITIONS)

    async def test_member_cut_off_for_less_than_a_session_keeps_its_partitions(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic()
        member, owner = joined(log, topic)
        await until([member], lambda: len(owner.owned) == PARTITIONS)
        await broker.cut_off(log)
        await asyncio.sleep(SESSION_MS / 1000 / 4)
        await broker.reconnect(log)
        await asyncio.sleep(SESSION_MS / 1000)
        assert owner.revocations == []

    async def test_member_that_lost_a_partition_cannot_commit_it(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic()
        other = await broker.connect()
        a, owner_a = joined(log, topic)
        await until([a], lambda: len(owner_a.owned) == PARTITIONS)
        b, owner_b = joined(other, topic)
        await until([a, b], lambda: len(owner_a.owned) == len(owner_b.owned) == 2)
        with pytest.raises(OwnershipLost):
            await a.commit(dict.fromkeys(owner_b.owned, 0))
        await a.commit(dict.fromkeys(owner_a.owned, 0))

    async def test_paused_partition_delivers_no_records_before_resume(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic(2)
        for partition in (0, 1):
            await log.append(topic, entry(f"in {partition}"), partition)
        member, owner = joined(log, topic, resume=False)
        assert await until([member], lambda: len(owner.owned) == 2) == []
        assert await member.poll(0.3) == {}
        member.resume(1)
        assert values(await read(member, 1)) == [b"in 1"]
        member.resume(0)
        assert values(await read(member, 1)) == [b"in 0"]

    async def test_paused_partition_is_kept_and_resumes_where_it_was(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic(2)
        for partition in (0, 1):
            await log.append_batch(topic, partition, [entry(f"{partition}/{n}") for n in range(4)])
        member, owner = joined(log, topic)
        assert len(await read(member, 8)) == 8
        member.pause(0)
        member.pause(1, 2)
        for partition in (0, 1):
            await log.append(topic, entry(f"{partition}/4"), partition)
        assert await member.poll(0.5) == {}
        assert await member.poll(0.5) == {}
        member.resume(1)
        assert values(await read(member, 3)) == [b"1/2", b"1/3", b"1/4"]
        assert await member.poll(0.3) == {}
        member.resume(0)
        assert values(await read(member, 1)) == [b"0/4"]
        assert owner.revocations == []
        await member.commit({0: 5, 1: 5})

    async def test_records_fetched_before_a_pause_are_delivered_after_it(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic(1)
        await log.append_batch(topic, 0, [entry(f"{n}") for n in range(6)])
        member, _ = joined(log, topic)
        first: list[Record] = []
        while not first:
            batches = await member.poll(1.0, 2)
            first += [r for records in batches.values() for r in records]
        member.pause(0)
        assert await member.poll(0.3) == {}
        member.resume(0)
        assert values(first + await read(member, 6 - len(first))) == [
            f"{n}".encode() for n in range(6)
        ]

    async def test_pause_of_a_partition_that_is_not_owned_is_ignored(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic()
        member, owner = joined(log, topic)
        await until([member], lambda: len(owner.owned) == PARTITIONS)
        member.pause(99)

    async def test_resume_of_a_partition_that_is_not_owned_is_ignored(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic()
        member, owner = joined(log, topic)
        await until([member], lambda: len(owner.owned) == PARTITIONS)
        member.resume(99)

    async def test_reading_continues_from_the_commit_after_a_rebalance(
        self, broker: Broker, log: Log
    ) -> None:
        topic = await broker.topic(2)
        other = await broker.connect()
        a, owner_a = joined(log, topic)
        await log.append(topic, entry("old"), 0)
        await log.append(topic, entry("new"), 0)
        await read(a, 2)
        await a.commit({0: 1})
        b, owner_b = joined(other, topic)
        again = await until([a, b], lambda: len(owner_a.owned) == len(owner_b.owned) == 1)
        while not again:
            for batches in await asyncio.gather(a.poll(0.1), b.poll(0.1)):
                again += [r for records in batches.values() for r in records]
        assert values(again) == [b"new"]
        assert owner_a.revocations[0] == frozenset({0, 1})

    async def test_groups_do_not_share_commits(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        await log.append(topic, entry("x"))
        first, _ = joined(log, topic)
        await read(first, 1)
        await first.commit({0: 1})
        others = f"another-group-of-{topic}"
        assert await log.committed_offsets(topic, f"group-of-{topic}") == {0: 1}
        assert await log.committed_offsets(topic, others) == {}
        owner = Owner()
        owner.member = second = log.member(topic, others, owner)
        assert values(await read(second, 1)) == [b"x"]


class TestClosing:
    async def test_close_is_idempotent(self, broker: Broker, log: Log) -> None:
        await log.close()
        await log.close()

    async def test_closed_log_raises(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        reader = reader_of(log, topic)
        member, _ = joined(log, topic)
        await log.close()
        with pytest.raises(LogClosed):
            await log.append(topic, entry("x"))
        with pytest.raises(LogClosed):
            await log.append_batch(topic, 0, [entry("x")])
        with pytest.raises(LogClosed):
            await log.end_offsets(topic, [0])
        with pytest.raises(LogClosed):
            await reader.poll(1.0)
        with pytest.raises(LogClosed):
            await member.poll(1.0)

    async def test_closed_reader_and_member_raise(self, broker: Broker, log: Log) -> None:
        topic = await broker.topic(1)
        reader = reader_of(log, topic)
        member, owner = joined(log, topic)
        await until([member], lambda: bool(owner.owned))
        for closing in (reader, member):
            await closing.close()
            await closing.close()
            with pytest.raises(LogClosed):
                await closing.poll(1.0)
        await log.append(topic, entry("the connection lives"))
