"""A bell: many wait for it, one rings it, everybody goes on and looks for himself."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes all waiting tasks at once; keeps no memory of past rings."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake everybody who is waiting now."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next ring, or after `timeout_s` at the latest."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.add(waiter)
        timer = loop.call_later(timeout_s, _expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
