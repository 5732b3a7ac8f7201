"""A bell: many wait for it, one rings it, everybody goes on and looks for himself."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from itertools import count
from typing import NamedTuple

SHORTEST_S = 0.001
"""Of a wait. What is left until some time can be too little to move a clock's number, or its
milliseconds: who looks again at once would look for ever."""

Name = tuple[str, ...]
"""What is waited for."""
Rank = tuple[float, ...]
"""Who has less is woken first."""


def _as_they_came(_: Name, rank: Rank) -> Rank:
    return rank


class _Waiter(NamedTuple):
    """Who waits; of one rank in the order of their coming, by number."""

    rank: Rank
    number: int
    woken: asyncio.Future[None]


class Bell:
    """Wakes all waiting tasks at once, or one at a time; keeps no memory of past rings."""

    def __init__(self) -> None:
        self._waiting: dict[Name, list[_Waiter]] = {}
        """By the names under which they came, in the order in which they are woken."""
        self._numbers = count()

    def ring(self) -> None:
        """Wake everybody who is waiting now."""
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.woken.done():
                    waiter.woken.set_result(None)

    def ring_one(
        self, names: Collection[Name], rank_now: Callable[[Name, Rank], Rank] = _as_they_came
    ) -> None:
        """Wake who comes first of those who came under one of these names.

        `rank_now`: what a rank under a name is worth now; among those of one name it must leave the
        order as it was.
        """
        firsts = []
        for name in names:
            waiters = self._waiting.get(name, ())
            if (first := next((w for w in waiters if not w.woken.done()), None)) is not None:
                firsts.append((rank_now(name, first.rank), first.number, first))
        if firsts:
            min(firsts)[-1].woken.set_result(None)

    async def wait(self, timeout_s: float, name: Name = (), rank: Rank = ()) -> None:
        """Return at the next ring, or after `timeout_s`, or `SHORTEST_S`, at the latest."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(rank, next(self._numbers), loop.create_future())
        insort(self._waiting.setdefault(name, []), waiter)
        timer = loop.call_later(max(timeout_s, SHORTEST_S), _expire, waiter.woken)
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
