"""Waiting for positions: who waits until a partition is applied up to an offset.

One heap a source, so that moving a position costs nothing when nobody waits, and each waiter is
woken once, by the move that reaches its offset. Knows nothing of records or folds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from heapq import heapify, heappop, heappush
from itertools import count

from streams.ports import Partition

Source = Partition | None
"""None is for a wait that is about no single partition."""


class Barriers:
    """Waits for offsets by source; a wait that is cancelled leaves nothing behind."""

    def __init__(self) -> None:
        self._heaps: dict[Source, list[tuple[int, int, asyncio.Future[None]]]] = {}
        self._order = count()
        self._failure: Exception | None = None

    @property
    def waited_for(self) -> Collection[Partition]:
        """The partitions that somebody waits for."""
        return [source for source in self._heaps if source is not None]

    async def wait(self, source: Source, offset: int) -> None:
        """Wait until `reach` comes to this offset. Raises the error given to `fail`."""
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

    def reach(self, source: Source, offset: int) -> None:
        """Wake everybody who waits for this offset or a lower one."""
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
        """End every wait, and every later one, with this error."""
        self._failure = error
        for heap in self._heaps.values():
            for _, _, future in heap:
                if not future.done():
                    future.set_exception(error)
        self._heaps.clear()

    def _remove(self, source: Source, entry: tuple[int, int, asyncio.Future[None]]) -> None:
        heap = self._heaps.get(source, [])
        if entry in heap:
            heap.remove(entry)
            heapify(heap)
            if not heap:
                del self._heaps[source]
