"""Following the log: one loop that keeps any fold up to date.

A `Fold` is a pure state machine over the records of some partitions. A `Follower` restores it from
a snapshot where there is one, replays to the end offsets it read before its first poll (it is
*caught up* then), and goes on with what is appended. A partition's state and its position change
in one step, `Fold.apply`; there is no other record of how far it is.

The position of a partition counts every offset below it as seen: applied, skipped because its
bytes are malformed (counted), or gone from the log. A record of an unknown type ends the follower,
since the fold would be wrong from there on. A position that the log no longer has means that
records were missed: that partition's state is dropped and built again, never carried on.

Never here: deciding anything, committing anything, belonging to a group, or writing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from streams.barriers import Barriers
from streams.clock import BrokerClock, Clock
from streams.codecs import decode
from streams.errors import LogClosed, Malformed, PositionLost
from streams.patience import until_answered
from streams.ports import Log, Partition, Reader, Record
from streams.records import Fact

if TYPE_CHECKING:
    from streams.snapshots import Snapshots

log = logging.getLogger(__name__)

POLL_S = 1.0
RECORDS_PER_POLL = 500
"""Decoded and applied without a pause, at 2-5 microseconds each: the loop is held for 1-3 ms."""


class Fold(Protocol):
    """State that is a function of the records below its positions, and of nothing else."""

    @property
    def name(self) -> str:
        """What its snapshots are filed under."""

    def apply(self, source: Partition, facts: Sequence[Fact], position: int) -> None:
        """Take the next records of a partition; `position` is the next offset after them.

        `facts` is in offset order, and empty when only the position moves.
        """

    def position(self, source: Partition) -> int | None:
        """The next offset of a partition; None before its first apply or restore."""

    def forget(self, source: Partition) -> None:
        """Drop what came from this partition, its position too."""

    def snapshot(self, source: Partition) -> bytes:
        """The state that came from this partition."""

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        """The inverse of `snapshot`. Raises ValueError for data it cannot use."""

    def state_hash(self, source: Partition) -> str:
        """Equal for equal state, whatever way it was reached."""


Start = Callable[[Partition], Awaitable[int]]
"""Where a fold without a snapshot begins in a partition; the log's start when that is later."""
Applied = Callable[[Partition, Sequence[Fact]], None]


