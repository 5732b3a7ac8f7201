"""Offset waiters: tasks that wait until a partition is applied up to an offset.

One heap per source, so that moving a position costs nothing without waiters, and each waiter is
woken once, when its offset is reached. Never reads records or views.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from heapq import heapify, heappop, heappush
from itertools import count

from kvlane.streams.ports import Partition

WaitKey = Partition | None
"""None: a wait that concerns no single partition."""


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
        """Wake the waiters for this offset and lower ones."""
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
        """End all current and later waits with this error."""
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
