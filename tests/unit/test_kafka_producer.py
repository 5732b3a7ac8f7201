"""What the producer does when deliveries fail, with a client that is answered by hand."""

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
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NotEnoughReplicasError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from streams.errors import AccessDenied, AppendFailed, LogClosed, RecordTooLarge
from streams.kafka import producer as kafka_producer
from streams.kafka.producer import MAX_QUEUED_BYTES, Producer
from streams.ports import Appended, Entry

LANE, OTHER = TopicPartition("t.ledger", 0), TopicPartition("t.ledger", 1)


class Sent(NamedTuple):
    to: TopicPartition
    value: bytes
    answer: asyncio.Future[Any]


class Client:
    """Stands for AIOKafkaProducer; the test answers what it was given."""

    made: list[Client]
    reachable: bool

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.sent: list[Sent] = []
        self.stopped = False
        self.full = False
        self.given = asyncio.Event()
        self.raises: list[Exception] = []
        self.known: set[int] = {LANE.partition, OTHER.partition}
        cluster = SimpleNamespace(
            partitions_for_topic=lambda _: self.known,
            leader_for_partition=lambda tp: 1 if tp.partition in self.known else None,
        )
        self.client = SimpleNamespace(
            close=self._close, cluster=cluster, force_metadata_update=self._learn
        )
        self._sender = SimpleNamespace(sender_task=None)
        Client.made.append(self)

    async def start(self) -> None:
        if not Client.reachable:
            raise KafkaConnectionError("nobody there")

    async def stop(self) -> None:
        self.stopped = True

    async def _close(self) -> None:
        self.stopped = True

    def _learn(self) -> None:
        self.known = {LANE.partition, OTHER.partition}

    async def flush(self) -> None:
        if waiting := [sent.answer for sent in self.sent if not sent.answer.done()]:
            await asyncio.wait(waiting)

    async def send(
        self, topic: str, value: bytes, key: bytes, partition: int, headers: Any
    ) -> asyncio.Future[Any]:
        if self.full:
            self.full = False
            raise KafkaTimeoutError
        if self.raises:
            raise self.raises.pop(0)
        assert partition in self.known, "Unrecognized partition"
        answer = asyncio.get_running_loop().create_future()
        self.given.set()
        self.sent.append(Sent(TopicPartition(topic, partition), value, answer))
        return answer

    def acknowledge(self, number: int) -> None:
        to, _, answer = self.sent[number]
        answer.set_result(SimpleNamespace(partition=to.partition, offset=number, timestamp=1000))

    def fail(self, number: int, error: KafkaError) -> None:
        self.sent[number].answer.set_exception(error)


@pytest.fixture
async def producer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Producer]:
    Client.made, Client.reachable = [], True
    monkeypatch.setattr(kafka_producer, "AIOKafkaProducer", Client)
    made = Producer({"client_id": "test"}, request_timeout_s=0.1)
    yield made
    await made.close()


def entry(value: bytes) -> Entry:
    return Entry(b"key", value)


async def appending(
    producer: Producer, value: bytes, to: TopicPartition = LANE
) -> asyncio.Task[Appended]:
    """An append that has reached the client, or has failed before."""
    task = asyncio.create_task(producer.append(to, entry(value)))
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def test_acknowledgement_says_where_the_record_stands(producer: Producer) -> None:
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


async def test_append_waits_for_room_in_the_client(producer: Producer) -> None:
    await producer.ready()
    Client.made[0].full = True
    task = await appending(producer, b"a")
    Client.made[0].acknowledge(0)
    assert (await task).offset == 0
    assert not Client.made[0].full


async def test_append_waits_until_the_client_has_heard_of_the_topic(producer: Producer) -> None:
    await producer.ready()
    Client.made[0].raises = [UnknownTopicOrPartitionError()] * 2
    task = asyncio.create_task(producer.append(LANE, entry(b"a")))
    await asyncio.wait_for(Client.made[0].given.wait(), 5)
    Client.made[0].acknowledge(0)
    assert (await task).offset == 0


