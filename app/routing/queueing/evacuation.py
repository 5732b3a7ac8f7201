"""Evacuation: the runs that are to leave a worker, by an operator's order (`Cordon.evacuates`).

Which runs are due follows from the registry and the ledger, so the owner of each lane moves its own
requests, and the owner after it those that are left. A run leaves only if another worker can
continue it, and has room now: else it goes on where it is, and is looked at again when the fleet
changes, or when there is room. A hand-over between two workers is completed first: it is short.
`app/lanes/failover.py` moves the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from kvlane.app.routing.queueing.worker_capacity import WorkerCapacity
from kvlane.app.routing.selection.eligibility import (
    CandidatePools,
    NotEligible,
    can_continue,
    filter_eligible,
)
from kvlane.app.routing.state.active_load import ActiveLoad
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.request_state import OPEN, RequestState, RunId, RunStatus
from kvlane.streams.request import Request

RETRY_MS = 5_000
"""Time after which another worker is looked for again, if none could take a run."""


class Evacuation:
    """One per router. `unconfirmed`: the load of its decisions that it has not read back."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: LedgerState,
        pools: CandidatePools,
        capacity: WorkerCapacity,
        unconfirmed: ActiveLoad,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._pools = pools
        self._capacity = capacity
        self._unconfirmed = unconfirmed
        self._moving: set[str] = set()
        self._staying: dict[str, tuple[int, float]] = {}
        """By request, the attempt that stays, and the broker time until which it does."""

    @property
    def workers(self) -> list[str]:
        return [worker for worker, cordon in self._fleet.cordons.items() if cordon.evacuates]

    def on_fleet_changed(self) -> None:
        """Another worker may take what stays."""
        kept = {each: stay for each, stay in self._staying.items() if stay[1] == math.inf}
        self._staying = kept if self.workers else {}

    def due(self, request_id: str, state: RequestState, now_ms: int) -> RunId | None:
        """The run of a request that is to leave its worker; None if there is none, or no room."""
        if not self._fleet.cordons or state.origin is None:
            return None
        for run_id, run in state.runs.items():
            if self._leaves(run_id, run) and not self._stays(request_id, run_id, now_ms):
                return run_id if self._has_room(run_id, len(self._moving) + 1) else None
        return None

    def _leaves(self, run_id: RunId, run: RunStatus) -> bool:
        cordon = self._fleet.cordons.get(run_id.worker)
        if cordon is None or not cordon.evacuates:
            return False
        if run_id.phase == "aggregated":
            return run.state in OPEN and run.is_preemptible
        return run_id.phase == "decode" and run.state == "prefilled" and run.is_preemptible

    def _stays(self, request_id: str, run_id: RunId, now_ms: int) -> bool:
        attempt, until_ms = self._staying.get(request_id, (-1, 0))
        return attempt == run_id.attempt and now_ms < until_ms

    def _has_room(self, run_id: RunId, runs: int) -> bool:
        """Whether other workers of the same model may take so many more runs."""
        member = self._fleet.members.get(run_id.worker)
        if member is None:
            return False
        workers = self._pools.pool(member.card.model, "aggregated").workers
        room = sum(self._capacity.room(w, self._fleet.members[w].epoch) for w in workers)
        return runs <= room

    def can_leave(self, request: Request, state: RequestState, now_ms: int) -> bool:
        """Whether another worker can continue this request now, in the middle of its answer, and
        has not failed it. Evacuations before, from workers that are back, are no failures."""
        failed = state.failed_workers if state.failures else ()
        rows = filter_eligible(
            request, "aggregated", self._pools.pool(request.model, "aggregated"), self._fleet,
            excluded=state.failed_workers, full=self._capacity.full_workers(now_ms),
            loads=(self._ledger.active_load, self._unconfirmed), has_output=True,
        )  # fmt: skip
        return not isinstance(rows, NotEligible) and any(
            can_continue(row.card, request) and row.worker_rank.worker not in failed for row in rows
        )

    def stay(self, request_id: str, run_id: RunId, until_ms: float = math.inf) -> None:
        """Let a run go on: to its end, or until a time or a change of the fleet."""
        self._staying[request_id] = (run_id.attempt, until_ms)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._staying.pop(request_id, None)

    @contextmanager
    def moving(self, request_id: str, run_id: RunId) -> Iterator[bool]:
        """Count a request in the room of other workers, until its decision counts there. False if
        those that began before it take all of the room."""
        self._moving.add(request_id)
        try:
            yield self._has_room(run_id, len(self._moving))
        finally:
            self._moving.discard(request_id)
