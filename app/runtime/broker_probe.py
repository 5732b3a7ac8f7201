"""A broker health probe: checks every second whether Kafka answers this process.

It asks for the end of one partition after the other, a few at a time: one hanging broker or one
leader election is no outage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kvlane.streams.clock import Clock
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.ports import Log
from kvlane.streams.topics import RESPONSES

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
MAX_PENDING_PROBES = 8
"""Pending calls at most. One to a hanging broker waits for up to three time-outs."""
LOGGED_SILENCE_S = 2.5

Spawn = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[Any]]


class BrokerProbe:
    """Whether Kafka has answered within `timeout_s`. `run` must be running."""

    def __init__(self, kafka: Log, clock: Clock, timeout_s: float, spawn: Spawn) -> None:
        """`spawn` starts a supervised task: a permanent error (AccessDenied) is raised in one."""
        self._log = kafka
        self._clock = clock
        self._timeout_s = timeout_s
        self._spawn = spawn
        self._answered_at = clock.now()
        self._probes: set[asyncio.Task[Any]] = set()
        self._limits: set[asyncio.Timeout] = set()
        self._silent_since: float | None = None

    @property
    def silence_s(self) -> float:
        return self._clock.now() - self._answered_at

    @property
    def is_answering(self) -> bool:
        return self.silence_s <= self._timeout_s

    @asynccontextmanager
    async def timeout(self, within_s: float) -> AsyncIterator[None]:
        """A time-out of `within_s`, or less when Kafka stops answering. Raises TimeoutError."""
        async with asyncio.timeout(within_s) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    async def run(self) -> None:
        partitions = await self._log.partitions(RESPONSES)
        number = 0
        while True:
            if len(self._probes) < MAX_PENDING_PROBES:
                probe = self._spawn("probe", self._probe_once(number % partitions))
                self._probes.add(probe)
                probe.add_done_callback(self._probes.discard)
                number += 1
            slept_from = self._clock.now()
            await self._clock.sleep(PROBE_INTERVAL_S)
            slept_s = self._clock.now() - slept_from
            self._answered_at += max(0.0, slept_s - 2 * PROBE_INTERVAL_S)  # this process was paused
            self._judge()

    async def _probe_once(self, partition: int) -> None:
        try:
            await self._log.end_offsets(RESPONSES, [partition])
        except BrokerUnavailable:
            return  # the outage continues, and is logged once
        if self._silent_since is not None:
            log.info("Kafka answers again after %.1f s", self._clock.now() - self._silent_since)
            self._silent_since = None
        self._answered_at = self._clock.now()

    def _judge(self) -> None:
        if self._silent_since is None and self.silence_s >= LOGGED_SILENCE_S:
            self._silent_since = self._answered_at
            log.warning("Kafka has not answered for %.1f s; waiting for it", self.silence_s)
        if not self.is_answering:
            for limit in self._limits:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())
