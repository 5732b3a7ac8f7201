"""The live reader of `responses`: new records of lanes with awaited replies, and of pinned lanes.

Never seeks back: `streams/responses/catch_up_reader.py` feeds replies that begin before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvlane.streams.clock import BrokerClock, Clock
from kvlane.streams.errors import PositionLost
from kvlane.streams.ports import Partition, Reader, Record, Unreadable
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
        """Feed records in offset order; returns the replies for which the reader must act. Decodes
        awaited ones only."""
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
        """Replies without a record although the position has passed the offset where one was due.
        Called after every poll, so it checks only replies without a record so far."""
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
        """Feed new records; returns the replies for which the caller must act. Waits without limit
        for a first lane."""
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
