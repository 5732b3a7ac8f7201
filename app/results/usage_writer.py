"""The usage of requests on the topic `usage`: one record for each, exactly once for readers that
read committed.

    ledger ──► UsageReader ──► LaneUsage: one for each lane ──► UsageWriter ──► usage

A part of collectors, which divide the lanes and end no request, so that neither routers nor clients
wait for it. It is exactly once as position and records are one: each record has, in a header, the
offset of the ledger from which all later usage follows. Who takes over a lane opens its writer,
which ends all transactions before, reads the header of the last record, and the ids of those that
are written behind that offset and within the window of ids before it. The committed position of the
group has no part in it. `usage` outlives the ledger by a retention of its own; it is not compacted,
as an id may be used again after its window.

Bounds: ended requests that are not written hold the reading of the lane (`MAX_ENDED`). A collector
that is down for longer than the ledger is kept loses the usage of that time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import islice
from typing import NamedTuple, TypeVar

from kvlane.app.results.collector_context import CollectorContext
from kvlane.app.results.request_usage import BilledRequest, LaneUsage, ShownAnswer
from kvlane.streams.clock import CLOCK_SKEW_MS, MAX_BACKOFF_S
from kvlane.streams.codecs import decode, encode
from kvlane.streams.errors import (
    AppendFailed,
    BrokerUnavailable,
    Malformed,
    NewerRecord,
    OwnershipLost,
    PositionLost,
)
from kvlane.streams.ports import Partition, Reader, Record, TopicEntry
from kvlane.streams.reading.group_consumer import PartitionClaim
from kvlane.streams.reading.range_reader import end_offset_of, read_range
from kvlane.streams.records import RUN_CODES, LogRecord, RequestUsage
from kvlane.streams.responses.transcript import VISIBLE, Transcript
from kvlane.streams.topics import LEDGER, RESPONSES, USAGE

log = logging.getLogger(__name__)

MAX_ENDED = 5000
"""Ended requests without a record, of a lane, with which its ledger is not read further."""
MAX_BATCH = 500
"""Records of a transaction."""
GATHER_S = 0.25
"""Pause before each transaction: one has the ends of so long."""
REPORTS_POLL_S = 1.0
IDLE_POLL_S = 0.5
POSITION_HEADER = "from"
_LAST_RECORDS = 1000

T = TypeVar("T")


class LedgerPosition(NamedTuple):
    """The ledger offset from which the usage that is not written follows, and its append time."""

    offset: int
    at_ms: int


class UsageWriter:
    """Writer of the usage of a lane, from the claim of the lane on."""

    def __init__(self, context: CollectorContext, claim: PartitionClaim) -> None:
        self.claim = claim
        self.lane = claim.partition
        self.position: int | None = None
        """The next offset of the ledger to apply; None before the lane is taken over."""
        self._context = context
        self._usage = LaneUsage(context.remembered_ms)
        self._last_ms = 0
        self._writer = context.log.transactional_writer(f"collector-usage-{self.lane}")
        self._has_ended = asyncio.Event()
        self._task = context.ctx.spawn(f"usage of lane {self.lane}", self._run())

    @property
    def is_full(self) -> bool:
        return len(self._usage.ended) >= MAX_ENDED

    def close(self) -> None:
        """The lane was revoked: stop at once."""
        self.position = None
        self._task.cancel()
        self._context.ctx.spawn(f"close writer of usage {self.lane}", self._writer.close())

    def apply(self, records: Sequence[Record]) -> None:
        """Apply records of the ledger, from `position` on. Raises NewerRecord."""
        for record in records:
            try:
                decoded = decode(record)
            except Malformed:
                continue  # routers count and log it
            self._usage.apply(LogRecord(record.offset, record.timestamp, decoded))
        self.position, self._last_ms = records[-1].offset + 1, records[-1].timestamp
        if self._usage.ended:
            self._has_ended.set()

    def skip_to(self, start: int) -> None:
        """Records of the ledger below this offset were deleted, unread."""
        log.error(
            "ledger[%d]: records were deleted before they were read: wanted %s, the log starts at "
            "%d; usage of that time is incomplete", self.lane, self.position, start,
        )  # fmt: skip
        self.position = start

    async def _run(self) -> None:
        clock = self._context.ctx.clock
        while True:
            await self._repeated(self._take_over)
            try:
                while True:
                    await self._has_ended.wait()
                    await clock.sleep(GATHER_S)
                    await self._write()
            except (AppendFailed, OwnershipLost, BrokerUnavailable, PositionLost) as e:
                log.warning("lane %d: usage is looked up in the log: %s", self.lane, e)
                self.position = None
                await clock.sleep(MAX_BACKOFF_S)

    async def _write(self) -> None:
        """Write what is ready. Raises the errors of a transaction, and of reads."""
        now_ms = self._context.broker_clock.now_ms()
        batch = list(islice(self._usage.ready(now_ms), MAX_BATCH))
        if not batch:
            if self._usage.ended:
                await self._context.ctx.clock.sleep(REPORTS_POLL_S)
            else:
                self._has_ended.clear()
            return
        shown = await self._shown_answers(batch)
        written = [history.usage(shown.get(history.id)) for history in batch]
        first = self._usage.first_besides({history.offset for history in batch})
        assert self.position is not None, "the lane is taken over"
        place = (
            LedgerPosition(self.position, self._last_ms)
            if first is None
            else LedgerPosition(first.offset, first.since_ms)
        )
        header = (POSITION_HEADER, b"%d,%d" % place)
        entries = [encode(usage, usage.id) for usage in written]
        await self._writer.write(
            [
                TopicEntry(USAGE, entry._replace(headers=(*entry.headers, header)), self.lane)
                for entry in entries
            ]
        )
        self._usage.finish(batch)
        for usage in written:
            self._context.metrics.count_usage(usage)

    async def _shown_answers(self, batch: Sequence[BilledRequest]) -> Mapping[str, ShownAnswer]:
        """What readers have of the answers of which no worker has reported any number; those whose
        records are no longer kept are left out."""
        starts = {each.id: each.answer_start for each in batch if each.needs_count}
        if not starts:
            return {}
        source, context = Partition(RESPONSES, self.lane), self._context
        end = await end_offset_of(context.log, context.ctx.clock, source)
        oldest = (await context.log.start_offsets(RESPONSES, [self.lane]))[self.lane]
        counted = {}
        for request_id, begin in starts.items():
            if begin.responses_from >= oldest:
                answer = counted[request_id.encode()] = Transcript(request_id, keep=False)
                answer.attempt, answer.shown_tokens = begin.attempt, begin.base_tokens
        firsts = [starts[answer.request_id].responses_from for answer in counted.values()]
        start = min(firsts, default=end)
        pieces = read_range(
            context.log, context.ctx.clock, {source: start}, {source: end}, keys=counted.keys()
        )
        async with aclosing(pieces):
            async for piece in pieces:
                for record in piece.records:
                    _count(counted[record.key or b""], record)
        return {each.request_id: _shown(each) for each in counted.values()}

    async def _take_over(self) -> None:
        """Fence all other writers of the lane, and find where they have ended."""
        context, clock, number = self._context, self._context.ctx.clock, self.lane
        await self._writer.open()
        usage = LaneUsage(context.remembered_ms)
        start = (await context.log.start_offsets(LEDGER, [number]))[number]
        end = await end_offset_of(context.log, clock, Partition(USAGE, number))
        place = await self._last_position(end)
        if place is not None:
            start = max(start, place.offset)
            since_ms = max(0, place.at_ms - context.remembered_ms - 2 * CLOCK_SKEW_MS)
            first = await context.log.offset_at(USAGE, number, since_ms)
            written: dict[str, int] = {}
            for record in await self._usage_records(first, end):
                with suppress(Malformed, NewerRecord):
                    if isinstance(each := decode(record), RequestUsage):
                        written[each.id] = each.ended_ms
            usage.add_written(written)
        self._usage, self.position = usage, start
        self._last_ms = 0 if place is None else place.at_ms
        self._has_ended.clear()

    async def _last_position(self, end: int) -> LedgerPosition | None:
        """The position in the last record of the lane; None without a record."""
        oldest = (await self._context.log.start_offsets(USAGE, [self.lane]))[self.lane]
        count = _LAST_RECORDS
        while True:
            start = max(oldest, end - count)
            for record in reversed(await self._usage_records(start, end)):
                if (place := position_of(record)) is not None:
                    return place
            if start == oldest:
                return None
            count *= 16

    async def _usage_records(self, start: int, end: int) -> list[Record]:
        source, found = Partition(USAGE, self.lane), list[Record]()
        pieces = read_range(
            self._context.log, self._context.ctx.clock, {source: start}, {source: end}
        )
        async with aclosing(pieces):
            async for piece in pieces:
                found += piece.records
        return found

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except (BrokerUnavailable, PositionLost, OwnershipLost, TimeoutError) as e:
                log.warning("lane %d, usage, retrying: %s", self.lane, e)
                await self._context.ctx.clock.sleep(MAX_BACKOFF_S)


def position_of(record: Record) -> LedgerPosition | None:
    """The position in the header of a record of usage; None without a valid one."""
    for name, value in record.headers:
        if name == POSITION_HEADER:
            offset, _, at_ms = (value or b"").partition(b",")
            if offset.isdigit() and at_ms.isdigit():
                return LedgerPosition(int(offset), int(at_ms))
    return None


def _shown(answer: Transcript) -> ShownAnswer:
    if (reason := answer.finish_reason) is not None:
        return ShownAnswer(answer.shown_tokens, RUN_CODES.get(reason, "stop"))
    return ShownAnswer(answer.shown_tokens, "" if answer.end is None else answer.end.code)


def _count(answer: Transcript, record: Record) -> None:
    try:
        decoded = decode(record)
    except Malformed:
        return  # the answer ends for its readers with the records before
    if isinstance(decoded, VISIBLE):
        answer.apply(decoded)


class UsageReader:
    """Feeds `lanes`, the lanes by number; they are looked up anew at each poll."""

    def __init__(self, context: CollectorContext, lanes: Mapping[int, UsageWriter]) -> None:
        self._context = context
        self._lanes = lanes
        self._assigned: dict[Partition, int] = {}

    async def run(self) -> None:
        reader = self._context.log.reader(gather_s=GATHER_S)
        try:
            while True:
                if not self._assign(reader):
                    await self._context.ctx.clock.sleep(GATHER_S)
                    continue
                try:
                    batches = await reader.poll(IDLE_POLL_S)
                except PositionLost as e:
                    lane = self._lanes.get(e.partition)
                    if lane is not None and lane.position is not None:
                        lane.skip_to(e.start)
                    continue
                for source, records in batches.items():
                    self._context.broker_clock.observe(records[-1].timestamp)
                    lane = self._lanes.get(source.partition)
                    # Another position: revoked, or taken over anew, during the poll.
                    if lane is not None and lane.position == self._assigned[source]:
                        lane.apply(records)
                        self._assigned[source] = records[-1].offset + 1
                await self._context.ctx.clock.sleep(0)
        finally:
            await reader.close()

    def _assign(self, reader: Reader) -> bool:
        """Read the records that the lanes need; False if they need nothing."""
        wanted = {
            Partition(LEDGER, lane.lane): lane.position
            for lane in self._lanes.values()
            if lane.position is not None and not lane.is_full
        }
        if wanted != self._assigned:
            reader.assign(wanted)
            self._assigned = wanted
        return bool(wanted)
