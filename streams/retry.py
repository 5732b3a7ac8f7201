"""Retries during a broker outage, for queries and for appends that may be duplicated.

Only a missing answer is retried. All other errors would be the same the next time.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvlane.streams.clock import Clock
from kvlane.streams.errors import AppendFailed, BrokerUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

INITIAL_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
"""Pauses double between the two. A failed call has usually waited for its own deadline (seconds)
before, so the retries of many processes are spread without jitter."""


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
