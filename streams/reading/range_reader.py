"""Reading partitions without a group: a range of offsets once, or everything from an offset on.

For occasional lookups; a state that stays up to date is a view (`streams/views/follower.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from kvlane.streams.clock import Clock, retry_while_unavailable
from kvlane.streams.errors import BrokerUnavailable, PositionLost
from kvlane.streams.ports import POLL_S, Log, Partition, Record

NO_DATA_TIMEOUT_S = 30.0
"""After this long without progress the broker is considered unavailable."""

Progress = Callable[[int, int], None]
"""Called with the number of offsets read, and their total."""


class RecordBatch(NamedTuple):
    """The next records of a partition, empty at a gap, and the offset after them."""

    source: Partition
    records: Sequence[Record]
    position: int


async def read_range(
    log: Log,
    clock: Clock,
    starts: Mapping[Partition, int],
    ends: Mapping[Partition, int],
    *,
    timeout_s: float | None = None,
    batch_size: int = 500,
    progress: Progress = lambda _done, _total: None,
    keys: Container[bytes | None] | None = None,
) -> AsyncGenerator[RecordBatch, None]:
    """The records of each partition from its start to before its end, as far as they are kept; with
    `keys` only those.

    Other tasks run after every `batch_size` records. Close it (`aclosing`). Raises PositionLost;
    TimeoutError after `timeout_s`, or without it BrokerUnavailable after NO_DATA_TIMEOUT_S without
    progress.
    """
    left = {source: start for source, start in starts.items() if start < ends[source]}
    total, done = sum(ends[source] - start for source, start in left.items()), 0
    progress(done, total)
    until = clock.now() + (timeout_s or NO_DATA_TIMEOUT_S)
    reader = log.reader()
    try:
        reader.assign(left, keys)
        while left:
            batches = await reader.poll(POLL_S, batch_size)
            for source, before in list(left.items()):
                position = min(reader.position(source), ends[source])
                if position > before:
                    records = [r for r in batches.get(source, ()) if r.offset < position]
                    yield RecordBatch(source, records, position)
                    done += position - before
                    left[source] = position
                    if timeout_s is None:
                        until = clock.now() + NO_DATA_TIMEOUT_S
                if position == ends[source]:
                    del left[source]
            progress(done, total)
            if left and clock.now() > until:
                if timeout_s is None:
                    raise BrokerUnavailable(f"no records for {NO_DATA_TIMEOUT_S:g} s")
                source = next(iter(left))
                raise TimeoutError(
                    f"{source.topic}[{source.partition}]: reading to {ends[source]} took longer "
                    f"than {timeout_s:g} s"
                )
            await clock.sleep(0)
    finally:
        await reader.close()


class OffsetBounds(NamedTuple):
    """The first offsets of partitions that count, and the ends that do not, by partition."""

    starts: dict[Partition, int]
    ends: dict[Partition, int]

    @property
    def size(self) -> int:
        return sum(end - self.starts[source] for source, end in self.ends.items())


async def offsets_between(log: Log, topic: str, from_ms: int, to_ms: int) -> OffsetBounds:
    """The offsets of a topic that were appended in [from_ms, to_ms), ms since 1970, as far as they
    are kept. Raises BrokerUnavailable."""
    starts, ends = await oldest_offsets(log, topic), {}
    for source, oldest in starts.items():
        partition = source.partition
        starts[source] = max(oldest, await log.offset_at(topic, partition, from_ms))
        ends[source] = max(starts[source], await log.offset_at(topic, partition, to_ms))
    return OffsetBounds(starts, ends)


async def oldest_offsets(log: Log, topic: str) -> dict[Partition, int]:
    """The offset of the oldest record kept, by partition. Raises BrokerUnavailable."""
    oldest = await log.start_offsets(topic, range(await log.partitions(topic)))
    return {Partition(topic, partition): offset for partition, offset in oldest.items()}


async def tail(
    log: Log, positions: Mapping[Partition, int], poll_s: float = POLL_S, *, moving: bool = False
) -> AsyncGenerator[Sequence[Record], None]:
    """The records of partitions from these offsets on, batch by batch, without end. Close it
    (`aclosing`) when leaving it. `moving` is that of `Log.reader`. Raises PositionLost."""
    reader = log.reader(moving=moving)
    reader.assign(positions)
    try:
        while True:
            for records in (await reader.poll(poll_s)).values():
                yield records
    finally:
        await reader.close()


async def end_offset_of(log: Log, clock: Clock, source: Partition) -> int:
    """The offset of the next record of a partition; asks until a broker answers."""
    number = source.partition
    return (await retry_while_unavailable(clock, lambda: log.end_offsets(source.topic, [number])))[
        number
    ]


async def record_at(log: Log, clock: Clock, source: Partition, offset: int) -> Record | None:
    """The record at an offset; None if it does not exist (any more). Raises BrokerUnavailable."""
    if source.partition >= await log.partitions(source.topic):
        return None
    if offset >= (await log.end_offsets(source.topic, [source.partition]))[source.partition]:
        return None
    pieces = read_range(log, clock, {source: offset}, {source: offset + 1})
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                for record in piece.records:
                    if record.offset == offset:
                        return record
    except PositionLost:
        return None
    return None
