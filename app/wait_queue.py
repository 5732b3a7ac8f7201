"""A wait queue: tasks block until notified, one at a time by priority or all at once."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from itertools import count
from typing import NamedTuple

MIN_WAIT_S = 0.001
"""Shortest wait. The rest of a time-out can be too short to advance the clock's float or its
milliseconds; a caller that checks again at once would then spin for ever."""

QueueName = tuple[str, ...]
"""The condition that a task waits for."""
Priority = tuple[float, ...]
"""Priority: lower values are notified first."""


def _unchanged(_: QueueName, rank: Priority) -> Priority:
    return rank


class _WaitingTask(NamedTuple):
    """A waiting task; among equal ranks, `number` keeps arrival order."""

    rank: Priority
    number: int
    woken: asyncio.Future[None]


class WaitQueue:
    """Notifies all waiting tasks, or one at a time; a notification without waiters is lost."""

    def __init__(self) -> None:
        self._waiting: dict[QueueName, list[_WaitingTask]] = {}
        """Waiting tasks by name, in the order in which they are notified."""
        self._numbers = count()

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def notify_all(self) -> None:
        """Notify all tasks that are waiting now."""
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.woken.done():
                    waiter.woken.set_result(None)

    def notify_one(
        self,
        names: Collection[QueueName],
        priority_now: Callable[[QueueName, Priority], Priority] = _unchanged,
    ) -> None:
        """Notify the first of the tasks that wait under one of these names.

        `priority_now`: the present priority of a rank under a name; it must keep the order among
        the ranks of one name.
        """
        firsts = []
        for name in names:
            waiters = self._waiting.get(name, [])
            while waiters and waiters[0].woken.done():
                # Of 1000 at once among 4096 tasks each takes 1.4 us; passing those before it, 16.
                del waiters[0]
            if waiters:
                first = waiters[0]
                firsts.append((priority_now(name, first.rank), first.number, first))
        if firsts:
            min(firsts)[-1].woken.set_result(None)

    async def wait(self, timeout_s: float, name: QueueName = (), rank: Priority = ()) -> None:
        """Return when notified, or after `timeout_s` (at least `MIN_WAIT_S`)."""
        loop = asyncio.get_running_loop()
        waiter = _WaitingTask(rank, next(self._numbers), loop.create_future())
        insort(self._waiting.setdefault(name, []), waiter)
        timer = loop.call_later(max(timeout_s, MIN_WAIT_S), _expire, waiter.woken)
        try:
            await waiter.woken
        finally:
            timer.cancel()
            waiters = self._waiting.get(name, [])
            at = bisect_left(waiters, waiter)
            if waiters[at : at + 1] == [waiter]:  # else a later notification removed it
                del waiters[at]
            if not waiters:
                self._waiting.pop(name, None)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
