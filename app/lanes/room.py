"""Room: which workers take no more runs at the moment.

That a worker is full is known from its card, which says how many runs it takes, and from its
refusals in the ledger, which every router reads. What it held then is what it holds at most; no
more is sent to it, except for one request a second that finds out whether it takes more by now (it
may have refused because of runs that no ledger knew), within what its card says.

Only workers that were full once are remembered, so that asking who is costs nothing in a fleet that
has room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.routing.burdens import Burdens
from app.routing.fleet import Fleet
from app.routing.load import Load
from streams.records import Assigned, Fact, Finished, Started

TRY_AGAIN_MS = 1_000
"""How long a refusal is taken at its word."""


@dataclass(slots=True)
class _Limit:
    """How many open runs a worker had when it refused one more, or would have, and when it did."""

    runs: int
    refused_ms: float = -math.inf


class Room:
    """One per router. `own`: burdens of its decisions that the ledger has not told it yet."""

    def __init__(self, fleet: Fleet, load: Load, own: Burdens) -> None:
        self._fleet = fleet
        self._load = load
        self._own = own
        self._limits: dict[tuple[str, int], _Limit] = {}

    def full(self, now_ms: int) -> list[tuple[str, int]]:
        """Workers that take no more, with their epochs."""
        return [
            key
            for key, limit in self._limits.items()
            if self._open_runs(*key) >= self._bound(key, limit, now_ms)
        ]

    def sent(self, worker: str, epoch: int) -> None:
        """A worker has one more run, by this router's decisions or by the ledger."""
        most = self._most_runs(worker, epoch)
        if self._open_runs(worker, epoch) >= most:
            self._limits.setdefault((worker, epoch), _Limit(int(most)))

    def told(self, fact: Fact) -> None:
        """A new record of the ledger was folded."""
        match fact.record:
            case Assigned(worker=worker, epoch=epoch):
                self.sent(worker, epoch)
            case Started(worker=worker, epoch=epoch):
                limit = self._limits.get((worker, epoch))
                if limit is not None:
                    limit.runs = max(limit.runs, self._load.burdens.of(worker, epoch).runs)
            case Finished(worker=worker, epoch=epoch, code="worker_full"):
                runs = self._load.burdens.of(worker, epoch).runs
                if (before := self._limits.get((worker, epoch))) is not None:
                    runs = min(runs, before.runs)
                self._limits[worker, epoch] = _Limit(runs, fact.timestamp_ms)

    def fleet_changed(self) -> None:
        """Forget the dead."""
        for key in [key for key in self._limits if self._fleet.is_lost(*key)]:
            del self._limits[key]

    def _bound(self, key: tuple[str, int], limit: _Limit, now_ms: int) -> float:
        one_more = now_ms - limit.refused_ms >= TRY_AGAIN_MS
        return min(limit.runs + one_more, self._most_runs(*key))

    def _open_runs(self, worker: str, epoch: int) -> int:
        return self._load.burdens.of(worker, epoch).runs + self._own.of(worker, epoch).runs

    def _most_runs(self, worker: str, epoch: int) -> float:
        """What its card says, if it says so."""
        member = self._fleet.members.get(worker)
        if member is None or member.epoch != epoch or member.card.max_runs is None:
            return math.inf
        return member.card.max_runs
