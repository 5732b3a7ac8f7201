"""The reader of `responses` for all replies of one client, in no group.

Owns the start of each reply and the choice of its reader (`streams/responses/reply_lanes.py`):
live, or a pass over its lane until the reply has caught up. `streams/responses/reply_stream.py`
decides the text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import NamedTuple

from kvlane.streams.clock import BrokerClock, Clock, retry_while_unavailable
from kvlane.streams.errors import BrokerUnavailable, LogClosed, NotFound, PositionLost
from kvlane.streams.ids import has_tenant_tag, issued_ms
from kvlane.streams.ports import Log
from kvlane.streams.records import EndCode
from kvlane.streams.responses.reply_lanes import (
    CatchUpReader,
    LiveReader,
    PartitionTail,
    ReaderTask,
)
from kvlane.streams.responses.reply_stream import NO_OFFSET, AttachPoint, Reply, UnconfirmedEnd
from kvlane.streams.topics import BATCH, RESPONSES, TOPICS_BY_NAME, lane_of

IDLE_LANE_TTL_S = 60.0
"""A lane is read for this long after its last reply: a new position costs a pending fetch."""

CLOCK_MARGIN_MS = 300_000
"""Lead of the clock that an id was made with over the broker's, as a rule."""

LOOK_BACK_S = 30.0
"""A reply without a record is looked for before the time of its id after this long at most."""

MAX_REQUEST_LIFETIME_MS = (TOPICS_BY_NAME[RESPONSES].retention_ms or 0) // 2
"""The longest lifetime of a request, enforced by the settings."""


def may_begin(
    request_id: str, now_ms: int, lifetime_ms: float = MAX_REQUEST_LIFETIME_MS + CLOCK_MARGIN_MS
) -> bool:
    """Whether a reply may still begin: a prompt may wait as long as `batch` keeps it, a gateway's
    request begins within its lifetime. True for an id without a time."""
    drawn_ms = issued_ms(request_id)
    waits_ms = 0 if has_tenant_tag(request_id) else TOPICS_BY_NAME[BATCH].retention_ms or 0
    return drawn_ms is None or now_ms - drawn_ms < waits_ms + lifetime_ms


REJECTED_BEFORE_START: frozenset[EndCode] = frozenset(
    {"refused", "invalid", "too_large", "queue_full"}
)
"""End codes of requests that cannot have shown any token."""

END_CHECK_TIMEOUT_S = 10.0
"""Time limit of the query about an unconfirmed End; other replies wait for it."""


class OffsetRange(NamedTuple):
    """Offsets of one lane: the first that may be of a request, the oldest one kept, and the end."""

    start: int
    oldest: int
    end: int


