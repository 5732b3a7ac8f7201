"""Worker capacity: the workers that take no more runs at the moment.

A worker is full by its card, which limits its runs, or by its refusals in the ledger, which every
router reads. After a refusal, its limit is the number of runs it had then; once a second one probe
request may exceed it, within the card's limit, since runs that no ledger had may have been the
cause. A refusal that is not retryable is that of an expired hand-over, and sets no limit. For an
interactive request only interactive runs count, since batch runs give way to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvlane.app.routing.selection.batch_placement import max_sequences
from kvlane.app.routing.state.active_load import ActiveLoad
from kvlane.app.routing.state.batch_runs import BatchRuns
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.streams.records import Assigned, Finished, LogRecord, Started

PROBE_INTERVAL_MS = 1_000
"""How long a refusal holds before one request probes for capacity."""


@dataclass(slots=True)
class _Limit:
    """The open runs of a worker when it was full, and the time of its refusal if it refused one;
    None for a new refusal, whose time is that of the next query."""

    runs: int
    refused_ms: float | None = -math.inf


class WorkerCapacity:
    """One per router. `unconfirmed`, `unconfirmed_batch`: its decisions not yet read back."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: LedgerState,
        unconfirmed: ActiveLoad,
        unconfirmed_runs: BatchRuns,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._unconfirmed = unconfirmed
        self._unconfirmed_batch = unconfirmed_runs
        self._limits: dict[tuple[str, int], _Limit] = {}

    def full_workers(self, now_ms: int) -> list[tuple[str, int]]:
        """The workers, with their epochs, that are full for an interactive request."""
        return [
            key
            for key, limit in self._limits.items()
            if self._interactive_runs(*key) >= self._bound(key, limit, now_ms)
        ]

    def full_for_batch(self, now_ms: int) -> list[tuple[str, int]]:
        """The workers, with their epochs, that are full for a batch request."""
        return [
            key
            for key, limit in self._limits.items()
            if self._open_runs(*key) >= self._bound(key, limit, now_ms)
        ]

    def room(self, worker: str, epoch: int, *, is_batch: bool) -> int:
        """The runs of a class that a worker may take and compute at once, by its card."""
        member = self._fleet.members.get(worker)
        if member is None or member.epoch != epoch:
            return 0
        runs = self._open_runs if is_batch else self._interactive_runs
        return max(0, max_sequences(member.card) - runs(worker, epoch))

    def on_assigned(self, worker: str, epoch: int) -> None:
        """A worker got one more run, by this router's decisions or by the ledger."""
        most = self._most_runs(worker, epoch)
        if most < math.inf and self._open_runs(worker, epoch) >= most:
            self._limits.setdefault((worker, epoch), _Limit(int(most)))

    def on_record(self, record: LogRecord) -> None:
        content = record.record
        if type(content) is Assigned:
            self.on_assigned(content.worker, content.epoch)
        elif type(content) is Started:
            key = content.worker, content.epoch
            if (limit := self._limits.get(key)) is not None:
                limit.runs = max(limit.runs, self._known_runs(*key))
        elif type(content) is Finished and content.code == "worker_full" and content.retryable:
            key = content.worker, content.epoch
            runs = self._known_runs(*key)
            if (before := self._limits.get(key)) is not None:
                runs = min(runs, before.runs)
            self._limits[key] = _Limit(runs, None)

    def on_fleet_changed(self) -> None:
        for key in [key for key in self._limits if self._fleet.is_lost(*key)]:
            del self._limits[key]

    def _bound(self, key: tuple[str, int], limit: _Limit, now_ms: int) -> float:
        if limit.refused_ms is None:
            limit.refused_ms = now_ms
        one_more = now_ms - limit.refused_ms >= PROBE_INTERVAL_MS
        return min(limit.runs + one_more, self._most_runs(*key))

    def _interactive_runs(self, worker: str, epoch: int) -> int:
        loads = (self._ledger.active_load, self._unconfirmed)
        return sum(load.total(worker, epoch).runs for load in loads)

    def _known_runs(self, worker: str, epoch: int) -> int:
        interactive = self._ledger.active_load.total(worker, epoch).runs
        return interactive + self._ledger.batch_runs.on_worker(worker, epoch)

    def _open_runs(self, worker: str, epoch: int) -> int:
        own = self._unconfirmed.total(worker, epoch).runs + self._unconfirmed_batch.on_worker(
            worker, epoch
        )
        return self._known_runs(worker, epoch) + own

    def _most_runs(self, worker: str, epoch: int) -> float:
        member = self._fleet.members.get(worker)
        if member is None or member.epoch != epoch or member.card.max_runs is None:
            return math.inf
        return member.card.max_runs
