"""A bell: many wait for it, one rings it, everybody goes on and looks for himself."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Collection
from itertools import count
from typing import NamedTuple

Rank = tuple[float, ...]
"""Who has less is woken first."""


class _Waiter(NamedTuple):
    """Who waits; of one rank in the order of their coming, by number."""

    rank: Rank
    number: int
    woken: asyncio.Future[None]


class Bell:
    """Wakes all waiting tasks at once, or one at a time; keeps no memory of past rings."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[_Waiter]] = {}
        """By the names under which they came, in the order in which they are woken."""
        self._numbers = count()

    def ring(self) -> None:
        """Wake everybody who is waiting now."""
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.woken.done():
                    waiter.woken.set_result(None)

    def ring_one(self, names: Collection[str]) -> None:
        """Wake who comes first of those who came under one of these names."""
        firsts = (
            next((w for w in self._waiting.get(name, ()) if not w.woken.done()), None)
            for name in names
        )
        first = min((waiter for waiter in firsts if waiter is not None), default=None)
        if first is not None:
            first.woken.set_result(None)

    async def wait(self, timeout_s: float, name: str = "", rank: Rank = ()) -> None:
        """Return at the next ring, or after `timeout_s` at the latest."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(rank, next(self._numbers), loop.create_future())
        insort(self._waiting.setdefault(name, []), waiter)
        timer = loop.call_later(timeout_s, _expire, waiter.woken)
        try:
            await waiter.woken
        finally:
            timer.cancel()
            waiters = self._waiting[name]
            del waiters[bisect_left(waiters, waiter)]
            if not waiters:
                del self._waiting[name]


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