class ReplyReader:
    """All replies that a client awaits, fed between `start` and `close`."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        lanes: int,
        broker_clock: BrokerClock | None = None,
        *,
        moving: bool = True,
    ) -> None:
        """`broker_clock` observes live records. `moving=False`: for a reader that will `pin` all
        lanes."""
        self._log = log
        self._clock = clock
        self._lanes = lanes
        live = log.reader(moving=moving)
        self._live = LiveReader(live, clock, IDLE_LANE_TTL_S, broker_clock or BrokerClock(clock))
        self._history = CatchUpReader(log, clock, self._settle, self._move_to_live)
        self._readers = (live, *self._history.readers)
        self._tasks: list[asyncio.Task[None]] = []
        self._error: Exception | None = None

    def start(self) -> None:
        runs = {"live": self._follow, "look-back": self._look_back, **self._history.reader_tasks()}
        self._tasks = [
            asyncio.create_task(self._guarded(run), name=f"replies/{name}")
            for name, run in runs.items()
        ]

    @property
    def polled_at(self) -> float:
        """Time of the last completed poll of the live reader; a point on the clock."""
        return self._live.last_poll_at

    async def wait_until_failed(self) -> None:
        await asyncio.gather(*self._tasks)

    async def pin(self, lanes: Iterable[int]) -> None:
        """Read these lanes permanently. Raises BrokerUnavailable."""
        numbers = list(lanes)
        ends = await self._log.end_offsets(RESPONSES, numbers)
        for number in numbers:
            lane = self._live.lanes.get(number) or self._live.open_lane(number, ends[number])
            lane.is_pinned = True

    async def close(self) -> None:
        """Stop reading; awaited replies fail with LogClosed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reader in self._readers:
            await reader.close()
        self._fail(LogClosed("the client was closed"))

    async def subscribe(self, request_id: str) -> Reply:
        """A reply with all records that are appended after this call has returned. Raises
        BrokerUnavailable, or the error that ended reading."""
        self._check()
        number = lane_of(request_id, self._lanes)
        lane = await self._open(number)
        reply = Reply(request_id, lane.position, lane=number)
        lane.add(reply)
        return reply

    async def attach(
        self, request_id: str, *, begun: bool = False, after: int = 0, may_begin_s: float = math.inf
    ) -> Reply:
        """A reply from the first record of the request; it fails with PositionLost if that is gone.

        `begun`: part of it was visible before. `may_begin_s`: for how long from now it may still
        begin; after that, without a record, it fails with PositionLost if the log has lost records,
        else NotFound. `after`: see `Reply`. Raises BrokerUnavailable, or the error that ended
        reading.
        """
        self._check()
        number = lane_of(request_id, self._lanes)
        start, oldest, end = await self._beginning(request_id, number)
        lane = await self._open(number)
        is_due = begun or may_begin_s < math.inf
        reply = Reply(
            request_id,
            start,
            end if is_due else NO_OFFSET,
            lane=number,
            doubts=begun or start > 0,
            may_begin_until=-math.inf if begun else self._clock.now() + may_begin_s,
            attached=AttachPoint(oldest, begun, is_later=start > oldest),
            after=after,
        )
        if start >= lane.position:
            lane.add(reply)
        else:
            self._history.catch_up(number, start, reply, lane.position)
        return reply

    def detach(self, reply: Reply) -> None:
        """Stop awaiting a reply. Idempotent."""
        self._take_out(reply.lane, reply)
        reply.cancel_timer()

    def _take_out(self, number: int, reply: Reply) -> None:
        self._live.remove(number, reply)
        self._history.remove(number, reply)

    async def _open(self, number: int) -> PartitionTail:
        """The live lane, opened at its end if necessary."""
        if (lane := self._live.lanes.get(number)) is not None:
            return lane
        end = (await self._log.end_offsets(RESPONSES, [number]))[number]
        self._check()
        return self._live.lanes.get(number) or self._live.open_lane(number, end)

    async def _beginning(self, request_id: str, number: int) -> OffsetRange:
        """The offsets at which to search for the first record of a request: the oldest one for an
        id without a time, or with one that the lane has not reached."""
        oldest = (await self._log.start_offsets(RESPONSES, [number]))[number]
        end = (await self._log.end_offsets(RESPONSES, [number]))[number]
        if (drawn_ms := issued_ms(request_id)) is not None:
            wanted_ms = max(0, drawn_ms - CLOCK_MARGIN_MS)
            start = await self._log.offset_at(RESPONSES, number, wanted_ms)
            if start < end:
                return OffsetRange(max(start, oldest), oldest, end)
        return OffsetRange(oldest, oldest, end)

    async def _guarded(self, run: ReaderTask) -> None:
        """Run a reading task; its error fails all replies."""
        try:
            await run()
        except Exception as e:
            self._fail(e)
            raise

    async def _follow(self) -> None:
        """Feed replies live until cancelled."""
        while True:
            for number, reply in await self._live.poll():
                await self._settle_one(number, reply)
            for number, reply in self._live.overdue():
                self._seek_beginning(number, reply)

    async def _look_back(self) -> None:
        """Look for replies without a record before the time of their ids, until cancelled."""
        while True:
            await self._clock.sleep(LOOK_BACK_S)
            for reply in self._live.all_replies():
                point = reply.attached
                if point is not None and not reply.has_begun and reply.start > point.oldest:
                    self._seek_beginning(reply.lane, reply)

    async def _settle(self, number: int, lane: PartitionTail, changed: Iterable[Reply]) -> None:
        """Complete, restart or fail replies of a lane after some were fed."""
        for reply in changed:
            await self._settle_one(number, reply)
        for reply in lane.overdue(self._clock.now()):
            self._seek_beginning(number, reply)

    async def _settle_one(self, number: int, reply: Reply) -> None:
        if reply.unconfirmed_end is not None:
            await self._judge_end(number, reply, reply.unconfirmed_end)
        if reply.is_over:
            self.detach(reply)
        elif reply.is_broken:
            self._give_up(reply, PositionLost(RESPONSES, number, reply.start - 1, reply.start))
        elif reply.is_missing_start and reply.attached is not None:
            self._seek_beginning(number, reply)

    async def _judge_end(self, number: int, reply: Reply, bare: UnconfirmedEnd) -> None:
        """An End is the first record of a request: decide whether there was text before it. There
        was none if the reply was read from the first possible offset, or the deleted records are
        older than the id."""
        assert reply.attached is not None, "only an attached reply may be truncated"
        oldest, begun, is_later = reply.attached
        if reply.start == 0 or bare.end.code in REJECTED_BEFORE_START:
            reply.accept_end()
        elif begun:
            self._seek_beginning(number, reply)
        else:
            try:
                born = await retry_while_unavailable(
                    self._clock,
                    lambda: self._log.offset_at(
                        RESPONSES, number, max(0, bare.at_ms - MAX_REQUEST_LIFETIME_MS)
                    ),
                    until=self._clock.now() + END_CHECK_TIMEOUT_S,
                )
            except BrokerUnavailable as e:
                reply.fail(e)
                return
            if reply.start > max(born, oldest):
                self._read_again(number, reply, max(born, oldest))
            elif born > oldest or is_later:
                reply.accept_end()
            else:
                self._seek_beginning(number, reply)

    def _read_again(self, number: int, reply: Reply, start: int) -> None:
        """Restart at an earlier offset: the time in the id was wrong, or may be."""
        before = reply.start
        self._take_out(number, reply)
        reply.restart(start)
        live = self._live.lanes.get(number)
        self._history.catch_up(number, start, reply, live.position if live else before)

    def _seek_beginning(self, number: int, reply: Reply) -> None:
        """Restart from the oldest offset, or fail if the beginning is not there either."""
        assert reply.attached is not None, "others begin at the live position"
        oldest = reply.attached.oldest
        if reply.start > oldest:
            self._read_again(number, reply, oldest)
        elif oldest > 0:
            self._give_up(reply, PositionLost(RESPONSES, number, oldest - 1, oldest))
        elif not reply.is_missing_start:
            self._give_up(reply, NotFound(f"no record of {reply.request_id} in the log"))

    def _give_up(self, reply: Reply, error: Exception) -> None:
        reply.fail(error)
        self.detach(reply)

    def _move_to_live(self, number: int, lane: PartitionTail) -> bool:
        """Move replies to the live reader if their lane has caught up with it."""
        live = self._live.lanes.get(number) or self._live.open_lane(number, lane.position)
        live.idle_since = self._clock.now()  # replies are about to join it
        if lane.position < live.position:
            return False
        for reply in lane.all_replies():
            live.add(reply)
        return True

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        for reply in (*self._live.all_replies(), *self._history.all_replies()):
            reply.fail(error)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
