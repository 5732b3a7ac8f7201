"""Tests of the errors of a transactional writer, with a client whose transaction fails at chosen
points."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import (
    IllegalOperation,
    InvalidTxnState,
    KafkaError,
    ProducerFenced,
    TopicAuthorizationFailedError,
)
from aiokafka.producer.transaction_manager import TransactionManager

from kvlane.streams.errors import (
    AccessDenied,
    AppendFailed,
    BrokerUnavailable,
    OwnershipLost,
    StreamError,
)
from kvlane.streams.kafka import kafka_transactions
from kvlane.streams.kafka.kafka_transactions import KafkaTransactionalWriter
from kvlane.streams.ports import Entry, TopicEntry

RECORD = Entry(b"k", b"v")
ENTRIES = [TopicEntry("results", RECORD, 0), TopicEntry("results", RECORD, 1)]


class Client:
    """Stands for AIOKafkaProducer. `on_send` is called before each record."""

    def __init__(self, on_send: Callable[[Client], None]) -> None:
        self._txn_manager = TransactionManager("w", 1000)
        self._txn_manager.set_pid_and_epoch(7, 0)
        self._sender = SimpleNamespace(sender_task=None)
        self._closed = False
        self._on_send = on_send
        self.client = SimpleNamespace(close=self._close)
        self.sent: list[asyncio.Future[None]] = []
        self.topics: list[str] = []

    async def _close(self) -> None:
        self._closed = True

    async def begin_transaction(self) -> None:
        self._txn_manager.begin_transaction()

    async def send(self, topic: str, *_: Any, **__: Any) -> asyncio.Future[None]:
        self._on_send(self)
        if not self._txn_manager.is_in_transaction():
            raise IllegalOperation("not in a transaction")
        self.topics.append(topic)
        self.sent.append(asyncio.get_running_loop().create_future())
        return self.sent[-1]

    async def commit_transaction(self) -> None:
        self._txn_manager.committing_transaction()
        self._txn_manager.complete_transaction()

    def end(self, error: KafkaError) -> None:
        """The transaction ends with an error, and the records with one that follows from it."""
        for future in self.sent:
            future.set_exception(InvalidTxnState())
        self._txn_manager.error_transaction(error)


class Session:
    options: Mapping[str, Any] = MappingProxyType({})
    prefix = "d."
    request_timeout_s = 0.1
    partitions_error: Exception | None = None

    async def partitions(self, topic: str) -> int:
        if self.partitions_error is not None:
            raise self.partitions_error
        return 4

    def forget(self, user: Any) -> None: ...


async def opened(
    monkeypatch: pytest.MonkeyPatch, on_send: Callable[[Client], None]
) -> tuple[KafkaTransactionalWriter, Client]:
    client = Client(on_send)

    async def start(*_: Any) -> None: ...

    monkeypatch.setattr(kafka_transactions, "AIOKafkaProducer", lambda **_: client)
    monkeypatch.setattr(kafka_transactions, "start_client", start)
    writer = KafkaTransactionalWriter(Session(), "w")
    await writer.open()
    return writer, client


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (TopicAuthorizationFailedError({"replies"}), AccessDenied),
        (ProducerFenced(), OwnershipLost),
        (KafkaError("away"), AppendFailed),
    ],
)
@pytest.mark.parametrize("before", [1, 2])
async def test_error_of_the_transaction_is_raised_whichever_call_fails(
    monkeypatch: pytest.MonkeyPatch, error: KafkaError, raised: type[StreamError], before: int
) -> None:
    """`before`: the number of records before the error."""

    def fail(client: Client) -> None:
        if before == 1 and len(client.sent) == 1:
            client.end(error)
        elif before == 2 and len(client.sent) == 1:
            asyncio.get_running_loop().call_soon(client.end, error)

    writer, _ = await opened(monkeypatch, fail)
    with pytest.raises(raised):
        await writer.write(ENTRIES)
    await writer.close()


async def test_no_error_of_a_record_is_left_to_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    writer, client = await opened(
        monkeypatch, lambda client: client.end(KafkaError("away")) if client.sent else None
    )
    with pytest.raises(AppendFailed):
        await writer.write(ENTRIES)
    await writer.close()
    client.sent.clear()
    del client
    del writer
    await asyncio.sleep(0)
    gc.collect()
    assert reported == []


async def test_entry_without_key_and_partition_is_an_error_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer, client = await opened(monkeypatch, lambda _: None)
    with pytest.raises(AssertionError, match="needs a partition"):
        await writer.write([TopicEntry("results", Entry(None, b"v"))])
    assert client.topics == []
    await writer.close()


async def test_topic_that_cannot_be_looked_up_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = await opened(monkeypatch, lambda _: None)
    monkeypatch.setattr(Session, "partitions_error", BrokerUnavailable("away"))
    with pytest.raises(AppendFailed):
        await writer.write([TopicEntry("results", RECORD)])
    await writer.close()
