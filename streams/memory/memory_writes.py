"""Appends and transactions on their way to the in-memory broker, with their faults in transit.

A transaction of an older epoch of its writer's name does nothing. All records are appended at the
commit, so readers never see an unfinished one, and aborted ones take no offsets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any

from kvlane.streams.errors import (
    AppendFailed,
    BrokerUnavailable,
    LogClosed,
    OwnershipLost,
    RecordTooLarge,
)
from kvlane.streams.memory.memory_broker import AppendFate, MemoryConnection
from kvlane.streams.memory.partition_log import PartitionLog
from kvlane.streams.ports import Appended, Entry, TopicEntry
from kvlane.streams.topics import MAX_RECORD_BYTES, partition_of

_UNHEARD = (AppendFate.UNREPORTED, AppendFate.LATE, AppendFate.OVERTAKEN)


class AppendQueue:
    """Appends arrive in the order of sending, except after `AppendFate.OVERTAKEN`."""

    def __init__(self, client: MemoryConnection, log: PartitionLog) -> None:
        self._client = client
        self._log = log
        self._under_way: deque[_Sending] = deque()
        self._queued: deque[_Sending] = deque()
        """Abandoned appends that are still in the producer's queue."""
        self._last: _Sending | None = None

    def append(self, entries: tuple[Entry, ...]) -> Coroutine[Any, Any, Appended]:
        sending = _Sending(entries)
        self._under_way.append(sending)
        return self._deliver(sending)

    async def _deliver(self, sending: _Sending) -> Appended:
        client, broker = self._client, self._client.broker
        if (latency_s := broker.faults.latency_s(client.client_id, "append")) > 0:
            try:
                await broker.clock.sleep(latency_s)
            except asyncio.CancelledError:  # only the caller stops waiting
                _later(broker.faults.late_s(client.client_id), self.arrive, sending)
                raise
        self.arrive(sending)
        await broker.clock.sleep(broker.faults.answer_s(client.client_id, "append"))
        if client.is_killed:
            await client.check_alive()
        if sending.fate is AppendFate.TWICE and self._last is sending:
            broker.append(*self._log.name, sending.entries)
        if sending.appended is None or sending.fate in _UNHEARD:
            topic, partition = self._log.name
            raise AppendFailed(f"{topic}[{partition}]: no acknowledgement")
        return sending.appended

    def arrive(self, last: _Sending) -> None:
        client = self._client
        while not last.landed:
            sending = self._under_way.popleft()
            sending.landed = True
            if not client.is_killed:
                self._arrive(sending)

    def flush(self) -> None:
        if self._under_way:
            self.arrive(self._under_way[-1])

    def kill(self) -> None:
        """The process was killed: appends that had left it arrive, others are lost."""
        name, faults = self._client.client_id, self._client.broker.faults
        departed = True
        for sending in self._under_way:
            sending.landed = True
            if departed := departed and faults.departed(name):
                self._queued.append(sending)
                _later(faults.late_s(name), self._catch_up, sending)
        self._under_way.clear()

    def _arrive(self, sending: _Sending) -> None:
        client, broker = self._client, self._client.broker
        sending.fate = broker.faults.fate(client.client_id, *self._log.name, len(sending.entries))
        if sending.fate is AppendFate.LOST or not broker.available:
            return
        if sending.fate in (AppendFate.LATE, AppendFate.OVERTAKEN):
            late_s = broker.faults.late_s(client.client_id)
            if sending.fate is AppendFate.LATE:
                self._queued.append(sending)
                _later(late_s, self._catch_up, sending)
            else:
                _later(late_s, broker.append, *self._log.name, sending.entries)
            return
        if self._queued:
            self._catch_up(self._queued[-1])
        sending.appended = broker.append(*self._log.name, sending.entries)
        self._last = sending

    def _catch_up(self, last: _Sending) -> None:
        """Abandoned appends up to `last` arrive, unless they have."""
        while last in self._queued:
            self._client.broker.append(*self._log.name, self._queued.popleft().entries)


def _later(late_s: float, do: Callable[..., object], *arguments: object) -> None:
    """Outside of the sending process, which may be stopped or dead."""
    if late_s <= 0:
        do(*arguments)
    else:
        asyncio.get_running_loop().call_later(late_s, do, *arguments, context=Context())


class _Sending:
    __slots__ = ("appended", "entries", "fate", "landed")

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self.landed = False
        self.fate = AppendFate.KEPT
        self.appended: Appended | None = None


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
            self._commit_later(entries, epoch)
        elif not self._commit(entries, epoch):
            raise OwnershipLost(f"{self._name}: another writer has taken over")
        await connection.receive_answer("append")
        if fate in _UNHEARD:
            raise AppendFailed(f"{self._name}: the transaction has no known end")
        self._epoch = epoch

    async def close(self) -> None:
        self.is_closed = True

    def kill(self) -> None:
        """The process was killed: a transaction that had left it may be committed later."""
        connection = self._connection
        if self._in_transit is not None and connection.broker.faults.departed(connection.client_id):
            self._commit_later(*self._in_transit)

    def _commit(self, entries: Sequence[TopicEntry], epoch: int) -> bool:
        broker = self._connection.broker
        if not broker.is_writer_epoch(self._name, epoch):
            return False
        for topic, entry, partition in entries:
            if partition is None:
                assert entry.key is not None, "an entry without a key needs a partition"
                partition = partition_of(entry.key, broker.partitions[topic])  # noqa: PLW2901
            broker.append(topic, partition, (entry,))
        return True

    def _commit_later(self, entries: Sequence[TopicEntry], epoch: int) -> None:
        late_s = self._connection.broker.faults.late_s(self._connection.client_id)
        _later(late_s, self._commit, entries, epoch)

    def _check_open(self) -> None:
        self._connection.check_open()
        if self.is_closed:
            raise LogClosed(self._name)
