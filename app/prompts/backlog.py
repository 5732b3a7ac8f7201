"""The backlog of a topic of prompts: the prompts that its owner has not published as requests yet.

Of the partitions which one preprocessor owns. Records are counted on demand, from the end offsets;
tokens are known of prompts that were read and wait for room in routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from kvlane.streams.clock import Clock
from kvlane.streams.errors import StreamError
from kvlane.streams.ports import Log
from kvlane.streams.reading.group_consumer import PartitionClaim

MEASURE_TIMEOUT_S = 2.0
"""A scrape must not wait for a broker that does not answer."""


class BacklogSize(NamedTuple):
    """Prompts that wait. `tokens`: of those that were read; `oldest_s`: since the append of the
    oldest one, at most."""

    records: int
    tokens: int
    oldest_s: float


class Backlog:
    def __init__(
        self, topic: str, log: Log, clock: Clock, claims: Mapping[int, PartitionClaim]
    ) -> None:
        """`claims`: those of the owned partitions, as they are when it is measured."""
        self.topic = topic
        self.waiting_tokens = 0
        """Tokens of requests that wait for room in routers."""
        self._log = log
        self._clock = clock
        self._claims = claims
        self._oldest_ms: dict[int, int] = {}
        """By partition, a time that is not after the append of that prompt, where one is known."""

    def revoked(self, partition: int) -> None:
        self._oldest_ms.pop(partition, None)

    def reach(self, partition: int, timestamp_ms: int) -> None:
        """No prompt appended before this time waits: it is that of the first one that was read, or
        of the last one that was published."""
        self._oldest_ms[partition] = timestamp_ms

    async def measure(self) -> BacklogSize | None:
        """The size now; None while the broker does not answer."""
        now_ms = self._clock.wall_ms()
        owned = {partition: claim.low_water for partition, claim in self._claims.items()}
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
            if partition not in self._claims:  # revoked meanwhile
                continue
            if not lag:
                self._oldest_ms[partition] = now_ms
            oldest_ms = min(oldest_ms, self._oldest_ms.get(partition, now_ms))
        return BacklogSize(records, self.waiting_tokens, (now_ms - oldest_ms) / 1000)
