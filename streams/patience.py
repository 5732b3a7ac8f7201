"""Waiting out an outage: the one way in which a question or an append is repeated.

Only what says that nothing answered is repeated. Everything else (`Denied`, `TopicsDiffer`,
`RecordTooLarge`, `LogClosed` …) would be the same the next time and goes up at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from streams.clock import Clock
from streams.errors import AppendFailed, BrokerUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Pauses double between the two. What failed has mostly waited for its own deadline (seconds)
before, so the repeats of many processes are spread without jitter."""


async def until_answered(
    clock: Clock, work: Callable[[], Awaitable[T]], *, until: float | None = None
) -> T:
    """Ask, or append what may stand twice, until a broker answers.

    `until` is a point on the clock; past it the last BrokerUnavailable or AppendFailed goes up.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await work()
        except (AppendFailed, BrokerUnavailable) as e:
            left_s = None if until is None else until - clock.now()
            if left_s is not None and left_s <= 0:
                raise
            log.warning("trying again: %s", e)
            await clock.sleep(pause_s if left_s is None else min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
