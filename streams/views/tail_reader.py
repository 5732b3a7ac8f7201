"""The reader that the views of one process share once they are near the ends of their partitions.

It reads and decodes every record once, from the lowest position, into a bounded queue of each
subscriber. One that falls behind loses its subscription, not its place: it reads alone, and joins
again near the end. So a slow view never holds up another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvlane.streams.clock import Clock
from kvlane.streams.errors import LogClosed, PositionLost
from kvlane.streams.ports import POLL_S, Batches, Log, Partition, Reader, Record
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.records import LogRecord

RECORDS_PER_POLL = 500
"""Decoded and applied without yielding, at 2-5 us each: the event loop is blocked for 1-3 ms."""
GATHER_S = 0.02
"""Records arrive up to so much later, the first ones after a pause at once."""
AWAITED_GATHER_S = 0.003
"""While records are awaited (docs/benchmarks.md)."""
MAX_QUEUED_RECORDS = 4 * RECORDS_PER_POLL
"""Records that wait for one subscriber; more only if it is paused or slow."""


class DecodedBatch(NamedTuple):
    """Consecutive records of one partition, to before offset `position`; decoded in
    `log_records`."""

    source: Partition
    records: Sequence[Record]
    log_records: Sequence[LogRecord]
    position: int

    def after(self, position: int) -> DecodedBatch:
        """Without the records below a position."""
        if not self.records or self.records[0].offset >= position:
            return self
        return self._replace(
            records=[record for record in self.records if record.offset >= position],
            log_records=[r for r in self.log_records if r.offset >= position],
        )


async def decode_batches(decoder: RecordDecoder, batches: Batches) -> list[DecodedBatch]:
    """Decode the result of a poll. Raises NewerRecord."""
    return [
        DecodedBatch(
            source, records, await decoder.decode_records(source, records), records[-1].offset + 1
        )
        for source, records in batches.items()
    ]


def skip_gaps(
    reader: Reader, positions: Mapping[Partition, int], awaited: Collection[Partition]
) -> list[DecodedBatch]:
    """Empty batches for awaited partitions whose next offsets were deleted: no record follows."""
    return [
        DecodedBatch(source, (), (), position)
        for source in awaited
        if source in positions and (position := reader.position(source)) > positions[source]
    ]


class TailSubscription:
    """The queue of one subscriber, from `TailReader.subscribe`."""

    def __init__(
        self, positions: Mapping[Partition, int], awaited: Callable[[], Collection[Partition]]
    ) -> None:
        self.positions = dict(positions)
        """By partition, the offset after the last record that was queued."""
        self._awaited = awaited
        self._queue: list[DecodedBatch] = []
        self._queued_records = 0
        self._error: Exception | None = None
        self._is_behind = False
        self._changed = asyncio.Event()

    async def next(self) -> list[DecodedBatch] | None:
        """The next batches; None when this subscriber fell behind and must read alone. Raises
        PositionLost, and the error that ended the tail reader."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error
        if self._is_behind:
            return None
        self._changed.clear()
        batches, self._queue, self._queued_records = self._queue, [], 0
        return batches

    def put(self, batches: Sequence[DecodedBatch], reader: Reader) -> bool:
        """Queue its part of a poll; False if the queue has no room for it."""
        positions = self.positions
        mine = [b for b in batches if b.source in positions and b.position > positions[b.source]]
        positions.update((batch.source, batch.position) for batch in mine)
        if awaited := self._awaited():
            gaps = skip_gaps(reader, positions, awaited)
            positions.update((batch.source, batch.position) for batch in gaps)
            mine += gaps
        if not mine:
            return True
        self._queue += mine
        self._queued_records += sum(len(batch.records) for batch in mine)
        self._changed.set()
        if self._queued_records > MAX_QUEUED_RECORDS:
            self._is_behind = True
            self._queue.clear()
        return not self._is_behind

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()


class TailReader:
    """One reader for all views of a process; `run` is one of its background tasks."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._decoder = RecordDecoder(log, clock)
        self._reader: Reader | None = None
        self._subscriptions: dict[TailSubscription, None] = {}
        self._wanted = asyncio.Event()
        self._error: Exception | None = None
        self._awaited = 0

    def distance(self, positions: Mapping[Partition, int]) -> int:
        """Number of offsets that would be read again for a subscriber at these positions."""
        mine = self._positions()
        return sum(max(0, mine.get(source, at) - at) for source, at in positions.items())

    @contextmanager
    def subscribe(
        self, positions: Mapping[Partition, int], awaited: Callable[[], Collection[Partition]]
    ) -> Iterator[TailSubscription]:
        """Queue the records from these positions on, until the end of the context. `awaited`:
        partitions in which a gap at the end is of interest, asked after every poll."""
        subscription = TailSubscription(positions, awaited)
        if self._error is not None:
            subscription.fail(self._error)
        self._subscriptions[subscription] = None
        self._assign()
        try:
            yield subscription
        finally:
            self._remove(subscription)

    def count_awaited(self, change: int) -> None:
        """Add to the number of waits for records; while there are any, records arrive sooner."""
        before = self._gather_s
        self._awaited += change
        assert self._awaited >= 0, "each is subtracted once"
        if self._reader is not None and self._gather_s != before:
            self._reader.set_gather_s(self._gather_s)

    @property
    def _gather_s(self) -> float:
        return AWAITED_GATHER_S if self._awaited else GATHER_S

    async def run(self) -> None:
        """Read for the subscribers, until cancelled. Raises NewerRecord, AccessDenied,
        TopicMismatch, LogClosed."""
        reason: Exception = LogClosed("the tail reader was stopped")
        try:
            while True:
                await self._wanted.wait()
                await self._advance()
        except Exception as e:
            reason = e
            raise
        finally:
            self._error = reason
            for subscription in self._subscriptions:
                subscription.fail(reason)
            if self._reader is not None:
                await self._reader.close()

    async def _advance(self) -> None:
        reader = self._reader
        assert reader is not None, "a subscriber has opened it"
        try:
            batches = await reader.poll(POLL_S, RECORDS_PER_POLL)
        except PositionLost as e:
            self._lose(e)
            return
        # Later ones get the next poll, which begins at or before their positions.
        subscribers = list(self._subscriptions)
        decoded = await decode_batches(self._decoder, batches)
        for subscription in subscribers:
            if not subscription.put(decoded, reader):
                self._remove(subscription)
        await self._clock.sleep(0)

    def _lose(self, lost: PositionLost) -> None:
        """End the subscriptions that missed records."""
        source = Partition(lost.topic, lost.partition)
        for subscription in list(self._subscriptions):
            position = subscription.positions.get(source)
            if position is not None and (position < lost.start or position == lost.wanted):
                subscription.fail(lost)
                del self._subscriptions[subscription]
        self._assign()

    def _remove(self, subscription: TailSubscription) -> None:
        if self._subscriptions.pop(subscription, True) is None:
            self._assign()

    def _positions(self) -> dict[Partition, int]:
        """The lowest position of a subscriber in each partition."""
        lowest: dict[Partition, int] = {}
        for subscription in self._subscriptions:
            for source, position in subscription.positions.items():
                lowest[source] = min(position, lowest.get(source, position))
        return lowest

    def _assign(self) -> None:
        """Read from the lowest positions on, also during a poll."""
        if self._error is not None:
            return
        if self._reader is None:
            self._reader = self._log.reader(moving=False, gather_s=self._gather_s)
        self._reader.assign(self._positions())
        if self._subscriptions:
            self._wanted.set()
        else:
            self._wanted.clear()
