"""Reading a stretch of the log once: from given offsets up to given offsets, and no further.

What a follower is for those who look back: it has an end, and tells how far it is. Gaps at the end
of a stretch (compaction, retention) do not hold it up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from streams.clock import Clock
from streams.errors import BrokerUnavailable
from streams.ports import Log, Partition, Record

POLL_S = 1.0
SILENCE_S = 30.0
"""So long without anything new, and the broker counts as unavailable."""

Progress = Callable[[int, int], None]
"""Hears how many of how many offsets are read."""


async def stretch(
    log: Log,
    clock: Clock,
    starts: Mapping[Partition, int],
    ends: Mapping[Partition, int],
    progress: Progress = lambda _done, _total: None,
) -> AsyncGenerator[tuple[Partition, Sequence[Record], int], None]:
    """Records of each partition in order, with the position after them; every end is reached.

    Raises BrokerUnavailable, and PositionLost when records disappear while they are read.
    """
    left = {p: start for p, start in starts.items() if start < ends[p]}
    total = sum(ends[p] - start for p, start in left.items())
    done = 0
    progress(done, total)
    reader = log.reader()
    try:
        reader.assign(left)
        heard_at = clock.now()
        while left:
            batches = await reader.poll(POLL_S)
            for source in list(left):
                end = ends[source]
                records = [r for r in batches.get(source, ()) if r.offset < end]
                position = min(reader.position(source), end)
                if records:
                    position = max(position, min(batches[source][-1].offset + 1, end))
                if position > left[source]:
                    heard_at = clock.now()
                    done += position - left[source]
                    left[source] = position
                    yield source, records, position
                if position == end:
                    del left[source]
            progress(done, total)
            if clock.now() - heard_at > SILENCE_S:
                raise BrokerUnavailable(f"nothing came for {SILENCE_S:g} s while the log was read")
    finally:
        await reader.close()
