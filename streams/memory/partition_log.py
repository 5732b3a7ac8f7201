"""One partition of the in-memory broker, and the cursors that read it."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice, takewhile
from operator import attrgetter
from typing import NamedTuple

from kvlane.streams.ports import Entry, Headers, Partition

_offset = attrgetter("offset")


class MemoryRecord(NamedTuple):
    """One record as it was read; the attribute names are those of the Kafka client's record."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class WakeUp:
    """Wakes one waiting task; a ring before the wait is not lost."""

    def __init__(self) -> None:
        self._rung = False
        self._waiting: asyncio.Future[None] | None = None

    def notify(self) -> None:
        self._rung = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self, seconds: float) -> None:
        assert self._waiting is None, "one poll at a time"
        if not self._rung and seconds > 0:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(seconds, self.notify)
            try:
                await self._waiting
            finally:
                timer.cancel()
                self._waiting = None
        self._rung = False


class Cursor:
    """Positions in some partitions; `ready`: those with unread records."""

    def __init__(self) -> None:
        self.wake_up = WakeUp()
        self.positions: dict[Partition, int] = {}
        self.ready: dict[PartitionLog, None] = {}
        self._logs: dict[Partition, PartitionLog] = {}

    def add(self, log: PartitionLog, position: int) -> None:
        self.positions[log.name] = position
        self._logs[log.name] = log
        log.followers[self] = None
        self.ready[log] = None
        self.wake_up.notify()

    def remove(self, partition: Partition) -> None:
        if (log := self._logs.pop(partition, None)) is not None:
            del self.positions[partition]
            self.ready.pop(log, None)
            log.followers.pop(self, None)

    def clear(self) -> None:
        for name in list(self._logs):
            self.remove(name)

    def on_append(self, log: PartitionLog) -> None:
        self.ready[log] = None
        self.wake_up.notify()

    def read(self, max_records: int) -> dict[Partition, Sequence[MemoryRecord]]:
        """The next records of the ready partitions, in turns. No position is below the start of its
        log."""
        taken: dict[Partition, Sequence[MemoryRecord]] = {}
        for log in list(self.ready):
            if max_records <= 0:
                break
            del self.ready[log]
            records = log.read(self.positions[log.name], max_records)
            if not records:  # the rest was compacted away, or aborted
                self.positions[log.name] = max(self.positions[log.name], log.stable_end)
                continue
            taken[log.name] = records
            max_records -= len(records)
            position = self.positions[log.name] = records[-1].offset + 1
            if position < log.stable_end:
                self.ready[log] = None
        return taken


class PartitionLog:
    """Records in offset order. After compaction offsets have gaps; `end` never goes back."""

    def __init__(self, partition: Partition) -> None:
        self.name = partition
        self.records: list[MemoryRecord] = []
        self.start = 0
        self.end = 0
        self.followers: dict[Cursor, None] = {}
        self._open: dict[object, int] = {}  # first offset of each transaction that is not over
        self._in_transactions: dict[int, object] = {}  # offsets of records that may be invisible
        self.compacted_size = (
            0  # records after the last compaction: with many of them the next one pays
        )

    @property
    def stable_end(self) -> int:
        return min(self._open.values(), default=self.end)

    def append(
        self, entries: Sequence[Entry], timestamp_ms: int, transaction: object | None = None
    ) -> int:
        first = self.end
        if transaction is not None:
            self._open.setdefault(transaction, first)
            offsets = range(first, first + len(entries))
            self._in_transactions |= dict.fromkeys(offsets, transaction)
        topic, partition = self.name
        for key, value, headers in entries:
            self.records.append(
                MemoryRecord(topic, partition, self.end, timestamp_ms, key, value, headers)
            )
            self.end += 1
        for follower in list(self.followers):
            follower.on_append(self)
        return first

    def end_transaction(self, transaction: object, *, is_committed: bool) -> None:
        """Show its records, or never; the marker takes an offset."""
        if self._open.pop(transaction, None) is None:
            return
        self.end += 1
        if is_committed:
            left = {o: t for o, t in self._in_transactions.items() if t is not transaction}
            self._in_transactions = left
        for follower in list(self.followers):
            follower.on_append(self)

    def read(self, position: int, limit: int) -> list[MemoryRecord]:
        """Up to `limit` records from a position on, of transactions that were committed."""
        i = self._index(position)
        if not self._in_transactions:
            return self.records[i : i + limit]
        end = self.stable_end
        visible = (r for r in self.records[i:] if r.offset not in self._in_transactions)
        return list(islice(takewhile(lambda record: record.offset < end, visible), limit))

    def offset_at(self, timestamp_ms: int) -> int:
        """First offset at or after a time; else the end. Linear: a new leader's times may go
        back."""
        return next((r.offset for r in self.records if r.timestamp >= timestamp_ms), self.end)

    def delete_before(self, offset: int) -> None:
        offset = min(offset, self.end)
        if offset <= self.start:
            return
        del self.records[: self._index(offset)]
        self.start = offset
        for follower in self.followers:
            if follower.positions[self.name] < offset:  # its next poll reports the loss
                follower.on_append(self)

    def delete_older(self, timestamp_ms: int) -> None:
        if self.records and self.records[0].timestamp < timestamp_ms:
            self.delete_before(self.offset_at(timestamp_ms))

    def compact(self, before_ms: int, tombstones_before_ms: int) -> None:
        """Of the records before `before_ms`, keep the last one of each key; tombstones before
        `tombstones_before_ms` go too, if all readers have them: a broker keeps them for a day. The
        newest record stays, like an active segment."""
        last = {r.key: r.offset for r in self.records if r.timestamp < before_ms}
        unread = min((each.positions[self.name] for each in self.followers), default=self.end)
        newest = self.end - 1
        self.records = [
            r
            for r in self.records
            if r.offset == newest
            or r.timestamp >= before_ms
            or (
                last[r.key] == r.offset
                and (
                    r.value is not None or r.timestamp >= tombstones_before_ms or r.offset >= unread
                )
            )
        ]
        self.compacted_size = len(self.records)

    def _index(self, offset: int) -> int:
        if not self.records:
            return 0
        first = self.records[0].offset
        if self.records[-1].offset - first == len(self.records) - 1:  # no gaps
            return min(max(offset - first, 0), len(self.records))
        return bisect_left(self.records, offset, key=_offset)
