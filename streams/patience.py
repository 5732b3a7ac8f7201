"""Waiting for a broker to answer a question, for those who cannot go on without the answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from streams.clock import Clock
from streams.errors import BrokerUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_S = 1.0


async def until_answered(clock: Clock, question: Callable[[], Awaitable[T]]) -> T:
    """Ask until a broker answers; the caller has the deadline, if there is one.

    A process that ended because of an outage would not be there when it is over.
    """
    while True:
        try:
            return await question()
        except BrokerUnavailable as e:
            log.warning("asking again: %s", e)
            await clock.sleep(PAUSE_S)
