"""The writer of a lane's results: transactions of results and replies, and their outcomes.

Owns the transactional writer of the lane, whose opening fences all collectors that wrote results of
the lane before. After a transaction whose end is unknown it opens the writer again, so that the
transaction has ended, and looks into the log for its results. A reply (`ReplyAddress`) is in the
transaction of its result: it is there once as well. Where the topic of a reply takes no record, the
result is written without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import islice
from typing import TypeVar

from app.preprocess.models.byte_model import Model
from app.results.collector_context import CollectorContext
from app.results.lane_results import LaneResults
from app.results.pending_result import PendingResult
from streams.clock import CLOCK_SKEW_MS
from streams.codecs import encode
from streams.errors import (
    AccessDenied,
    AppendFailed,
    BrokerUnavailable,
    OwnershipLost,
    PositionLost,
    RecordTooLarge,
    StreamError,
)
from streams.ports import Entry, Partition, TopicEntry
from streams.reading.range_reader import read_range
from streams.retry import MAX_BACKOFF_S
from streams.topics import MAX_RECORD_BYTES, REQUESTS, RESULTS, lane_of, partition_of

log = logging.getLogger(__name__)

MAX_BATCH = 500
MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Bounds of one transaction: readers see nothing of it before its end."""
MAX_RESULT_BYTES = MAX_RECORD_BYTES - 64 * 1024
"""Largest value of a result; the rest is for its key and headers."""
FENCED_PAUSE_S = 1.0
"""Wait before the writer is opened again after another collector has opened it: whichever of the
two has lost the lane learns of it within a heartbeat."""
MAX_FAILURES = 3
"""Failures in a row of transactions with replies, before each result is written in its own. A new
leader is elected meanwhile: each failure takes up to three request time-outs."""
MAX_REPLY_FAILURES = 2
"""Replies that fail alone before a partition counts as one that takes no records; the first may
have met the last moment of an outage."""
REFUSING_S = 300.0
"""For so long replies to such a partition are left out at once. Each attempt holds the lane up for
several time-outs, so an attempt for each batch would leave a lane a few results a second."""
QUIET_S = 600.0
"""A topic that takes no replies is logged once in this time."""
REPLY_TYPE = ("content-type", b"application/json")

T = TypeVar("T")


