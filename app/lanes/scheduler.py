"""The scheduler of a router: the tasks of requests that wait in its queue, or in the log.

`RouterQueue` decides when a request is planned, and its place. Requests that look for a place in
one turn of the event loop take part in one pass of it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

from kvlane.app.routing.queueing.deferred_prompts import DeferredPrompts, QueueSize
from kvlane.app.routing.queueing.fair_share import QueueKey
from kvlane.app.routing.queueing.pending import LaneRequest, RequestKey
from kvlane.app.routing.queueing.router_queue import RouterQueue
from kvlane.app.routing.queueing.wake_ups import MIN_WAIT_MS
from kvlane.app.routing.selection.decision import Decision, Wait
from kvlane.app.wait_queue import resolve
from kvlane.streams.clock import BrokerClock
from kvlane.streams.records import LogRecord

K = TypeVar("K", bound=Hashable)


class Scheduler:
    """One per router. `count_awaited`: called with each change of the number of interactive
    requests that wait."""

    def __init__(
        self, queue: RouterQueue, broker_clock: BrokerClock, count_awaited: Callable[[int], None]
    ) -> None:
        self._queue = queue
        self._broker_clock = broker_clock
        self._count_awaited = count_awaited
        self._turns: dict[RequestKey, asyncio.Future[None]] = {}
        """By request of the next pass."""
        self._woken: dict[RequestKey, asyncio.Future[None]] = {}
        """By request that waits."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = math.inf
        """Broker time at which the timer ends; inf without one."""

    async def schedule(self, request: LaneRequest) -> Decision:
        """Decide about a request: a place, a wait, or a rejection. A place is free for as long as
        nothing is awaited after this."""
        loop = asyncio.get_running_loop()
        if not self._turns:
            loop.call_soon(self._start_pass)
        turn = self._turns[request.key] = loop.create_future()
        self._queue.look(request)
        try:
            await turn
        finally:
            self._turns.pop(request.key, None)
        decision = self._queue.decide(request, self._broker_clock.now_ms())
        self._resume()
        return decision

    def _start_pass(self) -> None:
        turns, self._turns = self._turns, {}
        for key in self._queue.plan_pass(self._broker_clock.now_ms()):
            if not turns[key].done():
                turns[key].set_result(None)
        self._resume()

    async def wait_for_change(self, request: LaneRequest, planned: Wait, until_ms: float) -> None:
        """Wait until a place for this request may be free, or its wait ends, at `until_ms`."""
        self._queue.wait(request, planned, self._broker_clock.now_ms(), until_ms)
        awaited = 0 if request.is_batch else 1
        woken = self._woken[request.key] = asyncio.get_running_loop().create_future()
        self._count_awaited(awaited)
        try:
            self._resume()
            await woken
        finally:
            self._count_awaited(-awaited)
            del self._woken[request.key]
            self._queue.cancel_wait(request.key)

    def leave(self, request: LaneRequest) -> None:
        self._queue.leave(request)
        self._resume()

    def on_record(self, record: LogRecord, *, is_replay: bool) -> None:
        self._queue.on_record(record, self._broker_clock.now_ms(), is_replay=is_replay)
        self._resume()

    def on_fleet_changed(self) -> None:
        self._queue.on_fleet_changed()
        self._resume()

    def _resume(self) -> None:
        """Let the tasks of woken requests continue. Called after each change of the queue."""
        for key in self._queue.take_woken():
            resolve(self._woken[key])
        next_ms = self._queue.next_wake_ms
        if next_ms < self._timer_ms:
            if self._timer is not None:
                self._timer.cancel()
            left_ms = max(next_ms - self._broker_clock.now_ms(), MIN_WAIT_MS)
            self._timer = asyncio.get_running_loop().call_later(left_ms / 1000, self._wake_due)
            self._timer_ms = next_ms

    def _wake_due(self) -> None:
        self._timer_ms = math.inf
        self._queue.wake_due(self._broker_clock.now_ms())
        self._resume()


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
