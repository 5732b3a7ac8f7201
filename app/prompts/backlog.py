"""The backlog of a topic of prompts: the prompts that its owner has not published as requests yet.

It is that of the partitions which one preprocessor owns; the sum over all of them is that of the
deployment. Records are counted when they are asked for, from the end offsets; tokens are known of
prompts that were read and wait for room in routers. Never here: reading and committing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from streams.clock import Clock
from streams.errors import StreamError
from streams.ports import Log

MEASURE_TIMEOUT_S = 2.0
"""A scrape must not wait for a broker that does not answer."""


class BacklogSize(NamedTuple):
    """Prompts that wait. `tokens`: of those that were read; `oldest_s`: since the append of the
    oldest one, at most."""

    records: int
    tokens: int
    oldest_s: float


class Backlog:
    """The backlog of the owned partitions of a topic."""

    def __init__(self, topic: str, log: Log, clock: Clock) -> None:
        self.topic = topic
        self.waiting_tokens = 0
        """Tokens of requests that wait for room in routers."""
        self._log = log
        self._clock = clock
        self._next: dict[int, int] = {}
        """By owned partition, the offset of the first prompt that is not published."""
        self._oldest_ms: dict[int, int] = {}
        """By partition, a time that is not after the append of that prompt, where one is known."""

    def assigned(self, starts: Mapping[int, int]) -> None:
        """Own partitions, from these offsets on."""
        self._next |= starts

    def revoked(self, partition: int) -> None:
        """Own a partition no more."""
        self._next.pop(partition, None)
        self._oldest_ms.pop(partition, None)

    def received(self, partition: int, timestamp_ms: int) -> None:
        """The first prompt was read; it was appended then."""
        self._oldest_ms[partition] = timestamp_ms

    def published(self, partition: int, position: int, timestamp_ms: int) -> None:
        """Everything below a position is published; the last prompt was appended then."""
        self._next[partition] = position
        self._oldest_ms[partition] = timestamp_ms

    async def measure(self) -> BacklogSize | None:
        """The size now; None while the broker does not answer."""
        now_ms = self._clock.wall_ms()
        owned = dict(self._next)
        if not owned:
            return BacklogSize(0, 0, 0.0)
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                ends = await self._log.end_offsets(self.topic, list(owned))
        except (StreamError, TimeoutError):
            return None
        records, oldest_ms = 0, now_ms
        for partition, position in owned.items():
            lag = max(0, ends[partition] - position)
            records += lag
            if partition not in self._next:  # revoked meanwhile
                continue
            if not lag:
                self._oldest_ms[partition] = now_ms
            oldest_ms = min(oldest_ms, self._oldest_ms.get(partition, now_ms))
        return BacklogSize(records, self.waiting_tokens, (now_ms - oldest_ms) / 1000)
