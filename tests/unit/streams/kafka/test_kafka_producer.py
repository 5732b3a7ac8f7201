"""Tests of the producer after failed deliveries, with a client that the test answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    NotEnoughReplicasError,
    TopicAuthorizationFailedError,
)
from aiokafka.producer.transaction_manager import TransactionManager

from kvlane.streams.errors import AccessDenied, AppendFailed, LogClosed, RecordTooLarge
from kvlane.streams.kafka import producer as kafka_producer
from kvlane.streams.kafka.client_patches.batch_queue import LEADER_RETRY_S, BatchQueue, PendingBatch
from kvlane.streams.kafka.producer import Producer
from kvlane.streams.ports import Appended, Entry

QUEUED_BYTES = 1024 * 1024
LANE, OTHER = TopicPartition("t.ledger", 0), TopicPartition("t.ledger", 1)


class Sent(NamedTuple):
    to: TopicPartition
    value: bytes
    batch: PendingBatch


class SenderStub:
    _message_accumulator: BatchQueue
    _sender_task: asyncio.Task[None] | None = None


class Client:
    """Stands for AIOKafkaProducer and its sender; the test answers what it was given."""

    made: list[Client]
    reachable: bool

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.sent: list[Sent] = []
        self.stopped = False
        self.is_busy = False
        self.known: set[int] = {LANE.partition, OTHER.partition}
        self.looked = 0
        self.unauthorized: set[str] = set()
        cluster = SimpleNamespace(
            unauthorized_topics=self.unauthorized,
            leader_for_partition=lambda tp: 1 if tp.partition in self.known else None,
        )
        self.client = SimpleNamespace(
            close=self._close,
            cluster=cluster,
            force_metadata_update=self._look,
            add_topic=lambda _: None,
        )
        self._txn_manager = TransactionManager(None, 1000)
        self._txn_manager.set_pid_and_epoch(7, 0)
        self._sender = SenderStub()
        Client.made.append(self)

    @property
    def queue(self) -> BatchQueue:
        return self._sender._message_accumulator

    async def start(self) -> None:
        if not Client.reachable:
            raise KafkaConnectionError("nobody there")
        self._sender._sender_task = asyncio.create_task(self._send())

    async def stop(self) -> None:
        self.stopped = True

    async def _close(self) -> None:
        self.stopped = True

    async def _send(self) -> None:
        while True:
            self.drain()
            await self.queue.waiter()

    def drain(self) -> None:
        batches, _ = self.queue.drain_by_nodes({1} if self.is_busy else set())
        for to, batch in batches.get(1, {}).items():
            entries = [e for append in batch.appends for e in append.entries]
            self.sent += [Sent(to, e.value or b"", batch) for e in entries]

    def _look(self) -> asyncio.Future[Any]:
        self.looked += 1
        self.answer = asyncio.get_running_loop().create_future()
        return self.answer

    def acknowledge(self, number: int) -> None:
        self.sent[number].batch.done(number, 1000)

    def fail(self, number: int, error: KafkaError) -> None:
        self.sent[number].batch.failure(error)


@pytest.fixture
async def producer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Producer]:
    Client.made, Client.reachable = [], True
    monkeypatch.setattr(kafka_producer, "AIOKafkaProducer", Client)
    monkeypatch.setattr(kafka_producer, "MAX_QUEUED_BYTES", QUEUED_BYTES)
    made = Producer({"client_id": "test"}, request_timeout_s=0.1)
    yield made
    await made.close()


def entry(value: bytes) -> Entry:
    return Entry(b"key", value)


async def _waited(future: asyncio.Future[Appended]) -> Appended:
    return await future


async def appending(
    producer: Producer, value: bytes, to: TopicPartition = LANE
) -> asyncio.Task[Appended]:
    """An append that has reached the client, or has failed before."""
    task = asyncio.create_task(_waited(producer.append(to, [entry(value)])))
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def test_acknowledgement_has_the_position_of_the_record(producer: Producer) -> None:
    task = await appending(producer, b"a")
    Client.made[0].acknowledge(0)
    assert await task == Appended(0, 0, 1000)


async def test_failed_delivery_replaces_the_client(producer: Producer) -> None:
    task = await appending(producer, b"a")
    Client.made[0].fail(0, NotEnoughReplicasError())
    with pytest.raises(AppendFailed):
        await task
    again = await appending(producer, b"b")
    Client.made[1].acknowledge(0)
    assert (await again).offset == 0
    assert Client.made[0].stopped


async def test_failed_delivery_fails_all_that_wait(producer: Producer) -> None:
    tasks = [await appending(producer, b"a"), await appending(producer, b"b", OTHER)]
    Client.made[0].fail(0, NotEnoughReplicasError())
    for task in tasks:
        with pytest.raises(AppendFailed):
            await task


async def test_failure_after_the_caller_has_gone_replaces_the_client(producer: Producer) -> None:
    task = await appending(producer, b"a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    Client.made[0].fail(0, NotEnoughReplicasError())
    await appending(producer, b"b")
    assert [sent.value for sent in Client.made[1].sent] == [b"b"]


async def test_cancelled_append_stays_queued(producer: Producer) -> None:
    task = await appending(producer, b"a")
    task.cancel()
    later = await appending(producer, b"b")
    Client.made[0].acknowledge(0)
    Client.made[0].acknowledge(1)
    assert (await later).offset == 1
    assert [sent.value for sent in Client.made[0].sent] == [b"a", b"b"]


async def test_append_without_an_answer_fails_at_its_deadline(producer: Producer) -> None:
    task = await appending(producer, b"a")
    with pytest.raises(AppendFailed, match=r"ledger\[0\]: no acknowledgement in 0.3 s"):
        await task


async def test_append_waits_for_the_leader_of_its_partition(producer: Producer) -> None:
    await producer.ready()
    client = Client.made[0]
    client.known = {LANE.partition}
    task = await appending(producer, b"a", OTHER)
    assert client.sent == []
    assert client.looked == 1
    client.known = {LANE.partition, OTHER.partition}
    await asyncio.sleep(2 * LEADER_RETRY_S)
    client.acknowledge(0)
    assert (await task).partition == OTHER.partition


async def test_append_is_sent_as_soon_as_the_leader_is_found(producer: Producer) -> None:
    await producer.ready()
    client = Client.made[0]
    client.known = set()
    task = await appending(producer, b"a")
    client.known = {LANE.partition}
    client.answer.set_result(True)
    for _ in range(20):  # no time passes
        await asyncio.sleep(0)
    client.acknowledge(0)
    assert await task


async def test_leader_lookup_is_not_repeated_immediately(producer: Producer) -> None:
    await producer.ready()
    client = Client.made[0]
    client.known = set()
    task = await appending(producer, b"a")
    client.answer.set_result(True)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (client.looked, client.sent) == (1, [])
    with pytest.raises(AppendFailed):
        await task


async def test_partition_without_a_leader_fails_only_its_own_appends(producer: Producer) -> None:
    await producer.ready()
    client = Client.made[0]
    client.known = {LANE.partition}
    lost = await appending(producer, b"a", OTHER)
    kept = await appending(producer, b"b")
    with pytest.raises(AppendFailed, match=r"ledger\[1\]"):
        await lost
    client.acknowledge(0)
    assert (await kept).offset == 0
    assert len(Client.made) == 1


async def test_missing_right_to_see_a_topic_is_denied(producer: Producer) -> None:
    await producer.ready()
    Client.made[0].known = set()
    Client.made[0].unauthorized.add(LANE.topic)
    with pytest.raises(AccessDenied):
        await producer.append(LANE, [entry(b"a")])


async def test_entry_without_key_and_value_is_refused(producer: Producer) -> None:
    with pytest.raises(AssertionError):
        producer.append(LANE, [Entry(None, None)])


async def test_entry_that_cannot_be_encoded_fails_alone(producer: Producer) -> None:
    odd = await appending(producer, "text")  # type: ignore[arg-type]
    with pytest.raises(AppendFailed):
        await odd
    good = await appending(producer, b"a")
    Client.made[0].acknowledge(0)
    assert await good
    assert len(Client.made) == 1


async def test_appends_that_wait_for_a_request_in_flight_share_a_batch(producer: Producer) -> None:
    await producer.ready()
    client = Client.made[0]
    client.is_busy = True
    client.drain()
    tasks = [await appending(producer, value) for value in (b"a", b"b", b"c")]
    assert client.sent == []
    client.is_busy = False
    client.drain()
    assert [sent.value for sent in client.sent] == [b"a", b"b", b"c"]
    assert len({id(sent.batch) for sent in client.sent}) == 1
    client.acknowledge(0)
    assert [(await task).offset for task in tasks] == [0, 1, 2]


async def test_batch_that_is_sent_again_keeps_its_bytes_and_its_place(producer: Producer) -> None:
    first = await appending(producer, b"a")
    client = Client.made[0]
    batch = client.sent[0].batch
    data = bytes(batch.get_data_buffer())
    client.is_busy = True
    client.drain()
    second = await appending(producer, b"b")
    client.queue.reenqueue(batch)
    client.is_busy = False
    client.drain()
    client.drain()
    assert [sent.value for sent in client.sent] == [b"a", b"a", b"b"]
    assert bytes(batch.get_data_buffer()) == data
    client.acknowledge(1)
    client.acknowledge(2)
    assert [(await first).offset, (await second).offset] == [1, 2]


async def test_append_cancelled_before_it_was_sent_is_never_appended(producer: Producer) -> None:
    await producer.ready()
    client = Client.made[0]
    client.is_busy = True
    client.drain()
    task = await appending(producer, b"a")
    client.queue.heard_at += 1  # other partitions are answered
    with pytest.raises(AppendFailed, match="no acknowledgement"):
        await task
    later = await appending(producer, b"b")
    client.is_busy = False
    client.drain()
    client.acknowledge(0)
    assert await later
    assert [sent.value for sent in client.sent] == [b"b"]


async def test_silence_replaces_the_client(producer: Producer) -> None:
    await producer.ready()  # silence counts from then
    task = await appending(producer, b"a")
    with pytest.raises(AppendFailed):
        await task
    await appending(producer, b"b")
    assert len(Client.made) == 2


async def test_one_slow_partition_does_not_replace_the_client(producer: Producer) -> None:
    slow = await appending(producer, b"a")
    for _ in range(4):
        await asyncio.sleep(0.08)
        quick = await appending(producer, b"b", OTHER)
        Client.made[0].acknowledge(len(Client.made[0].sent) - 1)
        await quick
    with pytest.raises(AppendFailed):
        await slow
    await appending(producer, b"c")
    assert len(Client.made) == 1


async def test_unreachable_broker_fails_the_append_at_once(producer: Producer) -> None:
    Client.reachable = False
    with pytest.raises(AppendFailed, match="nobody there"):
        await producer.append(LANE, [entry(b"a")])
    assert Client.made[0].stopped


async def test_missing_rights_are_not_retried(producer: Producer) -> None:
    task = await appending(producer, b"a")
    Client.made[0].fail(0, TopicAuthorizationFailedError("t.ledger"))
    with pytest.raises(AccessDenied, match="refuses"):
        await task


async def test_record_without_a_position_is_not_acknowledged(producer: Producer) -> None:
    task = await appending(producer, b"a")
    Client.made[0].sent[0].batch.done(-1, 1000)
    with pytest.raises(AppendFailed, match="unknown offset"):
        await task


async def test_queue_has_a_bound(producer: Producer) -> None:
    half = bytes(QUEUED_BYTES // 2)
    first = await appending(producer, half)
    with pytest.raises(AppendFailed, match="wait for the broker"):
        await producer.append(OTHER, [entry(half)])
    Client.made[0].acknowledge(0)
    await first
    third = await appending(producer, half, OTHER)
    Client.made[0].acknowledge(1)
    assert await third


async def test_cancelled_appends_leave_room_again(producer: Producer) -> None:
    half = bytes(QUEUED_BYTES // 2)
    task = await appending(producer, half)
    Client.made[0].fail(0, NotEnoughReplicasError())
    with pytest.raises(AppendFailed):
        await task
    again = await appending(producer, half)
    Client.made[1].acknowledge(0)
    assert await again


async def test_close_waits_for_queued_records(producer: Producer) -> None:
    task = await appending(producer, b"a")
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0.01)
    Client.made[0].acknowledge(0)
    await closing
    assert (await task).offset == 0


async def test_close_has_a_deadline(producer: Producer) -> None:
    task = await appending(producer, b"a")
    await producer.close()
    with pytest.raises(LogClosed):
        await task
    assert Client.made[0].stopped


async def test_closed_producer_accepts_no_records(producer: Producer) -> None:
    await producer.close()
    with pytest.raises(LogClosed):
        await producer.append(LANE, [entry(b"a")])


async def test_client_is_idempotent_and_waits_for_all_replicas(producer: Producer) -> None:
    await producer.ready()
    wanted = {"client_id": "test", "acks": "all", "enable_idempotence": True}
    assert wanted.items() <= Client.made[0].options.items()


async def test_record_refused_by_the_broker_for_its_size_is_too_large(producer: Producer) -> None:
    task = await appending(producer, b"a")
    Client.made[0].fail(0, MessageSizeTooLargeError())
    with pytest.raises(RecordTooLarge):
        await task
