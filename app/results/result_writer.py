"""The writer of a lane's results: transactions of results, and their outcomes.

Opening it fences all earlier ones; then the log is searched for results of its requests.
Transactions have records of the deployment only: a partition without brokers would hold the writer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import islice
from typing import NamedTuple, TypeVar

from kvlane.app.preprocess.models.byte_model import Model
from kvlane.app.results.collector_context import CollectorContext
from kvlane.app.results.lane_results import LaneResults, WrittenResult
from kvlane.app.results.pending_result import PendingResult
from kvlane.app.results.reply_sender import DueReply
from kvlane.streams.clock import CLOCK_SKEW_MS, MAX_BACKOFF_S
from kvlane.streams.codecs import encode
from kvlane.streams.errors import (
    AppendFailed,
    BrokerUnavailable,
    OwnershipLost,
    PositionLost,
    RecordTooLarge,
)
from kvlane.streams.ports import Entry, Partition, TopicEntry
from kvlane.streams.reading.group_consumer import PartitionClaim
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.request import ReplyAddress
from kvlane.streams.topics import MAX_RECORD_BYTES, REQUESTS, RESULTS, lane_of

log = logging.getLogger(__name__)

MAX_BATCH = 500
MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Bounds of one transaction: readers see nothing of it before its end."""
MAX_RESULT_BYTES = MAX_RECORD_BYTES - 64 * 1024
"""Largest value of a result; the rest is for its key and headers."""
FENCED_PAUSE_S = 1.0
"""Wait before the writer is opened again after another collector has opened it."""

T = TypeVar("T")


class _Made(NamedTuple):
    pending: PendingResult
    entry: Entry


