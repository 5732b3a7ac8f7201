"""Waiting tasks: those of requests that wait in a queue, or in the log, until they are woken."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable
from functools import partial
from typing import TypeVar

from kvlane.app.routing.queueing.deferred_prompts import DeferredPrompts, QueueSize
from kvlane.app.routing.queueing.fair_share import QueueKey
from kvlane.app.routing.queueing.pending import RequestKey
from kvlane.app.routing.queueing.wake_ups import MIN_WAIT_MS, WakeUps
from kvlane.app.wait_queue import resolve
from kvlane.streams.clock import BrokerClock

K = TypeVar("K", bound=Hashable)


class WaitingTasks:
    """The tasks of one queue, one for each request that waits; with the timer of its retries."""

    def __init__(self, wake_ups: WakeUps[RequestKey], broker_clock: BrokerClock) -> None:
        self._wake_ups = wake_ups
        self._broker_clock = broker_clock
        self._woken: dict[RequestKey, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = math.inf
        """Broker time at which the timer ends; inf without one."""

    async def wait(self, key: RequestKey) -> None:
        """Wait until a request, which was added to the wake-ups, is woken."""
        woken = self._woken[key] = asyncio.get_running_loop().create_future()
        try:
            self.resume()
            await woken
        finally:
            del self._woken[key]
            self._wake_ups.discard(key)

    def resume(self) -> None:
        """Let the tasks of woken requests continue. Called after each change of the queue."""
        for key in self._wake_ups.take_woken():
            resolve(self._woken[key])
        next_ms = self._wake_ups.next_ms
        if next_ms < self._timer_ms:
            if self._timer is not None:
                self._timer.cancel()
            left_ms = max(next_ms - self._broker_clock.now_ms(), MIN_WAIT_MS)
            self._timer = asyncio.get_running_loop().call_later(left_ms / 1000, self._wake_due)
            self._timer_ms = next_ms

    def _wake_due(self) -> None:
        self._timer_ms = math.inf
        self._wake_ups.wake_due(self._broker_clock.now_ms())
        self.resume()


async def wait_for_room(
    deferred: DeferredPrompts[K], key: K, queue: QueueKey, size: QueueSize, timeout_s: float
) -> bool:
    """Wait until a deferred prompt gets a reservation; `DeferredPrompts.release` ends it. False
    when the time was over before."""
    has_room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        deferred.add(key, queue, size, partial(resolve, has_room))
        async with asyncio.timeout(timeout_s):
            await has_room
    except TimeoutError:
        has_room.cancel()
    finally:
        deferred.discard(key, queue)
        if has_room.cancelled():
            deferred.release(key)
    return not has_room.cancelled()
