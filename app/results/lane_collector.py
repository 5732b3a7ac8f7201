"""The collector of one lane, with one result for each request that gets one, and its reader.

Exactly once, for readers that read committed:

- Results are written in transactions (`app/results/result_writer.py`). A collector that takes over
  a lane opens the writer first: all earlier transactions have ended, and no others begin.
- After each opening it reads the results that are in the log, from before the first request that
  may have none. Requests with a result get no other one.
- The committed position of the group is the lowest request without a result, or whose reply is not
  sent (`app/results/reply_sender.py`). It is no part of the transactions, since replies end in
  another order than requests begin.

Partial replies are in memory only; a new owner reads them again. Positions that are found by time
have a margin for the clocks of brokers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple, TypeVar

from kvlane.app.results.collector_context import CollectorContext
from kvlane.app.results.lane_results import LaneResults
from kvlane.app.results.pending_result import PendingResult
from kvlane.app.results.result_writer import ResultWriter
from kvlane.app.results.unanswered_requests import search_ledger
from kvlane.streams.clock import CLOCK_SKEW_MS, retry_while_unavailable
from kvlane.streams.errors import PositionLost, RecordError, StreamError
from kvlane.streams.ports import Batches, Partition, Reader, Record
from kvlane.streams.reading.group_consumer import PartitionClaim
from kvlane.streams.reading.range_reader import end_offset_of, read_range
from kvlane.streams.records import Cancel, LogRecord, Refused
from kvlane.streams.request import Request
from kvlane.streams.topics import REQUESTS, RESPONSES, lane_of

log = logging.getLogger(__name__)

MAX_READY = 2000
"""Requests that are over and wait for their transaction; with so many, replies wait in the log."""
SILENT_AFTER_MS = 15_000
"""Age of a request without a reply at which the ledger is searched for the reason."""
REPLIES_WAIT_S = 5.0
"""Time to read the replies that are there when the ledger was searched."""
REPLIES_POLL_S = 0.1
OVERDUE_MS = 60_000
"""Time after its deadline at which a request with deleted records counts as lost."""

T = TypeVar("T")


class LaneCollector:
    def __init__(self, context: CollectorContext, claim: PartitionClaim) -> None:
        self.claim = claim
        self.lane = claim.partition
        self.position: int | None = None
        """The next offset of `responses` to apply; None before the lane is taken over."""
        self._context = context
        self._lane_count = 0  # until the lane is taken over
        self._results = LaneResults(context.remembered_ms, self._on_unreadable)
        self._writer = ResultWriter(context, claim, self._results)
        self.take_over = context.ctx.spawn(f"take over lane {self.lane}", self._begin())
        self._tasks = [self.take_over]

    @property
    def serving(self) -> bool:
        return self.position is not None

    @property
    def open_requests(self) -> int:
        return self._results.open_requests

    @property
    def is_full(self) -> bool:
        """Whether replies are to wait in the log until results are written."""
        return len(self._results.ready) >= MAX_READY

    def close(self) -> None:
        """The lane was revoked: stop everything at once."""
        for task in self._tasks:
            task.cancel()
        self._context.ctx.spawn(f"close writer of lane {self.lane}", self._writer.close())

    def on_request_record(self, log_record: LogRecord) -> None:
        """A record of `requests`. Raises RecordError when it belongs in another lane."""
        record = log_record.record
        assert isinstance(record, Request | Cancel | Refused), "no other types are read"
        if lane_of(record.id, self._lane_count) != self.lane:
            raise RecordError(f"{record.id!r} belongs in another lane")
        done = self._results.add_request(log_record)
        if (
            done == log_record.offset
            and not isinstance(record, Cancel)
            and record.result is not None
        ):
            reply = record.result.reply
            self._writer.mark_finished(log_record.offset, record.id, log_record.timestamp_ms, reply)
        elif done is not None:
            self.claim.mark_done(done)

    def apply(self, records: Sequence[Record]) -> None:
        """Records of `responses`, from `position` on. Raises NewerRecord."""
        self._results.apply(records)
        self.position = records[-1].offset + 1
        self._mark_replaced()
        self._writer.notify()

    def _mark_replaced(self) -> None:
        for offset in self._results.replaced:
            self.claim.mark_done(offset)
        self._results.replaced.clear()

    def _on_unreadable(self, record: Record, reason: str) -> None:
        """A record has ended a reply, since it cannot be read: one request each, so few."""
        self._context.metrics.count_unreadable()
        name = f"dead letter of responses[{self.lane}]@{record.offset}"
        self._context.ctx.spawn(name, self._write_dead_letter(record, reason))

    async def _write_dead_letter(self, record: Record, reason: str) -> None:
        try:
            await self._context.dead_letters.write(RESPONSES, record, reason)
        except StreamError as e:
            log.warning("responses[%d]@%d: no dead letter: %s", self.lane, record.offset, e)

    def skip_to(self, start: int) -> None:
        """Records of `responses` below this offset were deleted, unread."""
        log.error(
            "responses[%d]: records were deleted before they were read: wanted %s, the log starts "
            "at %d; requests whose reply is incomplete get a result with the error lost",
            self.lane,
            self.position,
            start,
        )
        self._results.truncate()
        self.position = start

    async def check(self) -> None:
        """Settle requests that no record of a reply settles. To be called now and then."""
        now_ms = self._context.broker_clock.now_ms()
        self._mark_replaced()
        self._results.lose_overdue(now_ms - OVERDUE_MS)
        self._writer.notify()
        unanswered = self._results.unanswered(now_ms - SILENT_AFTER_MS)
        if not unanswered:
            return
        repetitions, ended = await search_ledger(self._context, self.lane, unanswered)
        if ended:  # a repetition among them has the result of the request before it
            first_ms = min(pending.begun_ms for pending in ended)
            await self._writer.find_results(first_ms - self._context.remembered_ms)
        if not (repetitions or ended):
            return
        if not await self._wait_for_replies():
            return  # it is checked again
        for pending in repetitions:
            if pending.is_silent and self._results.is_open(pending):
                self._drop(pending)
        for pending in ended:
            if pending.is_lost and self._results.is_open(pending):
                self._results.lose(pending, now_ms)
        self._writer.notify()

    async def _wait_for_replies(self) -> bool:
        """Wait until `responses` is read to where it ends now; False if that takes too long."""
        clock, end = self._context.ctx.clock, await self._end_of(RESPONSES)
        until = clock.now() + REPLIES_WAIT_S
        while not self.claim.is_lost and clock.now() < until:
            if self.position is not None and self.position >= end:
                return True
            await clock.sleep(REPLIES_POLL_S)
        return False

    def _drop(self, pending: PendingResult) -> None:
        log.info("%s was published before; it gets no other result", pending.id)
        self._results.drop(pending)
        self.claim.mark_done(pending.offset)

    async def _begin(self) -> None:
        context, lane = self._context, self.lane
        self._lane_count = await self._asked(lambda: context.log.partitions(REQUESTS))
        await self._writer.open()
        # Before the end of the requests: those appended later are answered later.
        end_of_responses = await self._end_of(RESPONSES)
        end_of_requests = await self._end_of(REQUESTS)
        first_ms = await self._first_ms(end_of_requests)
        if first_ms is None:
            position = end_of_responses
        else:
            await self._writer.find_results(first_ms)
            since_ms = max(0, first_ms - CLOCK_SKEW_MS)
            position = await self._asked(lambda: context.log.offset_at(RESPONSES, lane, since_ms))
            starts = await self._asked(lambda: context.log.start_offsets(RESPONSES, [lane]))
            if 0 < starts[lane] >= position:
                self._results.cut_below = end_of_requests
        self.position = position
        context.resume(self.claim)
        self._tasks.append(context.ctx.spawn(f"results of lane {lane}", self._writer.run()))

    async def _first_ms(self, end: int) -> int | None:
        """The append time of the first request that may have no result; None if all have one."""
        source, context = Partition(REQUESTS, self.lane), self._context
        if self.claim.start >= end:
            return None
        pieces = read_range(
            context.log, context.ctx.clock, {source: self.claim.start}, {source: end}, batch_size=1
        )
        async with aclosing(pieces):
            async for piece in pieces:
                for record in piece.records:
                    return record.timestamp
        return None

    async def _end_of(self, topic: str) -> int:
        context = self._context
        return await end_offset_of(context.log, context.ctx.clock, Partition(topic, self.lane))

    async def _asked(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry_while_unavailable(self._context.ctx.clock, call)


IDLE_POLL_S = 0.5
RECORDS_PER_POLL = 2000
GATHER_S = 0.05
"""Records come together from so long: a result may be so much later, for a fraction of the polls,
each of which costs a query for the ends of `requests`."""
REQUESTS_WAIT_S = 0.25
"""Time for the requests of a poll: setting a lane aside costs new fetches."""
REQUESTS_POLL_S = 0.01
ASIDE_POLL_S = 0.1
NO_LANES_POLL_S = 0.1


class _WaitingRecords(NamedTuple):
    """Polled records of a lane, and the end of `requests` up to which it has to be read first."""

    records: Sequence[Record]
    end: int


class LaneReader:
    """Feeds `lanes`, the lanes by number; they are looked up anew at each poll."""

    def __init__(self, context: CollectorContext, lanes: Mapping[int, LaneCollector]) -> None:
        self._context = context
        self._lanes = lanes
        self._assigned: dict[Partition, int] = {}
        self._aside: dict[LaneCollector, _WaitingRecords] = {}

    async def run(self) -> None:
        reader = self._context.log.reader(gather_s=GATHER_S)
        try:
            while True:
                self._apply_waiting()
                if not self._assign(reader):
                    is_idle = all(lane.position is None for lane in self._lanes.values())
                    pause_s = NO_LANES_POLL_S if is_idle else REQUESTS_POLL_S
                    await self._context.ctx.clock.sleep(pause_s)
                    continue
                try:
                    timeout_s = ASIDE_POLL_S if self._aside else IDLE_POLL_S
                    batches = await reader.poll(timeout_s, RECORDS_PER_POLL)
                except PositionLost as e:
                    if (lane := self._lanes.get(e.partition)) is not None and lane.serving:
                        lane.skip_to(e.start)
                    continue
                if batches:
                    await self._apply(batches)
                await self._context.ctx.clock.sleep(0)
        finally:
            await reader.close()

    def _assign(self, reader: Reader) -> bool:
        """Read the records that the lanes need; False if they need nothing."""
        wanted = {
            Partition(RESPONSES, lane.lane): lane.position
            for lane in self._lanes.values()
            if lane.position is not None and not lane.is_full and lane not in self._aside
        }
        if wanted != self._assigned:
            reader.assign(wanted)
            self._assigned = wanted
        return bool(wanted)

    async def _apply(self, batches: Batches) -> None:
        context = self._context
        numbers = [source.partition for source in batches]
        ends = await retry_while_unavailable(
            context.ctx.clock, lambda: context.log.end_offsets(REQUESTS, numbers)
        )
        polled: dict[LaneCollector, _WaitingRecords] = {}
        for source, records in batches.items():
            context.broker_clock.observe(records[-1].timestamp)
            lane = self._lanes.get(source.partition)
            if lane is None or lane.position != self._assigned[source]:
                continue  # revoked, and perhaps assigned anew, during the poll
            self._assigned[source] = records[-1].offset + 1
            polled[lane] = _WaitingRecords(records, ends[source.partition])
        self._aside |= polled
        until = context.ctx.clock.now() + REQUESTS_WAIT_S
        self._apply_waiting()
        while polled.keys() & self._aside.keys() and context.ctx.clock.now() < until:
            await context.ctx.clock.sleep(REQUESTS_POLL_S)
            self._apply_waiting()
        for lane in polled.keys() & self._aside.keys():
            log.warning("lane %d: its requests are not read; replies wait", lane.lane)

    def _apply_waiting(self) -> None:
        for lane, waiting in list(self._aside.items()):
            if lane.claim.is_lost:
                del self._aside[lane]
            elif lane.claim.position >= waiting.end:
                del self._aside[lane]
                lane.apply(waiting.records)