class ResultWriter:
    """Writer of the `ready` results of a lane. `mark_done` is called with the offset of a
    request."""

    def __init__(
        self,
        context: CollectorContext,
        lane: int,
        results: LaneResults,
        mark_done: Callable[[int], None],
    ) -> None:
        self._context = context
        self._lane = lane
        self._results = results
        self._mark_done = mark_done
        self._writer = context.log.transactional_writer(f"collector-{lane}")
        self._has_ready = asyncio.Event()
        self._failures = 0
        """Transactions with replies that have failed since one was committed."""
        self._reply_partitions: dict[str, int] = {}
        """Partitions by topic of replies, of the present batch."""
        self._refusing_until: dict[Partition, float] = {}
        """Partitions that take no replies."""
        self._quiet_until: dict[str, float] = {}
        """Topics whose replies were left out, and the end of the time without another log line."""

    async def open(self) -> None:
        """Fence all other collectors of the lane."""
        await self._repeated(self._writer.open)

    async def close(self) -> None:
        """Disconnect; a transaction that is not over is aborted."""
        await self._writer.close()

    def notify(self) -> None:
        """Look for results that are ready."""
        if self._results.ready:
            self._has_ready.set()

    async def run(self) -> None:
        """Write results, until cancelled. The writer is open, and earlier results are found."""
        while True:
            if not self._results.ready:
                self._has_ready.clear()
                await self._has_ready.wait()
            batch: list[PendingResult] = []
            entries: list[TopicEntry] = []
            size = 0
            ready = list(islice(self._results.ready, MAX_BATCH))
            await self._look_up({p.reply.topic for p in ready if p.reply is not None})
            for pending in ready:
                own = await self._entries(pending)
                size += sum(len(each.entry.value or b"") for each in own)
                if batch and size > MAX_BATCH_BYTES:
                    break
                batch.append(pending)
                entries += own
            await self._write(batch, entries)

    async def find_results(self, since_ms: int) -> None:
        """Note the results of the lane that are in the log.

        `since_ms`: append time of the first request that may have none. Twice the margin, since
        replies are read from one margin before it: they must not end the repetition of a request
        whose result is not found here.
        """
        self._results.add_finished(
            await self._repeated(lambda: self._read_results(since_ms - 2 * CLOCK_SKEW_MS))
        )

    async def _read_results(self, since_ms: int) -> dict[str, int]:
        kafka, clock = self._context.log, self._context.ctx.clock
        lanes, count = await kafka.partitions(REQUESTS), await kafka.partitions(RESULTS)
        numbers = [self._lane] if count == lanes else list(range(count))
        ends = await kafka.end_offsets(RESULTS, numbers)
        starts = {n: await kafka.offset_at(RESULTS, n, max(0, since_ms)) for n in numbers}
        found: dict[str, int] = {}
        pieces = read_range(
            kafka, clock,
            {Partition(RESULTS, n): start for n, start in starts.items()},
            {Partition(RESULTS, n): end for n, end in ends.items()},
        )  # fmt: skip
        async with aclosing(pieces):
            async for piece in pieces:
                for record in piece.records:
                    request_id = (record.key or b"").decode(errors="replace")
                    if lane_of(request_id, lanes) == self._lane:
                        found[request_id] = record.timestamp
        return found

    async def _write(self, batch: Sequence[PendingResult], entries: Sequence[TopicEntry]) -> None:
        """Write results and replies. Results that are not in the log afterwards stay in `ready`."""
        error = await self._try_write(batch, entries)
        if error is None:
            self._failures = 0
        elif isinstance(error, RecordTooLarge):
            await self._write_reduced(batch, entries, error)
        elif len(entries) > len(batch) and not isinstance(error, OwnershipLost):
            self._failures += 1
            if isinstance(error, AccessDenied) or self._failures >= MAX_FAILURES:
                self._failures = 0
                await self._write_apart(batch)

    async def _try_write(
        self, batch: Sequence[PendingResult], entries: Sequence[TopicEntry]
    ) -> StreamError | None:
        """Write a transaction. None: all its results are in the log.

        After an error the writer is open again. Raises AccessDenied if no reply explains it.
        """
        try:
            await self._writer.write(entries)
        except RecordTooLarge as e:
            await self.open()
            return e
        except (AccessDenied, AppendFailed, OwnershipLost) as e:
            if isinstance(e, AccessDenied) and len(entries) == len(batch):
                raise
            is_fenced = isinstance(e, OwnershipLost)
            self._context.metrics.count_transaction("fenced" if is_fenced else "failed")
            log.warning("lane %d: looking for the results of a transaction: %s", self._lane, e)
            if is_fenced:
                await self._context.ctx.clock.sleep(FENCED_PAUSE_S)
            await self.open()
            await self.find_results(min(pending.appended_ms for pending in batch))
            found = [p for p in batch if self._results.is_finished(p.id)]
            self._finish(found)
            return None if len(found) == len(batch) else e
        self._context.metrics.count_transaction("committed")
        self._finish(batch)
        return None

    async def _write_apart(self, batch: Sequence[PendingResult]) -> None:
        """Write each result in a transaction of its own, without a reply that prevents it."""
        failures = Counter[Partition]()
        for pending in batch:
            if self._results.is_finished(pending.id):
                continue
            entries = await self._entries(pending)
            error = await self._try_write([pending], entries)
            if error is None:
                continue
            if isinstance(error, RecordTooLarge):
                await self._write_reduced([pending], entries, error)
                continue
            place = _place_of_reply(entries)
            if place is None or isinstance(error, OwnershipLost):
                return
            if await self._try_write([pending], entries[:1]) is not None:
                return  # the reply is not the reason: it stays
            self._leave_out(pending, "failed", place.topic, f"it takes no records: {error}")
            failures[place] += 1
            if failures[place] >= MAX_REPLY_FAILURES:
                self._refuse(place)

    def _refuse(self, place: Partition) -> None:
        now = self._context.ctx.clock.now()
        known = {p: until for p, until in self._refusing_until.items() if until > now}
        self._refusing_until = known | {place: now + REFUSING_S}

    def _leave_out(self, pending: PendingResult, reason: str, topic: str, cause: str) -> None:
        """Leave out the reply of a result; `cause` is about its topic."""
        pending.drop_reply()
        self._context.metrics.count_reply(reason)
        now = self._context.ctx.clock.now()
        if self._quiet_until.get(topic, now) <= now:
            known = {t: until for t, until in self._quiet_until.items() if until > now}
            self._quiet_until = known | {topic: now + QUIET_S}
            log.warning("lane %d: replies to %s are left out: %s", self._lane, topic, cause)

    async def _write_reduced(
        self, batch: Sequence[PendingResult], entries: Sequence[TopicEntry], error: RecordTooLarge
    ) -> None:
        """Write the results of a refused transaction one by one, without those that are too
        large."""
        if len(batch) > 1:
            for pending in batch:
                await self._write([pending], await self._entries(pending))
            return
        [pending] = batch
        if len(entries) > 1:
            log.warning("%s: its reply is left out: %s", pending.id, error)
            self._context.metrics.count_reply("too_large")
            pending.drop_reply()
        else:
            pending.drop_body()
        await self._write(batch, await self._entries(pending))

    def _finish(self, batch: Sequence[PendingResult]) -> None:
        """The results of these are in the log."""
        now_ms = self._context.broker_clock.now_ms()
        self._results.finish(batch, now_ms)
        for pending in batch:
            self._mark_done(pending.offset)
            self._context.metrics.observe_result(pending.status, now_ms - pending.ended_ms)

    async def _entries(self, pending: PendingResult) -> list[TopicEntry]:
        """The records of a result: itself, and its reply."""
        name = pending.wanted_model
        model = None if name is None else await self._context.find_model(name)
        entry = self._result(pending, model)
        if len(entry.value or b"") > MAX_RESULT_BYTES:
            pending.drop_body()
            entry = self._result(pending, model)
        reply = self._reply(pending, entry)
        return [TopicEntry(RESULTS, entry), *([] if reply is None else [reply])]

    def _result(self, pending: PendingResult, model: Model | None) -> Entry:
        """The record of a result; that of an error if the result cannot be made."""
        try:
            return encode(pending.build(model), pending.id)
        except Exception:
            # A collector that ended for it would be restarted and get the same request again.
            log.exception("lane %d: the result of %s cannot be made", self._lane, pending.id)
            pending.fail(self._context.broker_clock.now_ms())
            return encode(pending.build(), pending.id)

    def _reply(self, pending: PendingResult, result: Entry) -> TopicEntry | None:
        address = pending.reply
        if address is None:
            return None
        count = self._reply_partitions[address.topic]
        if not 0 <= (address.partition or 0) < count:
            self._leave_out(pending, "no_topic", address.topic, f"it has {count} partitions")
            return None
        partition = address.partition
        if partition is None:
            partition = partition_of(pending.id.encode(), count)
        place = Partition(address.topic, partition)
        if self._refusing_until.get(place, 0.0) > self._context.ctx.clock.now():
            self._leave_out(pending, "failed", address.topic, f"{place} takes no records")
            return None
        entry = Entry(result.key, result.value, (*result.headers, REPLY_TYPE, *address.headers))
        return TopicEntry(address.topic, entry, partition, is_foreign=True)

    async def _look_up(self, topics: set[str]) -> None:
        """Note how many partitions the topics of a batch have."""
        self._reply_partitions = {}
        if topics:
            foreign = self._context.log.foreign_partitions
            self._reply_partitions = await self._repeated(lambda: foreign(topics))

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a query until it is answered."""
        while True:
            try:
                return await call()
            except (BrokerUnavailable, PositionLost, TimeoutError) as e:
                log.warning("lane %d, retrying: %s", self._lane, e)
                await self._context.ctx.clock.sleep(MAX_BACKOFF_S)


def _place_of_reply(entries: Sequence[TopicEntry]) -> Partition | None:
    """Where the reply among the records of a result goes; None without one."""
    for topic, _, partition, is_foreign in entries:
        if is_foreign:
            assert partition is not None, "replies have a partition"
            return Partition(topic, partition)
    return None
