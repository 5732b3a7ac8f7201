"""What transactional writers keep to: over the log in memory and over a real broker."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaProducer

from streams.errors import LogClosed, OwnershipLost, RecordTooLarge
from streams.kafka import kafka_reader
from streams.kafka.kafka_log import KafkaLog
from streams.ports import Entry, Log, Partition, TopicEntry
from streams.topics import MAX_RECORD_BYTES, partition_of
from tests.contracts.test_log import (  # noqa: F401 - fixtures
    PARTITIONS,
    Broker,
    broker,
    entry,
    log,
    make_broker,
    read,
    reader_of,
    values,
)


@pytest.fixture
async def topic(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """A topic that is read committed."""
    name = await broker.topic()
    monkeypatch.setattr(kafka_reader, "TRANSACTIONAL", frozenset({name}))
    return name


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
    found = await log.foreign_partitions({name, "there-is-none"})
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
