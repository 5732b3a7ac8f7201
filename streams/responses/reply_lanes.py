"""Readers of lanes of `responses`: the live one, and the catch-up reader for earlier beginnings.

The live reader has lanes with awaited replies, and pinned ones; it never seeks back.

    catch_up ──► queue of lanes ──► pass: from the lowest start up to the live position ──► live

A pass reads one lane once for all replies that wait for it or join it before it passes their start.
Starts far back have separate passes, so that a reply of the last minute does not wait for them.
MAX_PASSES run at once; the caller bounds the waiting replies.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvlane.streams.clock import BrokerClock, Clock
from kvlane.streams.errors import PositionLost
from kvlane.streams.ports import Log, Partition, Reader, Record, Unreadable
from kvlane.streams.responses.reply_stream import NO_OFFSET, Reply
from kvlane.streams.topics import RESPONSES

LIVE_POLL_S = 0.5
RECORDS_PER_POLL = 2000


class PartitionTail:
    """One partition of `responses`, with the replies that are awaited in it."""

    def __init__(self, position: int, now: float) -> None:
        self.position = position
        self.replies: dict[bytes, list[Reply]] = {}
        self._unseen: dict[Reply, None] = {}
        self.idle_since = now
        self.is_pinned = False
        """Whether it is read even if no reply is awaited in it."""

    def add(self, reply: Reply) -> None:
        self.replies.setdefault(reply.key, []).append(reply)
        if reply.expected_before < NO_OFFSET and not reply.has_begun:
            self._unseen[reply] = None

    def remove(self, reply: Reply) -> None:
        self._unseen.pop(reply, None)
        awaiting = self.replies.get(reply.key, [])
        if reply in awaiting:
            awaiting.remove(reply)
            if not awaiting:
                del self.replies[reply.key]

    def apply(self, records: Sequence[Record]) -> list[Reply]:
        """Feed records in offset order; returns the replies for which the reader must act."""
        unsettled: dict[Reply, None] = {}
        for record in records:
            if record.key is not None and (awaiting := self.replies.get(record.key)) is not None:
                for reply in awaiting:
                    if reply.apply(record):
                        unsettled[reply] = None
            elif record.key is None and isinstance(record.value, Unreadable):
                for reply in self.all_replies():
                    reply.suspect(record)
        self.position = records[-1].offset + 1
        return list(unsettled)

    def overdue(self, now: float) -> list[Reply]:
        """Replies without a record although the position has passed the offset where one was
        due."""
        if not self._unseen:
            return []
        self._unseen = {reply: None for reply in self._unseen if not reply.has_begun}
        return [
            r
            for r in self._unseen
            if r.expected_before <= self.position and r.may_begin_until <= now
        ]

    def all_replies(self) -> list[Reply]:
        return [reply for awaiting in self.replies.values() for reply in awaiting]


class LiveReader:
    def __init__(
        self, reader: Reader, clock: Clock, linger_s: float, broker_clock: BrokerClock
    ) -> None:
        """`linger_s`: time that a lane is read after its last reply."""
        self.lanes: dict[int, PartitionTail] = {}
        self.last_poll_at = clock.now()
        self._reader = reader
        self._clock = clock
        self._linger_s = linger_s
        self._broker_clock = broker_clock
        self._wanted = asyncio.Event()

    def open_lane(self, number: int, position: int) -> PartitionTail:
        """Start to read a lane at once, even during a poll."""
        assert number not in self.lanes, "an open lane has a position"
        lane = self.lanes[number] = PartitionTail(position, self._clock.now())
        self._assign()
        return lane

    def remove(self, number: int, reply: Reply) -> None:
        if (lane := self.lanes.get(number)) is not None:
            lane.remove(reply)
            lane.idle_since = self._clock.now()

    def all_replies(self) -> list[Reply]:
        return [reply for lane in self.lanes.values() for reply in lane.all_replies()]

    async def poll(self) -> list[tuple[int, Reply]]:
        """Feed new records; returns the replies for which the caller must act."""
        self._drop_idle()
        if not self.lanes:
            self._wanted.clear()
            await self._wanted.wait()
            self.last_poll_at = self._clock.now()
        try:
            batches = await self._reader.poll(LIVE_POLL_S, RECORDS_PER_POLL)
        except PositionLost as e:
            return self._lose(e)
        self.last_poll_at = self._clock.now()
        for records in batches.values():
            self._broker_clock.observe(records[-1].timestamp)
        return [
            (name.partition, reply)
            for name, records in batches.items()
            if (lane := self.lanes.get(name.partition)) is not None
            for reply in lane.apply(records)
        ]

    def overdue(self) -> list[tuple[int, Reply]]:
        """Overdue replies with their lanes, see `PartitionTail.overdue`."""
        now = self._clock.now()
        return [(n, reply) for n, lane in self.lanes.items() for reply in lane.overdue(now)]

    def _drop_idle(self) -> None:
        now = self._clock.now()
        idle = [
            number
            for number, lane in self.lanes.items()
            if not lane.replies and not lane.is_pinned and now - lane.idle_since >= self._linger_s
        ]
        for number in idle:
            del self.lanes[number]
        if idle:
            self._assign()

    def _lose(self, error: PositionLost) -> list[tuple[int, Reply]]:
        """Fail the replies of a lane whose records are gone, and continue with the others."""
        lane = self.lanes.pop(error.partition, None)
        self._assign()
        lost = lane.all_replies() if lane is not None else []
        for reply in lost:
            reply.fail(error)
        return [(error.partition, reply) for reply in lost]

    def _assign(self) -> None:
        positions = {Partition(RESPONSES, n): lane.position for n, lane in self.lanes.items()}
        self._reader.assign(positions)
        self._wanted.set()


MAX_PASSES = 4
"""Concurrent passes, so that a lane whose leader hangs delays few others."""
MAX_FAR_PASSES = 2
FAR_OFFSETS = 500_000
"""A start further below the live position is far back. Reading as many takes 1 to 2 s."""
PASS_POLL_S = 0.1
"""After this long without records a pass checks whether it has reached the live position."""
PASS_RECORDS = 1000
STALL_TIMEOUT_S = 5.0
"""A pass without progress for this long yields to another waiting lane."""

OnChanged = Callable[[int, PartitionTail, list[Reply]], Awaitable[None]]
"""Called with the lane number, the lane, and its changed replies."""
ReaderTask = Callable[[], Coroutine[Any, Any, None]]
TryMoveToLive = Callable[[int, PartitionTail], bool]
"""Moves the replies of a lane to the live reader; False before the pass has caught up."""


class PassKey(NamedTuple):
    """The key of a pass: a lane, and whether its starts are far back."""

    lane: int
    is_far: bool


class CatchUpReader:
    """The passes and the replies that wait for one. All of `reader_tasks` must be running."""

    def __init__(
        self, log: Log, clock: Clock, settle: OnChanged, move_to_live: TryMoveToLive
    ) -> None:
        self.readers = [log.reader() for _ in range(MAX_PASSES)]
        self.active_passes: dict[PassKey, PartitionTail] = {}
        self._waiting: dict[PassKey, dict[Reply, int]] = {}
        """Start offsets of waiting replies; keys in the order of their first reply."""
        self._clock = clock
        self._settle = settle
        self._move_to_live = move_to_live
        self._wanted = asyncio.Event()

    def reader_tasks(self) -> dict[str, ReaderTask]:
        """The reading tasks by name; each runs until cancelled, and raises its reader's errors."""
        return {f"history-{n}": partial(self._run, reader) for n, reader in enumerate(self.readers)}

    def catch_up(self, number: int, start: int, reply: Reply, live: int) -> None:
        """Feed a reply from `start`, which is below `live`, the live position of its lane."""
        queue = PassKey(number, live - start > FAR_OFFSETS)
        self._waiting.setdefault(queue, {})[reply] = start
        self._wanted.set()

    def remove(self, number: int, reply: Reply) -> None:
        for is_far in (False, True):
            queue = PassKey(number, is_far)
            if (lane := self.active_passes.get(queue)) is not None:
                lane.remove(reply)
            if (waiting := self._waiting.get(queue)) is not None:
                waiting.pop(reply, None)
                if not waiting:
                    del self._waiting[queue]

    def all_replies(self) -> list[Reply]:
        read = [reply for lane in self.active_passes.values() for reply in lane.all_replies()]
        return read + [reply for waiting in self._waiting.values() for reply in waiting]

    async def _run(self, reader: Reader) -> None:
        while True:
            while (queue := self._next()) is None:
                self._wanted.clear()
                await self._wanted.wait()
            waiting = self._waiting.pop(queue)
            lane = self.active_passes[queue] = PartitionTail(
                min(waiting.values()), self._clock.now()
            )
            for reply in waiting:
                lane.add(reply)
            try:
                await self._read(reader, queue, lane)
            finally:
                del self.active_passes[queue]
                self._wanted.set()  # wake passes that had to wait for this one

    def _next(self) -> PassKey | None:
        """The longest waiting key that may have a pass now."""
        far = sum(queue.is_far for queue in self.active_passes)
        for queue in self._waiting:
            if queue not in self.active_passes and (not queue.is_far or far < MAX_FAR_PASSES):
                return queue
        return None

    async def _read(self, reader: Reader, queue: PassKey, lane: PartitionTail) -> None:
        """One pass: until the live reader has taken over all replies, or none is left."""
        source = Partition(RESPONSES, queue.lane)
        reader.assign({source: lane.position}, lane.replies)
        moved_at = self._clock.now()
        try:
            while lane.replies:
                self._join(queue, lane)
                before = lane.position
                try:
                    batches = await reader.poll(PASS_POLL_S, PASS_RECORDS)
                except PositionLost as e:
                    await self._lose(queue, lane, e)
                    return
                changed = lane.apply(batches[source]) if source in batches else []
                lane.position = max(lane.position, reader.position(source))
                await self._settle(queue.lane, lane, changed)
                if self._move_to_live(queue.lane, lane):
                    return
                if lane.position > before:
                    moved_at = self._clock.now()
                elif self._clock.now() - moved_at >= STALL_TIMEOUT_S and self._next() is not None:
                    self._put_back(queue, lane)
                    return
        finally:
            reader.assign({})

    def _join(self, queue: PassKey, lane: PartitionTail) -> None:
        """Add waiting replies to a pass that has not passed their start. Only between two polls:
        during one the reader has skipped records beyond the position."""
        for is_far in (False, True):
            waiting = self._waiting.get(PassKey(queue.lane, is_far), {})
            last = sys.maxsize if is_far == queue.is_far else lane.position + FAR_OFFSETS
            for reply in [r for r, start in waiting.items() if lane.position <= start <= last]:
                self.remove(queue.lane, reply)
                lane.add(reply)

    async def _lose(self, queue: PassKey, lane: PartitionTail, error: PositionLost) -> None:
        """The start of the log has moved past the position of the pass. Replies without visible
        records restart there: the deleted records may be of others."""
        lost = []
        for reply in lane.all_replies():
            if reply.has_begun or error.wanted >= error.start:
                reply.fail(error)
                lost.append(reply)
            elif reply.start < error.start:
                reply.restart_truncated(error.start)
        await self._settle(queue.lane, lane, lost)
        lane.position = error.start
        self._put_back(queue, lane)

    def _put_back(self, queue: PassKey, lane: PartitionTail) -> None:
        """Let the replies wait for another pass, from the position of this one."""
        if rest := {reply: max(reply.start, lane.position) for reply in lane.all_replies()}:
            self._waiting.setdefault(queue, {}).update(rest)
