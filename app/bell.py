"""A bell: many wait for it, one rings it, everybody goes on and looks for himself."""

from __future__ import annotations

import asyncio
from collections.abc import Collection


class Bell:
    """Wakes all waiting tasks at once, or one at a time; keeps no memory of past rings."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], str] = {}  # in the order of their coming

    def ring(self) -> None:
        """Wake everybody who is waiting now."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    def ring_one(self, names: Collection[str]) -> None:
        """Wake who has waited longest of those who came under one of these names."""
        for waiter, name in self._waiting.items():
            if name in names and not waiter.done():
                waiter.set_result(None)
                del self._waiting[waiter]
                return

    async def wait(self, timeout_s: float, name: str = "") -> None:
        """Return at the next ring, or after `timeout_s` at the latest."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[waiter] = name
        timer = loop.call_later(timeout_s, _expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.pop(waiter, None)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
