"""Transactions of the in-memory broker, with its faults: those of our writers and of clients.

A transaction of an older epoch of its writer's name does nothing. All records are appended at the
commit, so readers never see an unfinished one, and aborted ones take no offsets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import Context

from kvlane.streams.errors import (
    AppendFailed,
    BrokerUnavailable,
    LogClosed,
    OwnershipLost,
    RecordTooLarge,
)
from kvlane.streams.memory.broker_faults import AppendFate
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_connection import MemoryConnection
from kvlane.streams.memory.partition_log import PartitionLog
from kvlane.streams.ports import Entry, TopicEntry
from kvlane.streams.topics import MAX_RECORD_BYTES, partition_of

_NOT_REPORTED = (AppendFate.UNREPORTED, AppendFate.LATE, AppendFate.OVERTAKEN)


class ClientTransaction:
    """A transaction as a client writes it: its records are in the log from their append, and can be
    read from its commit. Used once, by tests and the simulation."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._logs: dict[PartitionLog, None] = {}

    def append(self, topic: str, partition: int, *entries: Entry) -> None:
        log = self._broker.log(topic, partition)
        self._logs[log] = None
        log.append(entries, self._broker.now_ms(log), self)

    def end(self, *, is_committed: bool) -> None:
        for log in self._logs:
            log.end_transaction(self, is_committed=is_committed)


class MemoryTransactionalWriter:
    """Implements `TransactionalWriter`; made by `MemoryLog`."""

    def __init__(self, connection: MemoryConnection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._epoch: int | None = None
        self._in_transit: tuple[Sequence[TopicEntry], int] | None = None
        """A transaction that has not reached the broker, with its epoch."""
        self.is_closed = False

    async def open(self) -> None:
        self._check_open()
        connection = self._connection
        answered = await connection.send_request("append")
        if not connection.broker.available or not answered:
            raise BrokerUnavailable(f"{self._name}: no transactions")
        self._epoch = connection.broker.begin_writer_epoch(self._name)
        await connection.receive_answer("append")
        self._check_open()

    async def write(self, entries: Sequence[TopicEntry]) -> None:
        self._check_open()
        assert self._epoch is not None, "a writer is opened first, and again after an error"
        assert self._in_transit is None, "one task uses a writer"
        for topic, one, _ in entries:
            if len(one.key or b"") + len(one.value or b"") >= MAX_RECORD_BYTES:
                self._epoch = None
                raise RecordTooLarge(f"{topic}: a record of {len(one.value or b'')} bytes")
        connection, epoch = self._connection, self._epoch
        faults, client = connection.broker.faults, connection.client_id
        self._epoch, self._in_transit = None, (entries, epoch)
        try:
            await connection.broker.clock.sleep(faults.latency_s(client, "append"))
            await connection.check_alive()
        finally:
            self._in_transit = None
        first = entries[0]
        fate = faults.fate(client, first.topic, first.partition or 0, len(entries))
        if not connection.broker.available or fate is AppendFate.LOST:
            raise AppendFailed(f"{self._name}: the transaction was aborted")
        if fate in (AppendFate.LATE, AppendFate.OVERTAKEN):
            self._later(entries, epoch)
        elif not self._commit(entries, epoch):
            raise OwnershipLost(f"{self._name}: another writer has taken over")
        await connection.receive_answer("append")
        if fate in _NOT_REPORTED:
            raise AppendFailed(f"{self._name}: the transaction has no known end")
        self._epoch = epoch

    async def close(self) -> None:
        self.is_closed = True

    def kill(self) -> None:
        """The process was killed: a transaction that had left it may be committed later."""
        connection = self._connection
        if self._in_transit is not None and connection.broker.faults.departed(connection.client_id):
            self._later(*self._in_transit)

    def _commit(self, entries: Sequence[TopicEntry], epoch: int) -> bool:
        """Append the entries, unless the epoch is over."""
        broker = self._connection.broker
        if not broker.is_writer_epoch(self._name, epoch):
            return False
        for topic, entry, partition in entries:
            if partition is None:
                assert entry.key is not None, "an entry without a key needs a partition"
                partition = partition_of(entry.key, broker.partitions[topic])  # noqa: PLW2901
            broker.append(topic, partition, (entry,))
        return True

    def _later(self, entries: Sequence[TopicEntry], epoch: int) -> None:
        """Commit after a while, outside of the process, which may be stopped or dead."""
        late_s = self._connection.broker.faults.late_s(self._connection.client_id)
        loop = asyncio.get_running_loop()
        loop.call_later(late_s, self._commit, entries, epoch, context=Context())

    def _check_open(self) -> None:
        self._connection.check_open()
        if self.is_closed:
            raise LogClosed(self._name)
