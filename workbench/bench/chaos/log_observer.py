"""Observer of the log: workers, times, text and results of requests, and workers declared lost.

Reads streams by the stream reconstruction rule, independently of the clients. Times are those of
this process's clock when it reads, so they are a little late.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvlane.streams.clock import Clock
from kvlane.streams.codecs import decode
from kvlane.streams.errors import RecordError
from kvlane.streams.ports import Log, Partition
from kvlane.streams.records import (
    Assigned,
    Chunk,
    End,
    Ended,
    Fence,
    Fencing,
    Lost,
    PrefillDone,
    Result,
    Started,
)
from kvlane.streams.request import Request
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import KV_EVENTS, LEDGER, REQUESTS, RESPONSES, RESULTS

POLL_S = 0.2
READ_INTERVAL_S = 0.1
"""Interval between polls: reading every record on its own once more costs brokers and this process
as much as a router does. The time from an assignment to its first text is longer than this."""


class WorkerLoss(NamedTuple):
    """A worker's epoch was declared lost."""

    at: float
    worker: str
    silent_ms: int


class ObservedRequest:
    def __init__(self, request_id: str) -> None:
        self.transcript = Transcript(request_id)
        self.assigned: list[tuple[float, str]] = []
        self.requested_at: float | None = None
        self.ended = False

    def worker_at(self, moment: float) -> str:
        """The worker at a time; "" before the first assignment."""
        return next((worker for at, worker in reversed(self.assigned) if at <= moment), "")


class LogObserver:
    """Follows the log from its current end. `run` must be running."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self.requests: dict[str, ObservedRequest] = {}
        self.losses: list[WorkerLoss] = []
        self.results: Counter[str] = Counter()
        """Number of results that a reader of committed records sees, by request id."""
        self.handovers: list[float] = []
        """Times from the end of a prefill to Started of its decode, in ms between append times."""
        self.preemptions = 0
        """Runs that gave way to interactive requests."""
        self._handed_over_ms: dict[tuple[str, int], int] = {}
        """By request and attempt, the append time of a hand-over without decode so far."""
        self._lost: set[tuple[str, int]] = set()

    async def end_offsets(self) -> dict[Partition, int]:
        positions: dict[Partition, int] = {}
        for topic in (REQUESTS, LEDGER, RESPONSES, KV_EVENTS, RESULTS):
            numbers = range(await self._log.partitions(topic))
            ends = await self._log.end_offsets(topic, numbers)
            positions |= {Partition(topic, n): ends[n] for n in numbers}
        return positions

    async def run(self, positions: dict[Partition, int]) -> None:
        """Read until cancelled."""
        reader = self._log.reader(moving=False)
        reader.assign(positions)
        try:
            while True:
                for records in (await reader.poll(POLL_S)).values():
                    now = self._clock.now()
                    for record in records:
                        try:
                            taken = decode(record)
                        except RecordError:
                            continue
                        self._take(taken, now)
                        self._take_handover(taken, record.timestamp)
                await self._clock.sleep(READ_INTERVAL_S)
        finally:
            await reader.close()

    def _take(self, record: object, now: float) -> None:
        if isinstance(record, Chunk | Fence | End):
            self._request(record.id).transcript.apply(record)
        elif isinstance(record, Assigned):
            self._request(record.id).assigned.append((now, record.worker))
        elif isinstance(record, Result):
            self.results[record.id] += 1
        elif isinstance(record, Fencing):
            self.preemptions += record.reason == "preempted"
        elif isinstance(record, Ended):
            self._request(record.id).ended = True
        elif isinstance(record, Request):
            self._request(record.id).requested_at = now
        elif isinstance(record, Lost) and (record.worker, record.epoch) not in self._lost:
            self._lost.add((record.worker, record.epoch))  # several routers may write it
            self.losses.append(WorkerLoss(now, record.worker, record.silent_ms))

    def _take_handover(self, record: object, at_ms: int) -> None:
        if isinstance(record, PrefillDone) and record.phase == "prefill":
            self._handed_over_ms[record.id, record.attempt] = at_ms
        elif isinstance(record, Started) and record.phase == "decode":
            since_ms = self._handed_over_ms.pop((record.id, record.attempt), None)
            if since_ms is not None:
                self.handovers.append(at_ms - since_ms)
        elif isinstance(record, Ended):
            for key in [key for key in self._handed_over_ms if key[0] == record.id]:
                del self._handed_over_ms[key]

    def _request(self, request_id: str) -> ObservedRequest:
        if (request := self.requests.get(request_id)) is None:
            request = self.requests[request_id] = ObservedRequest(request_id)
        return request
