"""Time, as it is handed to everything that waits or measures.

Nothing in kvlane calls `time.time()` or `asyncio.sleep()` by itself: a `Clock` is passed in, so
that the same code runs against the machine's clock and against the virtual time of the
deterministic simulation (`tests/simulation`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time and of waiting."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, for ids and for people; never compared with broker time."""

    async def sleep(self, seconds: float) -> None:
        """Wait; 0 lets other tasks run."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """As `Clock.now`."""
        return time.monotonic()

    def wall_ms(self) -> int:
        """As `Clock.wall_ms`."""
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        """As `Clock.sleep`."""
        await asyncio.sleep(seconds)


class BrokerClock:
    """An estimate of the broker's append time, in milliseconds, from the records that were read.

    Deadlines and ages are in broker time, because it is the one clock that every process sees
    alike. A record with append time t that was read at local time m proves that the broker's clock
    has reached t; from then on it advances with the local clock. The estimate is therefore never
    ahead of the broker by more than the drift between two clocks since the last record, and behind
    it by at most the delay of the freshest record.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms: float | None = None

    def observe(self, timestamp_ms: int) -> None:
        """Learn from the append time of a record that was just read or acknowledged."""
        offset_ms = timestamp_ms - self._clock.now() * 1000
        if self._offset_ms is None or offset_ms > self._offset_ms:
            self._offset_ms = offset_ms

    def now_ms(self) -> int:
        """Milliseconds of broker time; 0 before the first record (nothing is late then)."""
        if self._offset_ms is None:
            return 0
        return int(self._offset_ms + self._clock.now() * 1000)
