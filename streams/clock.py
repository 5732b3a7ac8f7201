"""Clocks, injected into all code that waits or measures, and the retry of calls during an outage.

So the same code runs in virtual time (`workbench/testing/virtual_time.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from kvlane.streams.errors import AppendFailed, BrokerUnavailable

log = logging.getLogger(__name__)

CLOCK_SKEW_MS = 60_000
"""Largest difference between the clocks of two brokers: a topic is read from so much before."""
_NEVER = float("-inf")


class Clock(Protocol):
    def now(self) -> float:
        """Seconds of a monotonic clock; only differences are meaningful."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970 by this machine, for ids and for display. It may differ from
        broker time: comparisons of the two need a margin."""

    async def sleep(self, seconds: float) -> None:
        """Wait; 0 lets other tasks run."""


class SystemClock:
    """The clock of this machine, for everything outside of tests and simulations."""

    def now(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


WINDOW_S = 60
"""Length of the two windows whose records count; bounds clock drift."""


class BrokerClock:
    """An estimate of the broker's append time, in ms, from the records that were read: deadlines
    and ages are in broker time, the one clock that all processes share.

    The estimate is the latest time that records of the last one to two windows show, else older
    ones. It lags by at most the delay of the freshest record, and may go back when a record leaves
    the window.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_ms = 0.0  # when the present window began
        self._present_ms = _NEVER  # most that broker time was ahead of local time, in this window
        self._before_ms = _NEVER  # and in the one before

    def observe(self, timestamp_ms: int) -> None:
        """Observe the append time of a record that was just read or acknowledged."""
        now_ms = self._clock.now() * 1000
        if now_ms - self._since_ms >= WINDOW_S * 1000:
            self._before_ms, self._present_ms = self._present_ms, _NEVER
            self._since_ms = now_ms
        self._present_ms = max(self._present_ms, timestamp_ms - now_ms)

    def now_ms(self) -> int:
        """Milliseconds of broker time; 0 before the first record (then nothing is late)."""
        ahead_ms = max(self._present_ms, self._before_ms)
        if ahead_ms == _NEVER:
            return 0
        return int(ahead_ms + self._clock.now() * 1000)


class LeaderClock:
    """The clock of the leader of one partition, by its records that were read without delay.
    `lag_ms`: its lag behind `broker_clock`, to be added to the partition's append times."""

    def __init__(self, clock: Clock, broker_clock: BrokerClock) -> None:
        self._clock = clock
        self._broker_clock = broker_clock
        self._own = BrokerClock(clock)
        self._last_ms = 0

    def observe(self, timestamp_ms: int) -> None:
        """Observe the append time of a record that was just read; `broker_clock` has it, too."""
        if timestamp_ms < self._last_ms:  # one leader's times do not go back: this is another one
            self._own = BrokerClock(self._clock)
        self._last_ms = timestamp_ms
        self._own.observe(timestamp_ms)

    @property
    def lag_ms(self) -> int:
        """0 before the first record."""
        own_ms = self._own.now_ms()
        return max(self._broker_clock.now_ms() - own_ms, 0) if own_ms else 0


T = TypeVar("T")

INITIAL_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
"""Pauses double between the two."""


async def retry_while_unavailable(
    clock: Clock, call: Callable[[], Awaitable[T]], *, until: float | None = None
) -> T:
    """Repeat a query, or an append that may be duplicated, until a broker answers. `until` is a
    point on the clock; past it the last BrokerUnavailable or AppendFailed is raised."""
    pause_s = INITIAL_BACKOFF_S
    while True:
        try:
            return await call()
        except (AppendFailed, BrokerUnavailable) as e:
            left_s = None if until is None else until - clock.now()
            if left_s is not None and left_s <= 0:
                raise
            wait_s = pause_s if left_s is None else min(pause_s, left_s)
            log.warning("broker unavailable, retrying in %.2f s: %s", wait_s, e)
            await clock.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)
