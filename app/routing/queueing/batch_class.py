"""The batch requests in the queue of a router: their places, their waits, and preemption.

Interactive requests go first: a batch request takes only the time that they leave
(`app/routing/selection/batch_placement.py`). Its queue has bounds of its own: requests beyond them
wait in the log (`deferred_prompts.py`), none is refused for load. Preempted requests are first,
then the order of arrival.

A run gives way when the interactive runs of its rank need its place. Which ones is a function of
the ledger alone, so that all routers agree, and the owner of each lane moves its own requests
(`app/lanes/failover.py`), without a message between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.queueing.deferred_prompts import QueueSize
from kvlane.app.routing.queueing.fair_share import FairQueue
from kvlane.app.routing.queueing.pending import LaneRequest, RequestKey
from kvlane.app.routing.queueing.waiting_requests import WaitingRequests
from kvlane.app.routing.queueing.wake_ups import QueueName, WakeUps
from kvlane.app.routing.selection.batch_placement import (
    RESUME_ELSEWHERE_MS,
    BatchBounds,
    max_sequences,
    place_batch_request,
    runs_to_preempt,
)
from kvlane.app.routing.selection.decision import Decision, Placement, RoutingState
from kvlane.app.routing.state.active_load import WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchRun, BatchRunKey, BatchRuns
from kvlane.app.routing.state.fleet import Fleet, WorkerRank
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.performance import profile_from_card
from kvlane.app.routing.state.request_state import OPEN, RequestState
from kvlane.streams.records import Ended, Fencing, Finished, LogRecord, PrefillDone

WAKE_INTERVAL_MS = 30
"""From a record that may have freed a place to the next look: a busy ledger has thousands a second.
With 50, batch requests leave a tenth more of the idle capacity unused (`kvlane bench mix`)."""
MAX_FREQUENT_RETRIES = 32
"""Waiting requests beyond which each retries less often."""


class _SearchInputs(NamedTuple):
    """All that the runs of a rank that give way depend on."""

    fleet_version: int
    run_changes: int
    interactive: WorkerLoad
    slowdown: float
    curves: PerfCurves | None
    mean_output_tokens: float


class BatchClass:
    """One per router. `bound`: of the queue. `unconfirmed`: the runs of decisions of this router
    that it has not read back. `routing_state`: the state for a decision, at a time."""

    def __init__(
        self,
        bounds: BatchBounds,
        bound: QueueSize,
        fleet: Fleet,
        ledger: LedgerState,
        unconfirmed: BatchRuns,
        wake_ups: WakeUps[RequestKey],
        routing_state: Callable[[int], RoutingState],
    ) -> None:
        self.waiting = WaitingRequests(FairQueue(), bound, bound, MAX_FREQUENT_RETRIES, wake_ups)
        self.wake_ms = math.inf
        """When the first waiting requests look again; inf without a record that freed a place."""
        self._wake_ups = wake_ups
        self._fleet = fleet
        self._ledger = ledger
        self._unconfirmed = unconfirmed
        self._bounds = bounds
        self._routing_state = routing_state
        self._giving_way: dict[WorkerRank, tuple[_SearchInputs, dict[str, None]]] = {}
        """By rank, the requests whose runs give way, and the inputs of that search."""

    # --- waiting ---------------------------------------------------------------------------------

    def wait(self, request: LaneRequest, now_ms: int, until_ms: float) -> None:
        """Let a request wait until a place for it may be free, or its wait ends at `until_ms`."""
        if request.key not in self.waiting.keys:
            self.waiting.add(request, request.prompt.tokens)
        name = _queue_name(request.prompt.request.model, request.prompt.has_output)
        retry_ms = self.waiting.retry_ms(now_ms, until_ms)
        self._wake_ups.add(request.key, retry_ms, name, (float(request.arrival),))

    def on_record(self, record: LogRecord, now_ms: int) -> None:
        """A record of the ledger was applied: a place may be free."""
        if (
            self.waiting.keys
            and self.wake_ms == math.inf
            and isinstance(record.record, PrefillDone | Finished | Fencing | Ended)
        ):
            self.wake_ms = now_ms + WAKE_INTERVAL_MS

    def on_fleet_changed(self) -> None:
        self._giving_way.clear()

    def wake_due(self, now_ms: float) -> None:
        """Wake the first requests of each model, if it is time; also after a step of the clock."""
        if self.wake_ms <= now_ms or now_ms < self.wake_ms - WAKE_INTERVAL_MS < math.inf:
            self.wake_ms = math.inf
            for model in {member.card.model for member in self._fleet.members.values()} | {""}:
                self._wake_next(model)

    def _wake_next(self, model: str) -> None:
        """Wake the first preempted request, which may wait for its cache, and the first new one."""
        for is_preempted in (True, False):
            self._wake_ups.wake_first([_queue_name(model, is_preempted)])

    # --- placement -------------------------------------------------------------------------------

    def decide(
        self,
        request: LaneRequest,
        now_ms: int,
        awaited: set[WorkerRank],
        full_workers: Collection[tuple[str, int]],
    ) -> Decision:
        """Decide about a request: a place, with the least prefill, a wait, or a rejection. The
        bounds on placement use the length of its own answer, those on preemption the mean, so no
        request goes where it, or another for it, would have to give way at once. `awaited`: ranks
        that interactive requests wait for."""
        state = self._routing_state(now_ms)
        waited_ms = now_ms - request.since_ms
        place = partial(
            place_batch_request,
            request.prompt, state, self, self._bounds,
            seed=request.seed,
            waits_for_cache=request.prompt.has_output and waited_ms < RESUME_ELSEWHERE_MS,
            excluded=request.excluded,
            full_workers=full_workers,
        )  # fmt: skip
        while isinstance(planned := place(awaited=awaited), Placement):
            rank = planned.worker_rank
            key, run = BatchRunKey(request.key.id, -1), batch_run(request.key.id, planned)
            known = {**self._ledger.batch_runs.on_rank(rank), **self._unconfirmed.on_rank(rank)}
            interactive = state.committed.load(rank).add(state.unconfirmed.load(rank))
            if not self._victims(rank, state, interactive, {**known, key: run}):
                self._wake_next(request.prompt.request.model)  # there may be more room
                break
            awaited.add(rank)
        return planned

    def load(self, rank: WorkerRank) -> WorkerLoad:
        return self._ledger.batch_runs.load(rank).add(self._unconfirmed.load(rank))

    # --- preemption ------------------------------------------------------------------------------

    def giving_way_on(self, rank: WorkerRank, now_ms: int) -> Collection[str]:
        """The ids of the requests whose runs on a rank give way, by the ledger. Cached, since
        callers ask once for each request."""
        runs = self._ledger.batch_runs
        if not runs.on_rank(rank):
            return ()
        state = self._routing_state(now_ms)
        inputs = _SearchInputs(
            self._fleet.version, runs.changes.count, state.committed.load(rank),
            state.slowdown.get(rank.worker, 1.0), state.curves.get(rank.worker),
            state.mean_output_tokens,
        )  # fmt: skip
        found = self._giving_way.get(rank)
        if found is None or found[0] != inputs:
            victims = self._victims(rank, state, inputs.interactive, runs.on_rank(rank))
            found = self._giving_way[rank] = (inputs, dict.fromkeys(key.id for key in victims))
        return found[1]

    def due(self, now_ms: int) -> list[str]:
        return [
            request_id
            for rank in self._ledger.batch_runs.ranks()
            for request_id in self.giving_way_on(rank, now_ms)
        ]

    def gives_way(self, request_id: str, state: RequestState, now_ms: int) -> bool:
        return any(
            run.state in OPEN
            and run.service_class == "batch"
            and request_id in self.giving_way_on(run.place, now_ms)
            for run in state.runs.values()
        )

    def _victims(
        self,
        rank: WorkerRank,
        state: RoutingState,
        interactive_load: WorkerLoad,
        runs: Mapping[BatchRunKey, BatchRun],
    ) -> list[BatchRunKey]:
        """Those of the runs that give way to the interactive load of a rank."""
        member = self._fleet.members.get(rank.worker)
        if member is None or member.epoch != rank.epoch:
            return []
        profile = state.profile_of(rank.worker, profile_from_card(member.card.config))
        return runs_to_preempt(
            profile,
            interactive_load,
            runs,
            self._bounds,
            state.mean_output_tokens,
            max_sequences(member.card),
        )


def _queue_name(model: str, is_preempted: bool) -> QueueName:  # noqa: FBT001
    return model, "preempted" if is_preempted else "new"


def batch_run(request_id: str, placement: Placement) -> BatchRun:
    prefill_tokens = max(placement.prefill_tokens, 1)
    return BatchRun(request_id, placement.tokens, prefill_tokens, placement.at_ms)
