"""A wait queue: tasks wait until all of them are notified, or a time is over."""

from __future__ import annotations

import asyncio

MIN_WAIT_S = 0.001
"""Shortest wait: a shorter one may not advance the clock, and a caller would spin for ever."""


class WaitQueue:
    """Notifies all waiting tasks; a notification without waiting tasks is lost."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def notify_all(self) -> None:
        for woken in self._waiting:
            resolve(woken)

    async def wait(self, timeout_s: float) -> None:
        """Return when notified, or after `timeout_s` (at least `MIN_WAIT_S`)."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting[woken] = None
        timer = loop.call_later(max(timeout_s, MIN_WAIT_S), resolve, woken)
        try:
            await woken
        finally:
            timer.cancel()
            del self._waiting[woken]


def resolve(future: asyncio.Future[None]) -> None:
    """Resolve a future, unless it is done or its task was cancelled."""
    if not future.done():
        future.set_result(None)
