"""The follower of a materialized view: one loop that keeps any view up to date with the log.

It restores a snapshot if there is one, replays up to the end offsets at its start (*caught up*),
and continues; near the ends it may subscribe to the shared reader (`streams/views/tail_reader.py`).
State and position of a partition change in one step, `MaterializedView.apply`. A position covers
every offset below it: applied, skipped as malformed or deleted. A record for newer readers ends the
follower. If the log no longer has a position, the state of that partition is rebuilt. It never
writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heappush
from itertools import count

from kvlane.streams.clock import BrokerClock, Clock, retry_while_unavailable
from kvlane.streams.errors import LogClosed, PositionLost
from kvlane.streams.ports import POLL_S, Log, Partition
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.records import LogRecord
from kvlane.streams.views.snapshot_store import SnapshotStore
from kvlane.streams.views.tail_reader import (
    RECORDS_PER_POLL,
    DecodedBatch,
    TailReader,
    decode_batches,
    skip_gaps,
)
from kvlane.streams.views.view import FollowedView, MaterializedView

WaitKey = Partition | None


class OffsetWaiters:
    """Waits for offsets by source; a cancelled wait leaves nothing behind."""

    def __init__(self) -> None:
        self._heaps: dict[WaitKey, list[tuple[int, int, asyncio.Future[None]]]] = {}
        self._order = count()
        self._failure: Exception | None = None

    @property
    def pending_partitions(self) -> Collection[Partition]:
        return [source for source in self._heaps if source is not None]

    async def wait(self, source: WaitKey, offset: int) -> None:
        """Wait until this offset is reached. Raises the error given to `fail`."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (offset, next(self._order), future)
        heappush(self._heaps.setdefault(source, []), entry)
        try:
            await future
        except asyncio.CancelledError:
            self._remove(source, entry)
            raise

    def advance(self, source: WaitKey, offset: int) -> None:
        heap = self._heaps.get(source)
        if heap is None:
            return
        while heap and heap[0][0] <= offset:
            future = heappop(heap)[2]
            if not future.done():
                future.set_result(None)
        if not heap:
            del self._heaps[source]

    def fail(self, error: Exception) -> None:
        self._failure = error
        for heap in self._heaps.values():
            for _, _, future in heap:
                if not future.done():
                    future.set_exception(error)
        self._heaps.clear()

    def _remove(self, source: WaitKey, entry: tuple[int, int, asyncio.Future[None]]) -> None:
        heap = self._heaps.get(source, [])
        if entry in heap:
            heap.remove(entry)
            heapify(heap)
            if not heap:
                del self._heaps[source]


log = logging.getLogger(__name__)

JOIN_DISTANCE = RECORDS_PER_POLL
"""Offsets to the ends, and to the shared reader's position, at which a view joins it: one poll."""

StartOffset = Callable[[Partition], Awaitable[int]]
"""The first offset for a view without a snapshot; the start of the log if that is later."""
OnApplied = Callable[[Partition, Sequence[LogRecord]], None]


