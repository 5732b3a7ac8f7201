"""Evacuation: the runs that are to leave a worker, by an operator's order (`Cordon.evacuates`).

Which runs are due follows from the registry and the ledger, so the owner of each lane moves its own
requests, and the owner after it those that are left. A run leaves only if another worker can
continue it, and has room now: else it goes on where it is, and is looked at again when there is
room, or after a time. Batch requests, which may wait for long, take no room of interactive ones. A
hand-over between two workers is completed first: it is short. `app/lanes/failover.py` moves the
answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvlane.app.routing.queueing.herd_avoidance import HerdAvoidance
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
"""Time after which another worker is looked for again, if none could take a run; it doubles."""
MAX_RETRY_MS = 60_000
MOVE_MS = 5_000
"""How long a move counts in the room of other workers. Then its request waits in the queue."""


class _Move(NamedTuple):
    """A request on its way. `workers`: those that may take it; none before its record is read."""

    model: str
    is_batch: bool
    until_ms: int
    workers: frozenset[str] = frozenset()


class _Stay(NamedTuple):
    """The attempt of a request that stays, and the broker time until which it does."""

    attempt: int
    until_ms: float
    pause_ms: int = RETRY_MS


class Evacuation:
    """One per router. `unconfirmed`: the load of its decisions that it has not read back."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: LedgerState,
        pools: CandidatePools,
        capacity: WorkerCapacity,
        unconfirmed: ActiveLoad,
        herd_avoidance: HerdAvoidance,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._pools = pools
        self._capacity = capacity
        self._unconfirmed = unconfirmed
        self._herd_avoidance = herd_avoidance
        self._moving: dict[str, _Move] = {}
        """By request, in the order of their begin."""
        self._move_counts = Counter[tuple[str, bool]]()
        """The number of moves by model, and by whether they are batch requests."""
        self._staying: dict[str, _Stay] = {}

    @property
    def workers(self) -> list[str]:
        return [worker for worker, cordon in self._fleet.cordons.items() if cordon.evacuates]

    def on_fleet_changed(self) -> None:
        if not self.workers:
            self._staying.clear()

    def due(self, request_id: str, state: RequestState, now_ms: int) -> RunId | None:
        """The run of a request that is to leave its worker; None if there is none, or no room."""
        if not self._fleet.cordons or state.origin is None:
            return None
        for run_id, run in state.runs.items():
            if self._leaves(run_id, run) and not self._stays(request_id, run_id, now_ms):
                return run_id if self._has_room(run_id, state, now_ms) else None
        return None

    def _leaves(self, run_id: RunId, run: RunStatus) -> bool:
        cordon = self._fleet.cordons.get(run_id.worker)
        if cordon is None or not cordon.evacuates:
            return False
        if run_id.phase == "aggregated":
            return run.state in OPEN and run.is_preemptible
        return run_id.phase == "decode" and run.state == "prefilled" and run.is_preemptible

    def _stays(self, request_id: str, run_id: RunId, now_ms: int) -> bool:
        stay = self._staying.get(request_id)
        return stay is not None and stay.attempt == run_id.attempt and now_ms < stay.until_ms

    def _has_room(self, run_id: RunId, state: RequestState, now_ms: int) -> bool:
        """Whether other workers of the same model may take this run besides those that move."""
        self._drop_late_moves(now_ms)
        if (member := self._fleet.members.get(run_id.worker)) is None:
            return False
        workers = self._pools.pool(member.card.model, "aggregated").workers
        moving = self._move_counts[member.card.model, state.is_batch]
        return moving + 1 <= self._share_of_room(workers, is_batch=state.is_batch)

    def _share_of_room(self, workers: Iterable[str], *, is_batch: bool) -> float:
        """The share of this router in the room of workers, since moves of other routers are not in
        the ledger before their decisions; one run at least, if there is room."""
        epochs = {worker: self._fleet.members[worker].epoch for worker in workers}
        room = sum(self._capacity.room(*each, is_batch=is_batch) for each in epochs.items())
        return max(min(room, 1), room / (1 + self._herd_avoidance.other_routers))

    def take_room(self, request: Request, state: RequestState, now_ms: int) -> bool:
        """Whether another worker has room for this request in the middle of its answer, can
        continue it, and has not failed it. The room counts as taken while the request moves.
        Evacuations before, from workers that are back, are no failures."""
        failed = state.failed_workers if state.failures else ()
        rows = filter_eligible(
            request, "aggregated", self._pools.pool(request.model, "aggregated"), self._fleet,
            excluded=state.failed_workers, full=self._capacity.full_workers(now_ms),
            loads=(self._ledger.active_load, self._unconfirmed), has_output=True,
        )  # fmt: skip
        if isinstance(rows, NotEligible):
            return False
        members = [self._fleet.members.get(run_id.worker) for run_id in state.runs]
        now_at = [member.card for member in members if member is not None]
        able = (row for row in rows if can_continue(row.card, request, now_at))
        workers = frozenset(row.worker_rank.worker for row in able).difference(failed)
        taken = sum(
            move.is_batch == state.is_batch and not workers.isdisjoint(move.workers)
            for other, move in self._moving.items()
            if other != request.id
        )
        if taken + 1 > self._share_of_room(workers, is_batch=state.is_batch):
            return False
        if (move := self._moving.get(request.id)) is not None:
            self._moving[request.id] = move._replace(workers=workers)
        return True

    def stay(self, request_id: str, run_id: RunId) -> None:
        """Let a run go on to its end."""
        self._staying[request_id] = _Stay(run_id.attempt, math.inf)

    def stay_for_now(self, request_id: str, run_id: RunId, now_ms: int) -> None:
        """Let a run go on for a time, longer with each repetition: each look reads its record."""
        before, pause_ms = self._staying.get(request_id), RETRY_MS
        if before is not None and before.attempt == run_id.attempt:
            pause_ms = min(2 * before.pause_ms, MAX_RETRY_MS)
        self._staying[request_id] = _Stay(run_id.attempt, now_ms + pause_ms, pause_ms)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._staying.pop(request_id, None)

    @contextmanager
    def moving(
        self, request_id: str, run_id: RunId, state: RequestState, now_ms: int
    ) -> Iterator[bool]:
        """Count a request in the room of other workers, until its decision counts there, or it has
        waited for `MOVE_MS`. False if those that began before it take all of the room."""
        has_room = self._has_room(run_id, state, now_ms)
        if has_room:
            model = self._fleet.members[run_id.worker].card.model
            self._moving[request_id] = _Move(model, state.is_batch, now_ms + MOVE_MS)
            self._move_counts[model, state.is_batch] += 1
        try:
            yield has_room
        finally:
            self._drop_move(request_id)

    def _drop_late_moves(self, now_ms: int) -> None:
        while self._moving:
            request_id, first = next(iter(self._moving.items()))
            if now_ms < first.until_ms:
                break
            self._drop_move(request_id)

    def _drop_move(self, request_id: str) -> None:
        move = self._moving.pop(request_id, None)
        if move is not None:
            self._move_counts[move.model, move.is_batch] -= 1
