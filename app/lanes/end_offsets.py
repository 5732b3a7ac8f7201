"""End offsets of partitions: one request for all concurrent queries of a topic.

A router that takes over lanes needs the ends of two partitions of each, and a lane needs one for
every failover. Queries that come while a request for the same topic is under way share the next
one: the answer to an earlier request may be older than they can use.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import NamedTuple

from app.runtime.process import ProcessContext
from streams.ports import Log, Partition
from streams.retry import retry_while_unavailable


class _Question(NamedTuple):
    """A request that is still to be sent: more partitions can be added."""

    partitions: set[int]
    answer: asyncio.Task[dict[int, int]]


class EndOffsets:
    """Fetches end offsets; at most one request per topic is under way."""

    def __init__(self, log: Log, ctx: ProcessContext) -> None:
        self._log = log
        self._ctx = ctx
        self._next: dict[str, _Question] = {}
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def fetch(self, source: Partition) -> int:
        """The next offset of a partition, as of now or later; repeated until the broker answers."""
        question = self._next.get(source.topic)
        if question is None:
            partitions: set[int] = set()
            answer = self._ctx.spawn("end offsets", self._fetch(source.topic, partitions))
            question = self._next[source.topic] = _Question(partitions, answer)
        question.partitions.add(source.partition)
        return (await asyncio.shield(question.answer))[source.partition]

    async def _fetch(self, topic: str, partitions: set[int]) -> dict[int, int]:
        async with self._locks[topic]:
            del self._next[topic]  # later queries may need a later end
            return await retry_while_unavailable(
                self._ctx.clock, lambda: self._log.end_offsets(topic, sorted(partitions))
            )