class ResultWriter:
    """Writer of the `ready` results of a lane. A request whose result is in the log is marked as
    done with the claim, or its reply is sent first."""

    def __init__(
        self, context: CollectorContext, claim: PartitionClaim, results: LaneResults
    ) -> None:
        self._context = context
        self._claim = claim
        self._lane = claim.partition
        self._results = results
        self._writer = context.log.transactional_writer(f"collector-{self._lane}")
        self._has_ready = asyncio.Event()

    async def open(self) -> None:
        """Fence all other collectors of the lane. `find_results` follows."""
        await self._repeated(self._writer.open)

    async def close(self) -> None:
        """Disconnect; a transaction that is not over is aborted."""
        await self._writer.close()

    def notify(self) -> None:
        if self._results.ready:
            self._has_ready.set()

    async def run(self) -> None:
        """Write results, until cancelled. The writer is open, and earlier results are found."""
        while True:
            if not self._results.ready:
                self._has_ready.clear()
                await self._has_ready.wait()
            batch: list[_Made] = []
            size = 0
            for pending in list(islice(self._results.ready, MAX_BATCH)):
                made = await self._made(pending)
                size += len(made.entry.value or b"")
                if batch and size > MAX_BATCH_BYTES:
                    break
                batch.append(made)
            await self._write(batch)

    async def find_results(self, since_ms: int) -> None:
        """Note the results of the lane that are in the log. `since_ms`: append time of the first
        request that may have none; the margin is twice that of replies, which must not end a
        repetition first."""
        self._results.add_finished(
            await self._repeated(lambda: self._read_results(since_ms - 2 * CLOCK_SKEW_MS))
        )
        for pending in self._results.take_finished():
            if pending.is_over:
                self._observe(pending)
            self.mark_finished(pending.offset, pending.id, pending.appended_ms, pending.reply)

    def mark_finished(
        self, offset: int, request_id: str, appended_ms: int, address: ReplyAddress | None
    ) -> None:
        """A request needs no other result. Its reply may be missing, if its own was found in the
        log."""
        written = None
        if address is not None:
            written = self._results.take_unreplied(request_id, appended_ms)
        if address is None or written is None:
            self._claim.mark_done(offset)
            return
        self._context.replies.send(
            DueReply(self._claim, offset, request_id, address, written.at_ms, source=written)
        )

    async def _read_results(self, since_ms: int) -> dict[str, WrittenResult]:
        kafka, clock = self._context.log, self._context.ctx.clock
        lanes, count = await kafka.partitions(REQUESTS), await kafka.partitions(RESULTS)
        numbers = [self._lane] if count == lanes else list(range(count))
        ends = await kafka.end_offsets(RESULTS, numbers)
        starts = {n: await kafka.offset_at(RESULTS, n, max(0, since_ms)) for n in numbers}
        found: dict[str, WrittenResult] = {}
        pieces = read_range(
            kafka,
            clock,
            {Partition(RESULTS, n): start for n, start in starts.items()},
            {Partition(RESULTS, n): end for n, end in ends.items()},
        )
        async with aclosing(pieces):
            async for piece in pieces:
                for record in piece.records:
                    request_id = (record.key or b"").decode(errors="replace")
                    if lane_of(request_id, lanes) == self._lane:
                        place = Partition(RESULTS, record.partition)
                        found[request_id] = WrittenResult(record.timestamp, place, record.offset)
        return found

    async def _write(self, batch: Sequence[_Made]) -> None:
        """Write results. Those that are not in the log afterwards stay in `ready`."""
        batch = [made for made in batch if made.pending in self._results.ready]
        if not batch:
            return
        try:
            await self._writer.write([TopicEntry(RESULTS, made.entry) for made in batch])
        except RecordTooLarge:
            await self._reopen()
            await self._write_one_by_one(batch)
        except (AppendFailed, OwnershipLost) as e:
            is_fenced = isinstance(e, OwnershipLost)
            self._context.metrics.count_transaction("fenced" if is_fenced else "failed")
            log.warning("lane %d: looking for the results of a transaction: %s", self._lane, e)
            if is_fenced:
                await self._context.ctx.clock.sleep(FENCED_PAUSE_S)
            await self._reopen()
        else:
            self._context.metrics.count_transaction("committed")
            self._finish(batch)

    async def _reopen(self) -> None:
        """Open the writer again: another collector may have written any results meanwhile."""
        await self.open()
        await self.find_results(self._results.first_ms(self._context.broker_clock.now_ms()))

    async def _write_one_by_one(self, batch: Sequence[_Made]) -> None:
        """Write the results of a refused transaction, without the bodies that are too large."""
        if len(batch) > 1:
            for made in batch:
                await self._write([made])
            return
        [(pending, _)] = batch
        pending.drop_body()
        await self._write([await self._made(pending)])

    def _finish(self, batch: Sequence[_Made]) -> None:
        """The results of these are in the log, by this writer."""
        now_ms = self._context.broker_clock.now_ms()
        self._results.finish([made.pending for made in batch], now_ms)
        for pending, entry in batch:
            self._observe(pending)
            if pending.reply is None:
                self._claim.mark_done(pending.offset)
            else:
                address = pending.reply
                self._context.replies.send(
                    DueReply(self._claim, pending.offset, pending.id, address, now_ms, entry)
                )

    def _observe(self, pending: PendingResult) -> None:
        delay_ms = self._context.broker_clock.now_ms() - pending.ended_ms
        self._context.metrics.observe_result(pending.status, delay_ms)

    async def _made(self, pending: PendingResult) -> _Made:
        name = pending.wanted_model
        model = None if name is None else await self._context.find_model(name)
        entry = self._entry(pending, model)
        if len(entry.value or b"") > MAX_RESULT_BYTES:
            pending.drop_body()
            entry = self._entry(pending, model)
        return _Made(pending, entry)

    def _entry(self, pending: PendingResult, model: Model | None) -> Entry:
        """The record of a result; that of an error if the result cannot be made."""
        try:
            return encode(pending.build(model), pending.id)
        except Exception:
            # A collector that ended for it would be restarted and get the same request again.
            log.exception("lane %d: the result of %s cannot be made", self._lane, pending.id)
            pending.fail(self._context.broker_clock.now_ms())
            return encode(pending.build(), pending.id)

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except (BrokerUnavailable, PositionLost, TimeoutError) as e:
                log.warning("lane %d, retrying: %s", self._lane, e)
                await self._context.ctx.clock.sleep(MAX_BACKOFF_S)
