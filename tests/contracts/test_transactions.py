"""Tests of the contract of transactional writers, in memory and over a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from kvlane.streams.errors import LogClosed, OwnershipLost, RecordTooLarge
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Entry, Log, Partition, TopicEntry
from kvlane.streams.topics import MAX_RECORD_BYTES, PROMPTS, RESULTS, partition_of
from tests.contracts.test_log import (  # noqa: F401 - fixtures
    PARTITIONS,
    Broker,
    broker,
    entry,
    joined,
    log,
    make_broker,
    read,
    reader_of,
    until,
    values,
)
from tests.harness.client_transactions import ClientTransaction


@pytest.fixture
async def topic(broker: Broker) -> str:  # noqa: F811
    """A topic that is read committed."""
    return await broker.topic(name=RESULTS)


async def test_transaction_is_read_in_its_order_from_all_its_partitions(
    log: Log,  # noqa: F811
    topic: str,
) -> None:
    writer = log.transactional_writer("w")
    await writer.open()
    await writer.write([TopicEntry(topic, entry(text), 0) for text in "abc"])
    keyed = Entry(b"request-1", b"keyed", (("t", b"x"),))
    await writer.write([TopicEntry(topic, keyed), TopicEntry(topic, entry("d"), 0)])
    assert values(await read(reader_of(log, topic), 4)) == [b"a", b"b", b"c", b"d"]
    reader = log.reader()
    reader.assign({Partition(topic, partition_of(b"request-1", PARTITIONS)): 0})
    [record] = await read(reader, 1)
    assert (record.key, record.value, tuple(record.headers)) == keyed


async def test_fenced_writer_writes_nothing(
    broker: Broker,  # noqa: F811
    log: Log,  # noqa: F811
    topic: str,
) -> None:
    first = log.transactional_writer("w")
    await first.open()
    await first.write([TopicEntry(topic, entry("a"), 0)])
    second = (await broker.connect()).transactional_writer("w")
    await second.open()
    with pytest.raises(OwnershipLost):
        await first.write([TopicEntry(topic, entry("zombie"), 0)])
    await second.write([TopicEntry(topic, entry("b"), 0)])
    await first.open()
    await first.write([TopicEntry(topic, entry("c"), 0)])
    with pytest.raises(OwnershipLost):
        await second.write([TopicEntry(topic, entry("zombie"), 0)])
    assert values(await read(reader_of(log, topic), 3)) == [b"a", b"b", b"c"]


async def test_writers_of_other_names_do_not_matter(log: Log, topic: str) -> None:  # noqa: F811
    writers = [log.transactional_writer(name) for name in ("w-1", "w-2")]
    for writer in writers:
        await writer.open()
    for number, writer in enumerate(writers):
        await writer.write([TopicEntry(topic, entry("x"), number)])


async def test_record_that_is_too_large_leaves_nothing(log: Log, topic: str) -> None:  # noqa: F811
    writer = log.transactional_writer("w")
    await writer.open()
    large = TopicEntry(topic, Entry(b"k", b"x" * MAX_RECORD_BYTES), 0)
    with pytest.raises(RecordTooLarge):
        await writer.write([TopicEntry(topic, entry("a"), 0), large])
    await writer.open()
    await writer.write([TopicEntry(topic, entry("b"), 0)])
    assert values(await read(reader_of(log, topic), 1)) == [b"b"]


async def test_large_record_is_written(log: Log, topic: str) -> None:  # noqa: F811
    writer = log.transactional_writer("w")
    await writer.open()
    large = Entry(b"k", b"x" * (MAX_RECORD_BYTES - 100_000))
    await writer.write([TopicEntry(topic, large, 0), TopicEntry(topic, entry("b"), 0)])
    found = await read(reader_of(log, topic), 2)
    assert [len(record.value or b"") for record in found] == [MAX_RECORD_BYTES - 100_000, 1]


async def test_closed_log_has_no_writers(log: Log) -> None:  # noqa: F811
    writer = log.transactional_writer("w")
    await writer.open()
    await log.close()
    with pytest.raises(LogClosed):
        await writer.write([])


async def test_topic_outside_of_the_deployment_is_written_by_its_whole_name(
    broker: Broker,  # noqa: F811
    log: Log,  # noqa: F811
    topic: str,
) -> None:
    name = f"{log.prefix}{topic}" if isinstance(log, KafkaLog) else topic
    for _ in range(100):  # a broker may know a new topic a little later
        if (found := await log.foreign_partitions({name, "there-is-none"}))[name]:
            break
        await asyncio.sleep(0.05)
    assert found == {name: PARTITIONS, "there-is-none": 0}
    outside = log.outside()
    await outside.start()
    await outside.append_batch(name, 0, [entry("a")])
    assert values(await read(reader_of(log, topic), 1)) == [b"a"]
    reader = outside.reader()
    reader.assign({Partition(name, 0): 0})
    assert values(await read(reader, 1)) == [b"a"]
    await log.close()
    with pytest.raises(LogClosed):
        await outside.append_batch(name, 0, [entry("b")])


@pytest.mark.kafka
async def test_readers_see_no_transaction_that_is_not_over_or_was_aborted(
    broker: Broker,  # noqa: F811
    log: Log,  # noqa: F811
    topic: str,
) -> None:
    if not isinstance(log, KafkaLog):
        pytest.skip("the log in memory appends at the commit")
    reader = reader_of(log, topic)
    await log.append(topic, entry("before"), 0)
    producer = AIOKafkaProducer(**log.options, acks="all", transactional_id=f"{log.prefix}w")
    await producer.start()
    try:
        for ending in (producer.abort_transaction, producer.commit_transaction):
            await producer.begin_transaction()
            for text in (b"1", b"2"):
                await producer.send_and_wait(log.prefix + topic, text, b"k", 0)
            await asyncio.sleep(0.5)
            await ending()
        await log.append(topic, entry("after"), 0)
        found = values(await read(reader, 4))
        assert found == [b"before", b"1", b"2", b"after"]
        await producer.begin_transaction()
        await producer.send_and_wait(log.prefix + topic, b"open", b"k", 0)
        assert await reader.poll(1.0) == {}
        end = (await log.end_offsets(topic, [0]))[0]
        assert reader.position(Partition(topic, 0)) < end
        await log.transactional_writer("w").open()  # as the next owner does: it aborts that one
        deadline = asyncio.get_running_loop().time() + 20
        while reader.position(Partition(topic, 0)) <= end:
            assert await reader.poll(0.5) == {}
            assert asyncio.get_running_loop().time() < deadline
    finally:
        await producer.stop()


# --- transactions of clients, on the topics that they write ---------------------------------------


class Client:
    """A client that writes in transactions: with a producer of Kafka, or on the log in memory."""

    def __init__(self, log: Log, name: str) -> None:  # noqa: F811
        self._log = log
        self._producer: Any = None
        self._name = name
        self._transaction: ClientTransaction | None = None

    async def begin(self, *texts: str) -> None:
        """Begin a transaction with these prompts in partition 0."""
        if isinstance(self._log, MemoryLog):
            self._transaction = ClientTransaction(self._log.broker)
            for text in texts:
                self._transaction.append(PROMPTS, 0, entry(text))
            return
        assert isinstance(self._log, KafkaLog)
        if self._producer is None:
            name = f"{self._log.prefix}{self._name}"
            self._producer = AIOKafkaProducer(**self._log.options, transactional_id=name)
            await self._producer.start()
        await self._producer.begin_transaction()
        for text in texts:
            await self._producer.send_and_wait(
                self._log.prefix + PROMPTS, text.encode(), b"k", partition=0
            )

    async def end(self, *, commit: bool) -> None:
        if self._transaction is not None:
            self._transaction.end(is_committed=commit)
        elif commit:
            await self._producer.commit_transaction()
        else:
            await self._producer.abort_transaction()

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.stop()


@pytest.fixture
async def clients(
    broker: Broker,  # noqa: F811
    log: Log,  # noqa: F811
) -> AsyncIterator[list[Client]]:
    await broker.topic(1, name=PROMPTS)
    clients = [Client(log, name) for name in ("a", "b")]
    yield clients
    for client in clients:
        await client.close()


async def test_member_reads_only_committed_prompts_of_clients(
    log: Log,  # noqa: F811
    clients: list[Client],
) -> None:
    member, owner = joined(log, PROMPTS)
    await until([member], lambda: len(owner.owned) == 1)
    for text, commit in (("aborted", False), ("committed", True), ("aborted too", False)):
        await clients[0].begin(text, text)
        await log.append(PROMPTS, entry(f"beside {text}"), 0)
        await clients[0].end(commit=commit)
    await log.append(PROMPTS, entry("plain"), 0)
    assert values(await read(member, 6)) == [
        b"beside aborted", b"committed", b"committed", b"beside committed", b"beside aborted too",
        b"plain",
    ]  # fmt: skip


async def test_open_transaction_of_a_client_holds_what_follows_it(
    log: Log,  # noqa: F811
    clients: list[Client],
) -> None:
    member, owner = joined(log, PROMPTS)
    await until([member], lambda: len(owner.owned) == 1)
    reader = reader_of(log, PROMPTS)
    await log.append(PROMPTS, entry("before"), 0)
    await clients[0].begin("open")
    await log.append(PROMPTS, entry("after"), 0)
    await clients[1].begin("other")
    await clients[1].end(commit=True)
    assert values(await read(member, 1)) == values(await read(reader, 1)) == [b"before"]
    assert await member.poll(0.5) == {}
    assert await log.end_offsets(PROMPTS, [0]) == {0: 1}
    await clients[0].end(commit=True)
    expected = [b"open", b"after", b"other"]
    assert values(await read(member, 3)) == values(await read(reader, 3)) == expected


async def test_positions_pass_what_transactions_leave_in_the_log(
    log: Log,  # noqa: F811
    clients: list[Client],
) -> None:
    """Else a group seems to lag behind for ever, and is never scaled to zero."""
    member, owner = joined(log, PROMPTS)
    await until([member], lambda: len(owner.owned) == 1)
    await clients[0].begin("committed")
    await clients[0].end(commit=True)
    await clients[0].begin("aborted")
    await clients[0].end(commit=False)
    end = (await log.end_offsets(PROMPTS, [0]))[0]
    [record] = await read(member, 1)
    assert member.end_of_gap(0, record.offset) == record.offset  # a later record was returned
    until_s = asyncio.get_running_loop().time() + 20
    while member.end_of_gap(0, record.offset + 1) < end:
        assert await member.poll(0.1) == {}
        assert asyncio.get_running_loop().time() < until_s
    await member.commit({0: end})
    await member.close()
    other, owner = joined(log, PROMPTS)
    await log.append(PROMPTS, entry("next"), 0)
    assert values(await read(other, 1)) == [b"next"]
    assert owner.owned == {0: end}