class Follower:
    """Keeps a fold up to date with `sources`: topics (all their partitions) or single partitions.

    `on_applied` is called after each step, on the event loop; it must not block. `caught_up` is
    true from reaching the ends seen at the start on, except while a partition is built again.
    `applied` and `malformed` count records; `rebuilt` partitions that were built again, `restored`
    those that came from snapshots.
    """

    def __init__(
        self,
        log: Log,
        fold: Fold,
        sources: Sequence[str | Partition],
        clock: Clock,
        *,
        broker_clock: BrokerClock | None = None,
        start: Start | None = None,
        snapshots: Snapshots | None = None,
        on_applied: Applied | None = None,
    ) -> None:
        self._log = log
        self._fold = fold
        self._wanted = tuple(sources)
        self._clock = clock
        self._broker_clock = broker_clock
        self._start = start
        self._snapshots = snapshots
        self._on_applied = on_applied
        self._barriers = Barriers()
        self._applying = asyncio.Lock()
        self._behind: dict[Partition, int] = {}  # the ends that are still to be reached
        self._followed: frozenset[Partition] = frozenset()
        self.sources: tuple[Partition, ...] = ()
        self.caught_up = False
        self.applied = 0
        self.malformed = 0
        self.rebuilt = 0
        self.restored = 0

    async def wait_caught_up(self) -> None:
        """Wait for `caught_up`; the caller sets the deadline. Raises what ended the follower."""
        if not self.caught_up:
            await self._barriers.wait(None, 1)

    async def wait_for(self, source: Partition, offset: int) -> None:
        """Wait until everything below `offset` is applied; the caller sets the deadline.

        Raises what ended the follower, LogClosed when it was stopped; ValueError for a partition
        that is not followed.
        """
        if self.sources and source not in self._followed:
            raise ValueError(
                f"{self._fold.name} does not follow {source.topic}[{source.partition}]"
            )
        position = self._fold.position(source)
        if position is None or position < offset:
            await self._barriers.wait(source, offset)

    def positions(self) -> dict[Partition, int]:
        """The next offset of each partition that has one."""
        found = {source: self._fold.position(source) for source in self.sources}
        return {source: at for source, at in found.items() if at is not None}

    async def ends(self) -> dict[Partition, int]:
        """Where the partitions end now. Raises BrokerUnavailable."""
        return await self._offsets(self.sources, self._log.end_offsets)

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """While this is held, nothing is applied: a thread may read state and position."""
        async with self._applying:
            yield

    @property
    def left(self) -> int:
        """How many offsets are still to be read until `caught_up`."""
        position = self._fold.position
        return sum(max(0, end - (position(s) or 0)) for s, end in self._behind.items())

    async def run(self) -> None:
        """Restore, replay, then follow the log until cancelled; once.

        Raises UnknownType, TopicsDiffer, Denied, and what the fold or `on_applied` raise.
        """
        reason: Exception = LogClosed(f"following for {self._fold.name} was stopped")
        reader = self._log.reader(moving=False)
        try:
            await until_answered(self._clock, self._find_sources)
            await until_answered(self._clock, lambda: self._place(self.sources))
            self._assign(reader)
            while True:
                await self._advance(reader)
        except Exception as e:
            reason = e
            raise
        finally:
            self.caught_up = False
            self._barriers.fail(reason)
            await reader.close()

    # --- before reading ---

    async def _find_sources(self) -> None:
        sources: list[Partition] = []
        for wanted in self._wanted:
            if isinstance(wanted, Partition):
                sources.append(wanted)
            else:
                count = await self._log.partitions(wanted)
                sources += [Partition(wanted, p) for p in range(count)]
        self.sources = tuple(sources)
        self._followed = frozenset(sources)

    async def _place(self, sources: Sequence[Partition]) -> None:
        """Give the fold a position in each partition that the log can serve; note the ends."""
        fold = self._fold
        if self._snapshots is not None:
            new = [source for source in sources if fold.position(source) is None]
            if new:
                self.restored += len(await self._snapshots.load(fold, *new))
        starts = await self._offsets(sources, self._log.start_offsets)
        ends = await self._offsets(sources, self._log.end_offsets)
        for source in sources:
            start, end = starts[source], ends[source]
            position = fold.position(source)
            if position is not None and not start <= position <= end:
                log.warning(
                    "%s: %s[%d] has offsets %d to %d, but the fold stands at %d: dropping it",
                    fold.name, *source, start, end, position,
                )  # fmt: skip
                fold.forget(source)
                position = None
            if position is None:
                if self._start is not None:
                    start = min(max(start, await self._start(source)), end)
                fold.apply(source, (), start)
        self._behind |= ends

    async def _offsets(
        self,
        sources: Sequence[Partition],
        ask: Callable[[str, Sequence[int]], Awaitable[Mapping[int, int]]],
    ) -> dict[Partition, int]:
        topics: dict[str, list[int]] = {}
        for topic, partition in sources:
            topics.setdefault(topic, []).append(partition)
        offsets: dict[Partition, int] = {}
        for topic, partitions in topics.items():
            answer = await ask(topic, partitions)
            offsets |= {Partition(topic, p): offset for p, offset in answer.items()}
        return offsets

    def _assign(self, reader: Reader) -> None:
        positions = {source: self._fold.position(source) for source in self.sources}
        reader.assign({s: p for s, p in positions.items() if p is not None})
        for source, position in positions.items():
            assert position is not None
            self._moved(source, position)

    # --- reading ---

    async def _advance(self, reader: Reader) -> None:
        try:
            batches = await reader.poll(POLL_S, RECORDS_PER_POLL)
        except PositionLost as e:
            await self._rebuild(reader, e)
            return
        async with self._applying:
            for source, records in batches.items():
                self._apply(source, records)
            for source in dict.fromkeys((*self._behind, *self._barriers.waited_for)):
                if source not in self._followed:
                    continue
                # Its last offsets may be gone from the log: no record will carry us over them.
                if (position := reader.position(source)) > (self._fold.position(source) or 0):
                    self._take(source, (), position)
        await self._clock.sleep(0)

    def _apply(self, source: Partition, records: Sequence[Record]) -> None:
        position = self._fold.position(source) or 0
        facts: list[Fact] = []
        malformed = 0
        for record in records:
            if record.offset < position:
                continue  # fetched again by the client
            try:
                facts.append(Fact(record.offset, record.timestamp, decode(record)))
            except Malformed as e:
                malformed += 1
                if malformed == 1:
                    log.warning("%s[%d]@%d skipped: %s", *source, record.offset, e)
        last = records[-1]
        if last.offset < position:
            return
        self.applied += len(facts)
        self.malformed += malformed
        if self._broker_clock is not None:
            self._broker_clock.observe(last.timestamp)
        self._take(source, facts, last.offset + 1)

    def _take(self, source: Partition, facts: Sequence[Fact], position: int) -> None:
        self._fold.apply(source, facts, position)
        if facts and self._on_applied is not None:
            self._on_applied(source, facts)
        self._moved(source, position)

    def _moved(self, source: Partition, position: int) -> None:
        end = self._behind.get(source)
        if end is not None and position >= end:
            del self._behind[source]
        if not self._behind and not self.caught_up:
            self.caught_up = True
            log.info(
                "%s caught up: %d records read, %d partitions from snapshots",
                self._fold.name, self.applied, self.restored,
            )  # fmt: skip
            self._barriers.reach(None, 1)
        self._barriers.reach(source, position)

    async def _rebuild(self, reader: Reader, lost: PositionLost) -> None:
        log.warning("%s is built again: %s", self._fold.name, lost)
        source = Partition(lost.topic, lost.partition)
        self.rebuilt += 1
        self.caught_up = False
        async with self._applying:
            self._fold.forget(source)
            await until_answered(self._clock, lambda: self._place((source,)))
        self._assign(reader)
