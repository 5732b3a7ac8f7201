"""Silence of workers: which of them have sent no heartbeat for longer than a time-out.

Silence counts from when this process read a record, by its own monotonic clock, so it is no part of
the fleet. A silent worker gets no new work; `app/lanes/failure_detector.py` decides whether it is
lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvlane.app.routing.state.fleet import Fleet
from kvlane.streams.records import Heartbeat, LogRecord, WorkerCard


class _LastRead(NamedTuple):
    epoch: int
    at_s: float


class SilentWorkers:
    """The workers of a fleet that are silent. `version` moves when they are others."""

    def __init__(self, fleet: Fleet, timeout_s: float) -> None:
        self.names: set[str] = set()
        self.version = 0
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._last_reads: dict[str, _LastRead] = {}
        self._next_s = math.inf
        """No worker falls silent before."""

    def on_records(
        self, log_records: Sequence[LogRecord], now_s: float, broker_ms: int | None = None
    ) -> None:
        """Records of the fleet were applied at `now_s`. `broker_ms`: broker time, for records that
        may be old: a heartbeat counts as read when it was appended."""
        for log_record in log_records:
            record = log_record.record
            if isinstance(record, Heartbeat):
                age_s = 0.0 if broker_ms is None else (broker_ms - log_record.timestamp_ms) / 1000
                self._on_heartbeat(record, now_s, now_s - max(age_s, 0.0))
            elif isinstance(record, WorkerCard):
                self._on_card(record.id, now_s)

    def _on_heartbeat(self, beat: Heartbeat, now_s: float, at_s: float) -> None:
        last = self._last_reads.get(beat.worker)
        if last is not None and beat.epoch < last.epoch:
            return
        self._set(beat.worker, beat.epoch, at_s)
        if beat.worker in self.names and now_s - at_s <= self._timeout_s:
            self.names.remove(beat.worker)
            self.version += 1

    def _on_card(self, worker: str, now_s: float) -> None:
        """A new epoch has its time from its card on."""
        member, last = self._fleet.members.get(worker), self._last_reads.get(worker)
        if member is not None and (last is None or last.epoch < member.epoch):
            self._set(worker, member.epoch, now_s)

    def _set(self, worker: str, epoch: int, at_s: float) -> None:
        self._last_reads[worker] = _LastRead(epoch, at_s)
        self._next_s = min(self._next_s, at_s + self._timeout_s)

    def last_read_s(self, worker: str, epoch: int) -> float:
        """When the last record of an epoch of a worker was read; -inf for none."""
        last = self._last_reads.get(worker)
        return last.at_s if last is not None and last.epoch == epoch else -math.inf

    def update(self, now_s: float) -> None:
        """Find the workers that are silent by now, and drop those that the fleet has dropped."""
        if now_s <= self._next_s:
            return
        fleet, since_s = self._fleet, now_s - self._timeout_s
        self._last_reads = {
            worker: last
            for worker, last in self._last_reads.items()
            if worker in fleet.members or worker in fleet.heartbeats
        }
        names = {worker for worker, last in self._last_reads.items() if last.at_s < since_s}
        heard = (last.at_s for last in self._last_reads.values() if last.at_s >= since_s)
        self._next_s = min(heard, default=math.inf) + self._timeout_s
        if names != self.names:
            self.names = names
            self.version += 1
