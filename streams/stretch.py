"""Reading a stretch of the log once: what partitions hold now, from an offset to another.

For questions that are asked now and then (a snapshot, a file, the story of a request). Whoever
wants to know what is appended later follows the log (`streams/follow.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import NamedTuple

from streams.clock import Clock
from streams.errors import BrokerUnavailable
from streams.ports import Log, Partition, Record

POLL_S = 1.0
SILENCE_S = 30.0
"""So long without anything new, and the broker counts as unavailable."""

Progress = Callable[[int, int], None]
"""Hears how many of how many offsets are read."""


class Piece(NamedTuple):
    """The next records of a partition, none where there is a gap, and the offset after them."""

    source: Partition
    records: Sequence[Record]
    position: int


async def stretch(
    log: Log,
    clock: Clock,
    starts: Mapping[Partition, int],
    ends: Mapping[Partition, int],
    *,
    timeout_s: float | None = None,
    at_once: int = 500,
    progress: Progress = lambda _done, _total: None,
) -> AsyncGenerator[Piece, None]:
    """Each partition of `starts` from there to before its end, in order, as far as it is kept.

    Other tasks run after every `at_once` records. Close it (`aclosing`) when leaving it early.
    Raises PositionLost; TimeoutError when all of it takes longer than `timeout_s`; without that
    limit BrokerUnavailable when nothing comes for SILENCE_S.
    """
    left = {source: start for source, start in starts.items() if start < ends[source]}
    total, done = sum(ends[source] - start for source, start in left.items()), 0
    progress(done, total)
    until = clock.now() + (timeout_s or SILENCE_S)
    reader = log.reader()
    try:
        reader.assign(left)
        while left:
            batches = await reader.poll(POLL_S, at_once)
            for source, before in list(left.items()):
                position = min(reader.position(source), ends[source])
                if position > before:
                    records = [r for r in batches.get(source, ()) if r.offset < position]
                    yield Piece(source, records, position)
                    done += position - before
                    left[source] = position
                    if timeout_s is None:
                        until = clock.now() + SILENCE_S
                if position == ends[source]:
                    del left[source]
            progress(done, total)
            if left and clock.now() > until:
                if timeout_s is None:
                    raise BrokerUnavailable(f"nothing came for {SILENCE_S:g} s")
                source = next(iter(left))
                raise TimeoutError(
                    f"{source.topic}[{source.partition}]: reading to {ends[source]} took longer "
                    f"than {timeout_s:g} s"
                )
            await clock.sleep(0)
    finally:
        await reader.close()
