"""Wake-ups of waiting requests: the lines they wait in, and the time at which each retries.

A request waits in the line of a name, or for a place that is reserved for it, until a wake-up or
its retry time; one that is woken and finds no place is added again. A wake-up without a request is
lost.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterable
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

QueueName = tuple[str, ...]
"""The condition that requests of one line wait for."""
Priority = tuple[float, ...]
"""Priority in a line: lower values are woken first."""
MIN_WAIT_MS = 1
"""Shortest wait: a request that retried at once would retry for ever within one millisecond."""
MAX_CLOCK_STEP_MS = 1000
"""Step back of the clock from which on all requests retry, since their retry times are no measure
then. Smaller ones are usual in the time of a broker, which is estimated from its records."""


def _unchanged(_: QueueName, priority: Priority) -> Priority:
    return priority


class _Entry(NamedTuple):
    number: int
    retry_ms: float
    name: QueueName | None
    priority: Priority


class WakeUps(Generic[K]):
    """The waiting requests of one queue, by keys of its choice."""

    def __init__(self) -> None:
        self._waiting: dict[K, _Entry] = {}
        self._lines: dict[QueueName, list[tuple[Priority, int, K]]] = {}
        self._retries: list[tuple[float, int, K]] = []
        """Heap of retry times; an entry whose number is not that of the request is stale."""
        self._woken: dict[K, None] = {}
        self._added = 0
        self._now_ms = -math.inf
        self.waiting_for_places = 0
        """Number of requests that wait for a reserved place."""

    @property
    def has_lines(self) -> bool:
        return bool(self._lines)

    @property
    def has_woken(self) -> bool:
        return bool(self._woken)

    @property
    def next_ms(self) -> float:
        while self._retries:
            retry_ms, number, key = self._retries[0]
            entry = self._waiting.get(key)
            if entry is not None and entry.number == number:
                return retry_ms
            heappop(self._retries)
        return math.inf

    def add(
        self, key: K, retry_ms: float, name: QueueName | None = None, priority: Priority = ()
    ) -> None:
        """Let a request wait: in the line of `name`, or for a place reserved for it."""
        self.discard(key)
        self._added += 1
        self._waiting[key] = _Entry(self._added, retry_ms, name, priority)
        if name is None:
            self.waiting_for_places += 1
        else:
            insort(self._lines.setdefault(name, []), (priority, self._added, key))
        heappush(self._retries, (retry_ms, self._added, key))

    def discard(self, key: K) -> None:
        """Let a request wait no longer, if it does, without waking it."""
        self._woken.pop(key, None)
        self._remove(key)

    def wake(self, keys: Iterable[K]) -> None:
        for key in keys:
            if self._remove(key):
                self._woken[key] = None

    def wake_first(
        self,
        names: Collection[QueueName],
        priority_now: Callable[[QueueName, Priority], Priority] = _unchanged,
    ) -> None:
        """Wake the first request of these lines. `priority_now`: of a request at present; it must
        keep the order within each line."""
        firsts = [
            (priority_now(name, line[0][0]), *line[0][1:])
            for name in names
            if (line := self._lines.get(name))
        ]
        if firsts:
            self.wake((min(firsts)[-1],))

    def wake_lines(self) -> None:
        self.wake([key for line in self._lines.values() for _, _, key in line])

    def wake_all(self) -> None:
        self.wake(list(self._waiting))

    def wake_due(self, now_ms: float) -> None:
        if now_ms < self._now_ms - MAX_CLOCK_STEP_MS:
            self.wake_all()
        self._now_ms = now_ms
        while self.next_ms <= now_ms:
            self.wake((heappop(self._retries)[-1],))

    def take_woken(self) -> list[K]:
        """The requests woken since the last call, in the order of their wake-ups."""
        if not self._woken:
            return []
        woken, self._woken = list(self._woken), {}
        return woken

    def _remove(self, key: K) -> bool:
        entry = self._waiting.pop(key, None)
        if entry is None:
            return False
        if entry.name is None:
            self.waiting_for_places -= 1
        else:
            line = self._lines[entry.name]
            del line[bisect_left(line, (entry.priority, entry.number))]
            if not line:
                del self._lines[entry.name]
        return True
