"""Transactions on Kafka: one transactional producer per writer, replaced after each failure. Its
successor completes or aborts the open transaction, and fences it. No consumer offsets take part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    IllegalOperation,
    InvalidProducerEpoch,
    KafkaError,
    ProducerFenced,
    TransactionalIdAuthorizationFailed,
)

from kvlane.streams.errors import (
    AppendFailed,
    BrokerUnavailable,
    LogClosed,
    OwnershipLost,
    RecordTooLarge,
)
from kvlane.streams.kafka.aiokafka_client import REFUSAL_ERRORS, start_client, to_access_denied
from kvlane.streams.kafka.client_patches.client_parts import client_parts
from kvlane.streams.kafka.connection_options import KafkaSession
from kvlane.streams.kafka.producer import OVERSIZE, end_unflushed
from kvlane.streams.ports import TopicEntry
from kvlane.streams.topics import MAX_RECORD_BYTES, partition_of

_BATCH_BYTES = 1024 * 1024
_FENCED = (ProducerFenced, InvalidProducerEpoch)
_CLIENT_ERRORS = (KafkaError, IllegalOperation, AssertionError)
"""The last two: answers to calls after a transaction has failed (`_write`)."""
_REFUSALS = (*REFUSAL_ERRORS, TransactionalIdAuthorizationFailed)


class KafkaTransactionalWriter:
    """Implements `TransactionalWriter`; made by `KafkaLog`. One task uses it."""

    def __init__(self, kafka: KafkaSession, name: str) -> None:
        self._kafka = kafka
        self._id = kafka.prefix + name
        self._timeout_s = 3 * kafka.request_timeout_s
        """Of one transaction: as long as any append waits (`streams/kafka/producer.py`)."""
        self._starting: asyncio.Task[AIOKafkaProducer] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> None:
        """Besides the port's errors: AccessDenied, LogClosed."""
        self._check_open()
        self._drop()
        self._starting = starting = asyncio.create_task(self._start())
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(starting)
        except (KafkaError, TimeoutError) as e:
            self._drop()
            if isinstance(e, _REFUSALS):
                raise to_access_denied(e, self._id) from e
            raise BrokerUnavailable(f"{self._id}: no transactions: {e!r}") from e
        self._check_open()

    async def write(self, entries: Sequence[TopicEntry]) -> None:
        """Besides the port's errors: AccessDenied, TopicMismatch, LogClosed."""
        self._check_open()
        assert self._starting is not None, "a writer is opened first, and again after an error"
        producer = self._starting.result()
        records = [await self._addressed(entry) for entry in entries]
        is_whole = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await _write(producer, records)
            is_whole = True
        except OVERSIZE as e:
            raise RecordTooLarge(f"{self._id}: {e}") from e
        except _FENCED as e:
            raise OwnershipLost(f"{self._id}: another writer has taken over") from e
        except (*_CLIENT_ERRORS, TimeoutError) as e:
            if isinstance(e, _REFUSALS):
                raise to_access_denied(e, self._id) from e
            raise AppendFailed(f"{self._id}: the transaction has no known end: {e!r}") from e
        finally:
            if not is_whole:
                self._drop()

    async def close(self) -> None:
        self._closed = True
        self._kafka.forget(self)
        self._drop()
        if self._ending:
            await asyncio.wait(self._ending)

    async def _start(self) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            **self._kafka.options,
            acks="all",
            transactional_id=self._id,
            transaction_timeout_ms=int(1000 * self._timeout_s),
            max_batch_size=_BATCH_BYTES,
            max_request_size=MAX_RECORD_BYTES,
        )
        await start_client(producer, self._kafka.options)
        return producer

    async def _addressed(self, entry: TopicEntry) -> TopicEntry:
        """An entry with the whole name of its topic, and a partition."""
        topic, record, partition = entry
        if partition is None:
            assert record.key is not None, "an entry without a key needs a partition"
            try:
                count = await self._kafka.partitions(topic)
            except BrokerUnavailable as e:
                raise AppendFailed(f"{self._id}: nothing was written: {e}") from e
            partition = partition_of(record.key, count)
        return TopicEntry(self._kafka.prefix + topic, record, partition)

    def _drop(self) -> None:
        if self._starting is None:
            return
        task = asyncio.create_task(end_unflushed(self._starting, self._kafka.request_timeout_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._starting = None

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed("the writer was closed")


async def _write(producer: AIOKafkaProducer, records: Sequence[TopicEntry]) -> None:
    """Write a transaction. Raises the error that ended it, whichever call fails later."""
    sent: list[asyncio.Future[Any]] = []
    try:
        await producer.begin_transaction()
        for topic, entry, partition in records:
            headers = list(entry.headers)
            sent.append(
                await producer.send(topic, entry.value, entry.key, partition, headers=headers)
            )
        await asyncio.gather(*sent)
        await producer.commit_transaction()
    except _CLIENT_ERRORS as e:
        cause = client_parts().transaction_error(producer)
        if cause is None or cause is e:
            raise
        raise cause from e
    finally:
        for future in sent:  # a future that is not awaited is logged as an error
            future.add_done_callback(_retrieve)


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