class Follower:
    """Keeps a view up to date with `sources`: topics (all their partitions) or single partitions.

    `on_applied` is called after each step; it must not block. `caught_up`: false again while a
    partition is rebuilt. `applied` and `malformed` count records; `rebuilds` and `restored`
    partitions.
    """

    def __init__(
        self,
        log: Log,
        view: FollowedView,
        sources: Sequence[str | Partition],
        clock: Clock,
        *,
        broker_clock: BrokerClock | None = None,
        start: StartOffset | None = None,
        snapshots: SnapshotStore | None = None,
        on_applied: OnApplied | None = None,
        tail: TailReader | None = None,
    ) -> None:
        self._log = log
        self._view = view
        self._wanted = tuple(sources)
        self._clock = clock
        self._broker_clock = broker_clock
        self._start = start
        self._snapshots = snapshots
        self._on_applied = on_applied
        self._tail = tail
        self._decoder = RecordDecoder(log, clock)
        self._barriers = OffsetWaiters()
        self._applying = asyncio.Lock()
        self._behind: dict[Partition, int] = {}  # end offsets that are not reached yet
        self._followed: frozenset[Partition] = frozenset()
        self.sources: tuple[Partition, ...] = ()
        self.caught_up = False
        self.applied = 0
        self.malformed = 0
        self.rebuilds = 0
        self.restored = 0

    async def wait_caught_up(self) -> None:
        """Wait for `caught_up`; the caller sets the deadline. Raises the follower's error."""
        if not self.caught_up:
            await self._barriers.wait(None, 1)

    async def wait_for(self, source: Partition, offset: int) -> None:
        """Wait until everything below `offset` is applied. Raises the error that ended the
        follower, LogClosed if it was stopped, ValueError for a partition that is not followed."""
        if self.sources and source not in self._followed:
            raise ValueError(
                f"{self._view.name} does not follow {source.topic}[{source.partition}]"
            )
        position = self._view.position(source)
        if position is None or position < offset:
            await self._barriers.wait(source, offset)

    def positions(self) -> dict[Partition, int]:
        found = {source: self._view.position(source) for source in self.sources}
        return {source: at for source, at in found.items() if at is not None}

    async def ends(self) -> dict[Partition, int]:
        """The current end offsets of the partitions. Raises BrokerUnavailable."""
        return await self._offsets(self.sources, self._log.end_offsets)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Apply nothing meanwhile, so that a thread may read state and position."""
        async with self._applying:
            yield

    @property
    def remaining_offsets(self) -> int:
        """Number of offsets still to be read until `caught_up`."""
        position = self._view.position
        return sum(max(0, end - (position(s) or 0)) for s, end in self._behind.items())

    async def run(self) -> None:
        """Restore, replay, then follow the log until cancelled. Raises NewerRecord, TopicMismatch,
        AccessDenied, and errors of the view and of `on_applied`."""
        reason: Exception = LogClosed(f"following for {self._view.name} was stopped")
        try:
            await retry_while_unavailable(self._clock, self._find_sources)
            await retry_while_unavailable(self._clock, lambda: self._place(self.sources))
            while True:
                try:
                    await self._read_alone()
                    await self._read_shared()
                except PositionLost as e:
                    await self._rebuild(e)
        except Exception as e:
            reason = e
            raise
        finally:
            self.caught_up = False
            self._barriers.fail(reason)

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
        """Set a position that the log can serve in each partition, and note the end offsets."""
        view = self._view
        if self._snapshots is not None:
            assert isinstance(view, MaterializedView)
            new = [source for source in sources if view.position(source) is None]
            if new:
                self.restored += len(await self._snapshots.load(view, *new))
        starts = await self._offsets(sources, self._log.start_offsets)
        ends = await self._offsets(sources, self._log.end_offsets)
        for source in sources:
            start, end = starts[source], ends[source]
            position = view.position(source)
            if position is not None and not start <= position <= end:
                log.warning(
                    "%s: %s[%d] has offsets %d to %d, but the view is at %d: dropping its state",
                    view.name, *source, start, end, position,
                )  # fmt: skip
                view.forget(source)
                position = None
            if position is None:
                if self._start is not None:
                    start = min(max(start, await self._start(source)), end)
                view.apply(source, (), start)
        self._behind |= ends
        for source, position in self.positions().items():
            self._moved(source, position)

    async def _offsets(
        self,
        sources: Sequence[Partition],
        offsets_of: Callable[[str, Sequence[int]], Awaitable[Mapping[int, int]]],
    ) -> dict[Partition, int]:
        topics: dict[str, list[int]] = {}
        for topic, partition in sources:
            topics.setdefault(topic, []).append(partition)
        offsets: dict[Partition, int] = {}
        for topic, partitions in topics.items():
            answer = await offsets_of(topic, partitions)
            offsets |= {Partition(topic, p): offset for p, offset in answer.items()}
        return offsets

    # --- reading ---

    async def _read_alone(self) -> None:
        """Read with a reader of its own until the shared one is near; for ever without one."""
        if self._is_near_tail():
            return
        reader = self._log.reader(moving=False)
        try:
            reader.assign(self.positions())
            while not self._is_near_tail():
                polled = await reader.poll(POLL_S, RECORDS_PER_POLL)
                batches = await decode_batches(self._decoder, polled)
                async with self._applying:
                    self._apply(batches)
                    if awaited := self._awaited():
                        self._apply(skip_gaps(reader, self.positions(), awaited))
                await self._clock.sleep(0)
        finally:
            await reader.close()

    async def _read_shared(self) -> None:
        """Take the records from the shared reader; returns when this view has fallen behind."""
        assert self._tail is not None, "without it a view reads alone"
        with self._tail.subscribe(self.positions(), self._awaited) as subscription:
            while (batches := await subscription.next()) is not None:
                async with self._applying:
                    self._apply(batches)
                await self._clock.sleep(0)

    def _is_near_tail(self) -> bool:
        if self._tail is None or self.remaining_offsets > JOIN_DISTANCE:
            return False
        return self._tail.distance(self.positions()) <= JOIN_DISTANCE

    def _awaited(self) -> Sequence[Partition]:
        """Partitions in which an offset is awaited, whose last offsets may have been deleted."""
        return list(dict.fromkeys((*self._behind, *self._barriers.pending_partitions)))

    def _apply(self, batches: Sequence[DecodedBatch]) -> None:
        for batch in batches:
            source = batch.source
            position = self._view.position(source) or 0
            if batch.position <= position:
                continue  # fetched again by the client, or read again for another view
            _, records, log_records, end = batch.after(position)
            self.applied += len(log_records)
            self.malformed += len(records) - len(log_records)
            if records and self._broker_clock is not None:
                self._broker_clock.observe(records[-1].timestamp)
            self._take(source, log_records, end)

    def _take(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        self._view.apply(source, log_records, position)
        if log_records and self._on_applied is not None:
            self._on_applied(source, log_records)
        self._moved(source, position)

    def _moved(self, source: Partition, position: int) -> None:
        end = self._behind.get(source)
        if end is not None and position >= end:
            del self._behind[source]
        if not self._behind and not self.caught_up:
            self.caught_up = True
            log.info(
                "%s caught up: %d records read, %d partitions from snapshots",
                self._view.name,
                self.applied,
                self.restored,
            )
            self._barriers.advance(None, 1)
        self._barriers.advance(source, position)

    async def _rebuild(self, lost: PositionLost) -> None:
        log.warning("rebuilding %s: %s", self._view.name, lost)
        source = Partition(lost.topic, lost.partition)
        self.rebuilds += 1
        self.caught_up = False
        async with self._applying:
            self._view.forget(source)
            await retry_while_unavailable(self._clock, lambda: self._place((source,)))