async def test_topic_that_the_client_never_hears_of_may_be_tried_again(producer: Producer) -> None:
    await producer.ready()
    Client.made[0].raises = [UnknownTopicOrPartitionError()] * 1000
    with pytest.raises(AppendFailed, match=r"ledger\[0\]"):
        await producer.append(LANE, entry(b"a"))


async def test_append_waits_until_the_client_has_heard_of_the_partition(
    producer: Producer,
) -> None:
    await producer.ready()
    Client.made[0].known = {LANE.partition}
    task = asyncio.create_task(producer.append(OTHER, entry(b"a")))
    await asyncio.wait_for(Client.made[0].given.wait(), 5)
    Client.made[0].acknowledge(0)
    assert await task


async def test_a_broken_promise_of_ours_is_not_an_outage(producer: Producer) -> None:
    await producer.ready()
    Client.made[0].raises = [AssertionError("Need at least one: key or value")]
    with pytest.raises(AssertionError):
        await producer.append(LANE, entry(b"a"))


async def test_append_that_waits_for_room_is_not_overtaken(producer: Producer) -> None:
    await producer.ready()
    Client.made[0].raises = [KafkaTimeoutError()] * 2
    tasks = [await appending(producer, b"a"), await appending(producer, b"b")]
    await asyncio.wait_for(Client.made[0].given.wait(), 5)
    for _ in range(10):
        await asyncio.sleep(0)
    assert [sent.value for sent in Client.made[0].sent] == [b"a", b"b"]
    for number, task in enumerate(tasks):
        Client.made[0].acknowledge(number)
        assert (await task).offset == number


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
        await producer.append(LANE, entry(b"a"))
    assert Client.made[0].stopped


async def test_missing_rights_are_not_worth_a_repeat(producer: Producer) -> None:
    task = await appending(producer, b"a")
    Client.made[0].fail(0, TopicAuthorizationFailedError("t.ledger"))
    with pytest.raises(AccessDenied, match="refuses"):
        await task


async def test_record_without_a_known_place_is_not_acknowledged(producer: Producer) -> None:
    task = await appending(producer, b"a")
    Client.made[0].sent[0].answer.set_result(
        SimpleNamespace(partition=0, offset=-1, timestamp=1000)
    )
    with pytest.raises(AppendFailed, match="unknown offset"):
        await task


async def test_queue_has_a_bound(producer: Producer) -> None:
    half = bytes(MAX_QUEUED_BYTES // 2)
    first = await appending(producer, half)
    with pytest.raises(AppendFailed, match="wait for the broker"):
        await producer.append(OTHER, entry(half))
    Client.made[0].acknowledge(0)
    await first
    third = await appending(producer, half, OTHER)
    Client.made[0].acknowledge(1)
    assert await third


async def test_given_up_appends_leave_room_again(producer: Producer) -> None:
    half = bytes(MAX_QUEUED_BYTES // 2)
    task = await appending(producer, half)
    Client.made[0].fail(0, NotEnoughReplicasError())
    with pytest.raises(AppendFailed):
        await task
    again = await appending(producer, half)
    Client.made[1].acknowledge(0)
    assert await again


async def test_close_waits_for_what_is_queued(producer: Producer) -> None:
    task = await appending(producer, b"a")
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0.01)
    Client.made[0].acknowledge(0)
    await closing
    assert (await task).offset == 0


async def test_close_does_not_wait_for_ever(producer: Producer) -> None:
    task = await appending(producer, b"a")
    await producer.close()
    with pytest.raises(LogClosed):
        await task
    assert Client.made[0].stopped


async def test_closed_producer_takes_nothing(producer: Producer) -> None:
    await producer.close()
    with pytest.raises(LogClosed):
        await producer.append(LANE, entry(b"a"))


async def test_client_is_idempotent_and_waits_for_all_replicas(producer: Producer) -> None:
    await producer.ready()
    wanted = {"client_id": "test", "acks": "all", "enable_idempotence": True, "linger_ms": 0}
    assert wanted.items() <= Client.made[0].options.items()


async def test_record_refused_by_the_broker_for_its_size_is_too_large(producer: Producer) -> None:
    task = await appending(producer, b"a")
    Client.made[0].fail(0, MessageSizeTooLargeError())
    with pytest.raises(RecordTooLarge):
        await task
