"""What the log says of a run: where each request ran and when, its answer, who was declared lost.

A reader of its own, by the reader's rule, beside what clients were told. Times are of this
process's clock at the reading: a little late.
"""

from __future__ import annotations

from typing import NamedTuple

from streams.clock import Clock
from streams.codecs import decode
from streams.errors import RecordError
from streams.ports import Log, Partition
from streams.records import Assigned, Chunk, End, Ended, Fence, Lost, Request
from streams.topics import KV_EVENTS, LEDGER, REQUESTS, RESPONSES
from streams.transcript import Transcript

POLL_S = 0.2
EVERY_S = 0.1
"""It looks so often: to read each record by itself, a second time, costs brokers and this process
as much as a router does. A stream has been assigned for longer before its first text comes."""


class Death(NamedTuple):
    """A worker's epoch was declared lost."""

    at: float
    worker: str
    silent_ms: int


class Story:
    """One request, as the log has it."""

    def __init__(self, request_id: str) -> None:
        self.transcript = Transcript(request_id)
        self.assigned: list[tuple[float, str]] = []
        self.asked_at: float | None = None
        self.ended = False

    def worker_at(self, moment: float) -> str:
        """Where it ran at a moment; "" before its first assignment."""
        return next((worker for at, worker in reversed(self.assigned) if at <= moment), "")


class Witness:
    """Follows the log from its present end. `run` must be running."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self.stories: dict[str, Story] = {}
        self.deaths: list[Death] = []
        self._lost: set[tuple[str, int]] = set()

    async def ends(self) -> dict[Partition, int]:
        """Where the log ends now."""
        positions: dict[Partition, int] = {}
        for topic in (REQUESTS, LEDGER, RESPONSES, KV_EVENTS):
            numbers = range(await self._log.partitions(topic))
            ends = await self._log.end_offsets(topic, numbers)
            positions |= {Partition(topic, n): ends[n] for n in numbers}
        return positions

    async def run(self, positions: dict[Partition, int]) -> None:
        """Read on until cancelled."""
        reader = self._log.reader(moving=False)
        reader.assign(positions)
        try:
            while True:
                for records in (await reader.poll(POLL_S)).values():
                    now = self._clock.now()
                    for record in records:
                        try:
                            self._take(decode(record), now)
                        except RecordError:
                            continue
                await self._clock.sleep(EVERY_S)
        finally:
            await reader.close()

    def _take(self, record: object, now: float) -> None:
        if isinstance(record, Chunk | Fence | End):
            self._story(record.id).transcript.feed(record)
        elif isinstance(record, Assigned):
            self._story(record.id).assigned.append((now, record.worker))
        elif isinstance(record, Ended):
            self._story(record.id).ended = True
        elif isinstance(record, Request):
            self._story(record.id).asked_at = now
        elif isinstance(record, Lost) and (record.worker, record.epoch) not in self._lost:
            self._lost.add((record.worker, record.epoch))  # several routers may say so
            self.deaths.append(Death(now, record.worker, record.silent_ms))

    def _story(self, request_id: str) -> Story:
        if (story := self.stories.get(request_id)) is None:
            story = self.stories[request_id] = Story(request_id)
        return story
