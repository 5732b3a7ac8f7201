"""The sender of replies: copies of results, in topics of clients.

A reply is sent after its result is in the log. Each partition has a queue and a task, all queues
together are bounded; after `MAX_FAILURES` of its partition a reply is left out, counted and logged,
and until then its request holds the group's position. After an attempt that may have succeeded, the
partition is searched. It is there twice if the broker appends it later than its producer waits, or
if the partition may not be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

from kvlane.app.metrics.collector_metrics import CollectorMetrics
from kvlane.app.results.lane_results import WrittenResult
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import CLOCK_SKEW_MS, Clock
from kvlane.streams.errors import (
    AccessDenied,
    AppendFailed,
    BrokerUnavailable,
    PositionLost,
    RecordTooLarge,
    TopicMismatch,
)
from kvlane.streams.ports import Entry, Log, Partition
from kvlane.streams.reading.group_consumer import PartitionClaim
from kvlane.streams.reading.range_reader import read_range, record_at
from kvlane.streams.request import ReplyAddress
from kvlane.streams.topics import partition_of

log = logging.getLogger(__name__)

MAX_FAILURES = 6
"""Of appends in a row while the broker answers this process: one and a half minutes."""
MAX_WAITING = 10_000
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Bounds of all waiting replies; beyond them the partition that waits longest loses its own."""
MAX_BATCH = 100
MAX_BATCH_BYTES = 512 * 1024
"""Bounds of one append. A larger reply is appended alone."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 16.0
SEARCH_TIMEOUT_S = 20.0
QUIET_S = 600.0
"""A topic that takes no replies is logged once in this time."""
REPLY_TYPE = ("content-type", b"application/json")


class DueReply:
    """One reply. `offset`: of its request; `written_ms`: broker time of its result. Its record is
    `entry`, or is read from the place of a result that was found in the log."""

    __slots__ = (
        "address", "claim", "entry", "failures", "id", "is_doubtful", "offset", "queue", "sent_at",
        "source", "written_ms",
    )  # fmt: skip

    def __init__(
        self,
        claim: PartitionClaim,
        offset: int,
        request_id: str,
        address: ReplyAddress,
        written_ms: int,
        entry: Entry | None = None,
        source: WrittenResult | None = None,
    ) -> None:
        self.claim = claim
        self.offset = offset
        self.id = request_id
        self.address = address
        self.written_ms = written_ms
        self.entry = None if entry is None else self._record(entry)
        self.source = source
        self.is_doubtful = entry is None
        """Its topic may have it already."""
        self.failures = 0
        self.sent_at = 0.0
        self.queue: _Queue | None = None

    @property
    def size(self) -> int:
        return 0 if self.entry is None else len(self.entry.value or b"")

    async def record(self, log: Log, clock: Clock) -> Entry | None:
        """Its record; None if the result is no longer in the log. Raises as `record_at`."""
        if self.entry is not None:
            return self.entry
        written = self.source
        assert written is not None, "a reply has a record or a result"
        assert written.place is not None, "the result was found"
        record = await record_at(log, clock, written.place, written.offset)
        if record is None or record.key != self.id.encode():
            return None
        return self._record(Entry(record.key, record.value, tuple(record.headers)))

    def _record(self, entry: Entry) -> Entry:
        headers = (*entry.headers, REPLY_TYPE, *self.address.headers)
        return Entry(entry.key, entry.value, headers)


_Queue = dict[DueReply, None]


class ReplySender:
    """The replies of all lanes of a process. `run` must be running."""

    def __init__(
        self, log: Log, ctx: ProcessContext, metrics: CollectorMetrics, append_timeout_s: float
    ) -> None:
        """`append_timeout_s`: the longest time that an append of another process is under way."""
        self._log = log
        self._ctx = ctx
        self._metrics = metrics
        self._append_timeout_s = append_timeout_s
        self._delayed: _Queue = {}
        """Those of a former owner of their lane, while its appends may be under way."""
        self._unplaced: _Queue = {}
        self._has_unplaced = asyncio.Event()
        self._queues: dict[Partition, _Queue] = {}
        self._suspects: set[Partition] = set()
        """Partitions whose last append has failed, on a connection of their own: it ends all
        others."""
        self._connections: dict[bool, Log] = {}
        self._started: set[bool] = set()
        self._starting = asyncio.Lock()
        self._waiting = 0
        self._waiting_bytes = 0
        self._quiet_until: dict[str, float] = {}

    def send(self, reply: DueReply) -> None:
        """Send a reply, and mark its request as done. Never waits."""
        delay_s = self._append_timeout_s if reply.is_doubtful else 0.0
        reply.sent_at = self._ctx.clock.now() + delay_s
        self._waiting += 1
        self._waiting_bytes += reply.size
        if delay_s:
            self._move(reply, self._delayed)
            asyncio.get_running_loop().call_later(delay_s, self._admit, reply)
        else:
            self._move(reply, self._unplaced)
            self._has_unplaced.set()
        while self._waiting > MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            queues = (*self._queues.values(), self._unplaced, self._delayed)
            oldest = min((next(iter(q)) for q in queues if q), key=lambda each: each.sent_at)
            self._leave_out(oldest, "failed", "too many of them wait")

    async def run(self) -> None:
        """Pass replies on to their partitions, until cancelled."""
        while True:
            await self._has_unplaced.wait()
            self._has_unplaced.clear()
            topics = {reply.address.topic for reply in self._unplaced}
            try:
                counts = await self._log.foreign_partitions(topics)
            except (BrokerUnavailable, TimeoutError) as e:
                log.warning("replies wait: %s", e)
                await self._ctx.clock.sleep(FIRST_RETRY_S)
                self._has_unplaced.set()
                continue
            for reply in [r for r in self._unplaced if r.address.topic in counts]:
                self._place(reply, counts[reply.address.topic])

    def _admit(self, reply: DueReply) -> None:
        if reply.queue is self._delayed:
            self._move(reply, self._unplaced)
            self._has_unplaced.set()

    def _place(self, reply: DueReply, count: int) -> None:
        topic, partition = reply.address.topic, reply.address.partition
        if not 0 <= (partition or 0) < count:
            self._leave_out(reply, "no_topic", f"it has {count} partitions")
            return
        if partition is None:
            partition = partition_of(reply.id.encode(), count)
        place = Partition(topic, partition)
        if place not in self._queues:
            self._queues[place] = {}
            self._ctx.spawn(f"replies to {topic}[{partition}]", self._deliver(place))
        self._move(reply, self._queues[place])

    async def _deliver(self, partition: Partition) -> None:
        """Send the replies of a partition; ends when there are no more."""
        queue, retry_s, limit = self._queues[partition], FIRST_RETRY_S, MAX_BATCH
        while queue:
            batch = _next(queue, limit)
            try:
                await self._deliver_batch(partition, batch)
                retry_s, limit = FIRST_RETRY_S, MAX_BATCH
            except RecordTooLarge as e:
                limit = 1
                if len(batch) == 1:
                    self._leave_out(batch[0], "too_large", str(e))
            except (AccessDenied, TopicMismatch) as e:
                for reply in batch:
                    self._leave_out(reply, "failed", str(e))
            except (AppendFailed, BrokerUnavailable, PositionLost, TimeoutError) as e:
                log.info("replies to %s[%d] are sent again: %s", *partition, e)
                self._suspects.add(partition)
                self._count_failure(queue, str(e))
                await self._ctx.clock.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        del self._queues[partition]

    def _count_failure(self, queue: _Queue, cause: str) -> None:
        """The partition has taken no records. Each reply is left out after MAX_FAILURES."""
        if not self._ctx.broker_answers:
            return
        for reply in list(queue):
            reply.failures += 1
            if reply.failures >= MAX_FAILURES:
                self._leave_out(reply, "failed", f"it takes no records: {cause}")

    async def _deliver_batch(self, partition: Partition, batch: Sequence[DueReply]) -> None:
        connection = await self._connection(is_suspect=partition in self._suspects)
        if doubtful := [reply for reply in batch if reply.is_doubtful]:
            await self._search(connection, partition, doubtful)
        records = await self._records(batch)
        # Without an await until the append: another process may own a lane of them by now.
        for reply in batch:
            if reply.claim.is_lost:
                self._move(reply, None)
        entries = {r: record for r, record in records.items() if r.queue is not None}
        if not entries:
            return
        for reply in entries:
            reply.is_doubtful = True
        try:
            await connection.append_batch(
                partition.topic, partition.partition, list(entries.values())
            )
        except RecordTooLarge:
            for reply in entries:
                reply.is_doubtful = False
            raise
        self._suspects.discard(partition)
        for reply in entries:
            self._finish(reply)

    async def _records(self, batch: Sequence[DueReply]) -> dict[DueReply, Entry]:
        """The records of those that are still to be sent."""
        records: dict[DueReply, Entry] = {}
        for reply in batch:
            if reply.queue is None:
                continue
            record = await reply.record(self._log, self._ctx.clock)
            if record is None:
                self._leave_out(reply, "failed", "a result is no longer in the log")
            else:
                records[reply] = record
        return records

    async def _search(self, log: Log, partition: Partition, replies: Sequence[DueReply]) -> None:
        """Finish those that are in the partition; no doubt is left about the others."""
        topic, number = partition
        since_ms = max(0, min(reply.written_ms for reply in replies) - CLOCK_SKEW_MS)
        keys = {reply.id.encode() for reply in replies}
        found: set[bytes | None] = set()
        try:
            start = await log.offset_at(topic, number, since_ms)
            end = (await log.end_offsets(topic, [number]))[number]
            pieces = read_range(
                log, self._ctx.clock, {partition: start}, {partition: end},
                timeout_s=SEARCH_TIMEOUT_S, keys=keys,
            )  # fmt: skip
            async with aclosing(pieces):
                async for piece in pieces:
                    found |= {record.key for record in piece.records}
        except AccessDenied as e:
            self._warn(topic, f"replies to {topic} may be there twice: {e}")
        for reply in replies:
            reply.is_doubtful = False
            if reply.id.encode() in found:
                self._finish(reply)

    async def _connection(self, *, is_suspect: bool) -> Log:
        """The one to partitions that take records, or to those whose last append has failed."""
        async with self._starting:
            if is_suspect not in self._connections:
                self._connections[is_suspect] = self._log.outside()
            connection = self._connections[is_suspect]
            if is_suspect not in self._started:
                await connection.start()
                self._started.add(is_suspect)
            return connection

    def _move(self, reply: DueReply, queue: _Queue | None) -> None:
        if reply.queue is None and queue is None:
            return
        if reply.queue is not None:
            del reply.queue[reply]
        reply.queue = queue
        if queue is not None:
            queue[reply] = None
        else:
            self._waiting -= 1
            self._waiting_bytes -= reply.size

    def _finish(self, reply: DueReply) -> None:
        self._move(reply, None)
        reply.claim.mark_done(reply.offset)

    def _leave_out(self, reply: DueReply, reason: str, cause: str) -> None:
        """Leave a reply unsent. `reason`: as in the metric; `cause`: about its topic."""
        if reply.queue is None:
            return
        self._finish(reply)
        self._metrics.count_reply(reason)
        topic = reply.address.topic
        self._warn(topic, f"replies to {topic} are left out: {cause}")

    def _warn(self, topic: str, message: str) -> None:
        now = self._ctx.clock.now()
        if self._quiet_until.get(topic, now) <= now:
            known = {t: until for t, until in self._quiet_until.items() if until > now}
            self._quiet_until = known | {topic: now + QUIET_S}
            log.warning("%s", message)


def _next(queue: _Queue, limit: int) -> list[DueReply]:
    size, batch = 0, list[DueReply]()
    for reply in queue:
        size += reply.size
        if batch and (size > MAX_BATCH_BYTES or len(batch) >= limit):
            break
        batch.append(reply)
    return batch
