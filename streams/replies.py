"""Reading `responses` for all replies of one client, with two readers however many there are.

The *live* reader tails the lanes in which replies are awaited, each from the end that it had when
it was opened. A reply that begins earlier (somebody attaches to a request under way) must not hold
the others up while an hour of a lane is read: the *history* reader reads that lane again, from
where the reply begins, and hands the reply over when it has come as far as the live reader.

Owns positions and who awaits what. Decides nothing about text (`streams/reply.py`), commits
nothing, belongs to no group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from streams.clock import Clock
from streams.errors import BrokerUnavailable, LogClosed, PositionLost
from streams.ids import issued_ms
from streams.patience import until_answered
from streams.ports import Log, Partition, Reader, Record
from streams.records import EndCode
from streams.reply import NEVER, BareEnd, Reply
from streams.topics import BY_NAME, RESPONSES, lane_of

POLL_S = 0.5
RECORDS_PER_POLL = 2000
LINGER_S = 60.0
"""A lane is read on for so long after its last reply: the next request in it need not wait for a
new reading position then, which costs up to a fetch under way."""

CLOCK_MARGIN_MS = 300_000
"""How far the clock of whoever drew an id may be ahead of the broker's. Reading five minutes of a
lane more takes a fraction of a second."""

LONGEST_LIFE_MS = (BY_NAME[RESPONSES].retention_ms or 0) // 2
"""No request lives longer: the settings see to it."""

AT_THE_DOOR: frozenset[EndCode] = frozenset({"refused", "invalid", "too_large", "queue_full"})
"""Ends of requests of which no token can have been shown."""

JUDGE_S = 10.0
"""What a question about the end of a reply may take; the other replies wait for it."""


class Stretch(NamedTuple):
    """Offsets of one lane: where to look for a request, the oldest one kept, and the end."""

    start: int
    oldest: int
    end: int


class Attached(NamedTuple):
    """The oldest offset of the lane of a reply, and whether something of it was visible before."""

    oldest: int
    begun: bool


class Lane:
    """One partition of `responses` as one reader sees it."""

    def __init__(self, position: int, now: float) -> None:
        self.position = position
        self.replies: dict[bytes, list[Reply]] = {}
        self._due: dict[Reply, None] = {}
        self.idle_since = now
        self.kept = False
        """Whether it is read on however long nothing is awaited in it."""

    def add(self, reply: Reply) -> None:
        """Feed this reply, too."""
        self.replies.setdefault(reply.key, []).append(reply)
        if reply.due < NEVER and not reply.begun:
            self._due[reply] = None

    def remove(self, reply: Reply) -> None:
        """Feed it no more; ignored when it is not here."""
        self._due.pop(reply, None)
        awaiting = self.replies.get(reply.key, [])
        if reply in awaiting:
            awaiting.remove(reply)
            if not awaiting:
                del self.replies[reply.key]

    def clear(self) -> None:
        """Feed nobody any more."""
        self.replies.clear()
        self._due.clear()

    def take(self, records: Sequence[Record]) -> list[Reply]:
        """Feed records in offset order; the replies that changed."""
        changed: dict[Reply, None] = {}
        for record in records:
            if record.key is not None and (awaiting := self.replies.get(record.key)) is not None:
                for reply in awaiting:
                    reply.feed(record)
                    changed[reply] = None
        self.position = records[-1].offset + 1
        return list(changed)

    def missing(self) -> list[Reply]:
        """Replies of which nothing came, although the lane was read beyond where something stood.

        Looks at those only of which nothing has come so far: that is asked after every poll.
        """
        if not self._due:
            return []
        self._due = {reply: None for reply in self._due if not reply.begun}
        return [reply for reply in self._due if reply.due <= self.position]

    def all(self) -> list[Reply]:
        """Everything that is awaited here."""
        return [reply for awaiting in self.replies.values() for reply in awaiting]


class Tail:
    """A reader and its lanes."""

    def __init__(self, reader: Reader, clock: Clock, linger_s: float) -> None:
        self.lanes: dict[int, Lane] = {}
        self.polled_at = clock.now()
        self._reader = reader
        self._clock = clock
        self._linger_s = linger_s
        self._back: list[tuple[int, int, Reply]] = []
        self._wanted = asyncio.Event()

    def open(self, number: int, position: int) -> Lane:
        """Start to read a lane at once, also while a poll is under way."""
        assert number not in self.lanes, "an open lane has a position"
        lane = self.lanes[number] = Lane(position, self._clock.now())
        self._assign()
        return lane

    def read_from(self, number: int, start: int, reply: Reply) -> None:
        """Feed a reply from `start` on; the lane is read again from there if need be."""
        lane = self.lanes.get(number) or self.open(number, start)
        if start >= lane.position:
            lane.add(reply)
        else:  # not before the poll under way has come back, which would move the position on
            self._back.append((number, start, reply))

    def remove(self, number: int, reply: Reply) -> None:
        """Feed a reply no more."""
        if (lane := self.lanes.get(number)) is not None:
            lane.remove(reply)
            lane.idle_since = self._clock.now()
        self._back = [waiting for waiting in self._back if waiting[2] is not reply]

    def all(self) -> list[Reply]:
        """Everything that is awaited."""
        here = [reply for lane in self.lanes.values() for reply in lane.all()]
        return here + [reply for _, _, reply in self._back]

    async def poll(self) -> list[tuple[int, Reply]]:
        """Feed what there is; the replies that changed. Waits without limit for a first lane."""
        self._go_back()
        self._drop_idle()
        if not self.lanes:
            self._wanted.clear()
            await self._wanted.wait()
            self.polled_at = self._clock.now()
        try:
            batches = await self._reader.poll(POLL_S, RECORDS_PER_POLL)
        except PositionLost as e:
            return self._lose(e)
        self.polled_at = self._clock.now()
        return [
            (name.partition, reply)
            for name, records in batches.items()
            if (lane := self.lanes.get(name.partition)) is not None
            for reply in lane.take(records)
        ]

    def missing(self) -> list[tuple[int, Reply]]:
        """Replies that the log has lost, as far as it was read, and their lanes."""
        return [(n, reply) for n, lane in self.lanes.items() for reply in lane.missing()]

    def _go_back(self) -> None:
        if not self._back:
            return
        back, self._back = self._back, []
        for number, start, reply in back:
            lane = self.lanes.get(number)
            if lane is None:
                lane = self.lanes[number] = Lane(start, self._clock.now())
            lane.position = min(lane.position, start)
            lane.add(reply)
        self._assign()

    def _drop_idle(self) -> None:
        now = self._clock.now()
        idle = [
            number
            for number, lane in self.lanes.items()
            if not lane.replies and not lane.kept and now - lane.idle_since >= self._linger_s
        ]
        for number in idle:
            del self.lanes[number]
        if idle:
            self._assign()

    def _lose(self, error: PositionLost) -> list[tuple[int, Reply]]:
        """Fail what is awaited in a lane whose records are gone, and go on with the others."""
        lane = self.lanes.pop(error.partition, None)
        self._assign()
        lost = lane.all() if lane is not None else []
        for reply in lost:
            reply.fail(error)
        return [(error.partition, reply) for reply in lost]

    def _assign(self) -> None:
        positions = {Partition(RESPONSES, n): lane.position for n, lane in self.lanes.items()}
        self._reader.assign(positions)
        self._wanted.set()


class Replies:
    """All replies that a client awaits; fed between `start` and `close`."""

    def __init__(self, log: Log, clock: Clock, lanes: int) -> None:
        self._log = log
        self._clock = clock
        self._lanes = lanes
        self._readers = (log.reader(), log.reader())
        self._live = Tail(self._readers[0], clock, LINGER_S)
        self._history = Tail(self._readers[1], clock, 0.0)
        self._attached: dict[Reply, Attached] = {}
        """Replies that began before they were asked for."""
        self._tasks: list[asyncio.Task[None]] = []
        self._error: Exception | None = None

    def start(self) -> None:
        """Begin to read."""
        runs = {"live": self._run(self._live), "history": self._run(self._history)}
        self._tasks = [asyncio.create_task(run, name=f"replies/{n}") for n, run in runs.items()]

    @property
    def polled_at(self) -> float:
        """When the live reader last came back from a poll; a point on the clock."""
        return self._live.polled_at

    async def watch(self) -> None:
        """Wait for what ends the reading, and raise it; for whoever must not outlive it."""
        await asyncio.gather(*self._tasks)

    async def keep(self, lanes: Iterable[int]) -> None:
        """Read these lanes from now on, whether replies are awaited in them or not.

        So the first request in a lane finds its reader there. Raises BrokerUnavailable.
        """
        numbers = list(lanes)
        ends = await self._log.end_offsets(RESPONSES, numbers)
        for number in numbers:
            lane = self._live.lanes.get(number) or self._live.open(number, ends[number])
            lane.kept = True

    async def close(self) -> None:
        """Stop reading; whatever is still awaited fails with LogClosed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reader in self._readers:
            await reader.close()
        self._fail(LogClosed("the client was closed"))

    async def from_now(self, request_id: str) -> Reply:
        """A reply that gets everything that is appended after this has returned.

        Raises BrokerUnavailable, or what ended the reading.
        """
        self._check()
        number = lane_of(request_id, self._lanes)
        lane = await self._open(number)
        reply = Reply(request_id, lane.position)
        lane.add(reply)
        return reply

    async def from_beginning(
        self, request_id: str, *, begun: bool = False, may_begin: bool = True
    ) -> Reply:
        """A reply from the request's first record on; it fails with PositionLost if that is gone.

        `begun`: something of it was visible before, so that a log without it has lost it. Who does
        not know that awaits a request of which nothing is left as one that has not begun, unless
        it is too old for that: without `may_begin` a log without it has lost it as well.

        Raises BrokerUnavailable, or what ended the reading.
        """
        self._check()
        number = lane_of(request_id, self._lanes)
        start, oldest, end = await self._beginning(request_id, number)
        lane = await self._open(number)
        doubts = begun or 0 < oldest == start
        due = end if begun or not may_begin else NEVER
        reply = Reply(request_id, start, due, doubts=doubts)
        self._attached[reply] = Attached(oldest, begun)
        if start >= lane.position:
            lane.add(reply)
        else:
            self._history.read_from(number, start, reply)
        return reply

    def leave(self, reply: Reply) -> None:
        """Nobody awaits this reply any more. Idempotent."""
        number = lane_of(reply.request_id, self._lanes)
        self._take_out(number, reply)
        self._attached.pop(reply, None)
        reply.rest()

    def _take_out(self, number: int, reply: Reply) -> None:
        self._live.remove(number, reply)
        self._history.remove(number, reply)

    async def _open(self, number: int) -> Lane:
        """The live lane; nothing that is appended from now on is missed in it."""
        if (lane := self._live.lanes.get(number)) is not None:
            return lane
        end = (await self._log.end_offsets(RESPONSES, [number]))[number]
        self._check()
        return self._live.lanes.get(number) or self._live.open(number, end)

    async def _beginning(self, request_id: str, number: int) -> Stretch:
        """Where a request's first record is to be looked for.

        An id without a time, or with one that the lane has not come to, gives the oldest: there is
        little to read in a lane that nothing was written to for minutes.
        """
        oldest = (await self._log.start_offsets(RESPONSES, [number]))[number]
        end = (await self._log.end_offsets(RESPONSES, [number]))[number]
        if (drawn_ms := issued_ms(request_id)) is not None:
            wanted_ms = max(0, drawn_ms - CLOCK_MARGIN_MS)
            start = await self._log.offset_at(RESPONSES, number, wanted_ms)
            if start < end:
                return Stretch(max(start, oldest), oldest, end)
        return Stretch(oldest, oldest, end)

    async def _run(self, tail: Tail) -> None:
        """Feed replies until cancelled; an error that waiting does not cure fails all of them."""
        try:
            while True:
                for number, reply in await tail.poll():
                    if reply.bare_end is not None:
                        await self._judge_end(number, reply, reply.bare_end)
                    if reply.over:
                        self.leave(reply)
                    elif reply.headless and reply in self._attached:
                        self._seek_beginning(number, reply)
                for number, reply in tail.missing():
                    self._seek_beginning(number, reply)
                if tail is self._history:
                    self._hand_over()
        except Exception as e:
            self._fail(e)
            raise

    async def _judge_end(self, number: int, reply: Reply, bare: BareEnd) -> None:
        """All that is there of a request is its End: was there text before it, which is gone?

        Whoever had some of it says so. Else there was none if the log still holds all of the time
        in which the request can have lived.
        """
        oldest, begun = self._attached[reply]
        if oldest == 0 or bare.end.code in AT_THE_DOOR:
            reply.believe()
        elif begun:
            self._seek_beginning(number, reply)
        else:
            try:
                born = await until_answered(
                    self._clock,
                    lambda: self._log.offset_at(RESPONSES, number, bare.at_ms - LONGEST_LIFE_MS),
                    until=self._clock.now() + JUDGE_S,
                )
            except BrokerUnavailable as e:
                reply.fail(e)
                return
            if born > oldest:
                reply.believe()
            else:
                self._seek_beginning(number, reply)

    def _seek_beginning(self, number: int, reply: Reply) -> None:
        """The time in the id was wrong, or the beginning is not in the log any more."""
        oldest = self._attached[reply].oldest
        if reply.start > oldest:
            self._take_out(number, reply)
            reply.restart(oldest)
            self._history.read_from(number, oldest, reply)
        elif oldest > 0:
            reply.fail(PositionLost(RESPONSES, number, oldest - 1, oldest))
            self.leave(reply)

    def _hand_over(self) -> None:
        """Replies whose lane was read as far as the live reader has come go on there."""
        for number, lane in self._history.lanes.items():
            live = self._live.lanes.get(number) or self._live.open(number, lane.position)
            if lane.position >= live.position:
                for reply in lane.all():
                    live.add(reply)
                lane.clear()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        for reply in (*self._live.all(), *self._history.all()):
            reply.fail(error)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
