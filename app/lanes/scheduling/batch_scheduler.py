"""The scheduler of a router for batch requests: those that wait here, their places, and preemption.

Interactive requests go first (`scheduler.py`): a batch request looks for a place when no
interactive one does, and takes only the time that they leave
(`app/routing/selection/batch_placement.py`). Its queue has bounds of its own: requests beyond them
wait in the log (`deferred_prompts.py`), none is refused for load. Preempted requests are first,
then the order of arrival.

A run gives way when the interactive runs of its rank need its place. Which ones is a function of
the ledger alone, so that all routers agree, and the owner of each lane moves its own requests
(`app/lanes/owner.py`), without a message between them.

Never here: the restart of a preempted request (`app/lanes/failover.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

from app.lanes.scheduling.deferred_prompts import QueueSize
from app.lanes.scheduling.scheduler import Scheduler
from app.lanes.scheduling.waiting_requests import LaneRequest, WaitingRequests
from app.routing.queueing.fair_share import FairQueue
from app.routing.selection.batch_placement import (
    RESUME_ELSEWHERE_MS,
    BatchBounds,
    max_sequences,
    place_batch_request,
    runs_to_preempt,
)
from app.routing.selection.decision import Decision, Placement, RoutingState, Wait
from app.routing.state.active_load import WorkerLoad
from app.routing.state.batch_runs import BatchRun, BatchRunKey, BatchRuns
from app.routing.state.fleet import Fleet
from app.routing.state.ledger import LedgerState
from app.routing.state.performance import profile_from_card
from app.routing.state.request_state import OPEN, RequestState
from app.routing.worker_rank import WorkerRank
from app.wait_queue import QueueName
from streams.clock import BrokerClock
from streams.records import Ended, Fencing, Finished, LogRecord, PrefillDone

WAKE_INTERVAL_S = 0.05
"""From a record that may have freed a place to the next look: a busy ledger has thousands a second,
and a look takes 0.2 ms."""
MAX_FREQUENT_RETRIES = 32
"""Waiting requests beyond which each retries less often."""


class _SearchInputs(NamedTuple):
    """All that the runs of a rank that give way depend on."""

    fleet_version: int
    run_changes: int
    interactive: WorkerLoad
    slowdown: float
    mean_output_tokens: float


class BatchScheduler:
    """One per router. `unconfirmed`: runs of this router's decisions that it has not read back.

    `bound`: of the queue. `interactive`: the scheduler of the other requests.
    """

    def __init__(
        self,
        interactive: Scheduler,
        fleet: Fleet,
        ledger: LedgerState,
        unconfirmed: BatchRuns,
        bounds: BatchBounds,
        bound: QueueSize,
        broker_clock: BrokerClock,
    ) -> None:
        self.waiting = WaitingRequests(
            FairQueue(), broker_clock, bound, bound, MAX_FREQUENT_RETRIES
        )
        self._interactive = interactive
        self._fleet = fleet
        self._ledger = ledger
        self._unconfirmed = unconfirmed
        self._bounds = bounds
        self._broker_clock = broker_clock
        self._wake_up: asyncio.TimerHandle | None = None
        self._giving_way: dict[WorkerRank, tuple[_SearchInputs, dict[str, None]]] = {}
        """By rank, the requests whose runs give way, and the inputs of that search."""

    # --- waiting ---------------------------------------------------------------------------------

    def start_waiting(self, wanted: LaneRequest) -> None:
        """Add a request that found no place at once to the queue."""
        self.waiting.add(wanted, wanted.prompt.tokens)

    def leave(self, wanted: LaneRequest) -> None:
        """Remove a request that has a place, or that ended."""
        self.waiting.remove(wanted)

    async def wait_for_change(self, wanted: LaneRequest, _: Wait, until_ms: float) -> None:
        """Wait until a place for this request may be free, or its wait ends."""
        name = _queue_name(wanted.prompt.request.model, wanted.prompt.has_output)
        await self.waiting.wait_for_change(name, (float(wanted.arrival),), until_ms)

    def on_record(self, fact: LogRecord, *, is_replay: bool) -> None:
        """A record of the ledger was applied: a place may be free."""
        if is_replay or not self.waiting.keys or self._wake_up is not None:
            return
        if isinstance(fact.record, PrefillDone | Finished | Fencing | Ended):
            loop = asyncio.get_running_loop()
            self._wake_up = loop.call_later(WAKE_INTERVAL_S, self._wake_all_models)

    def on_fleet_changed(self) -> None:
        """Wake all requests, since other workers may be eligible now."""
        self._giving_way.clear()
        self.waiting.changed.notify_all()

    def _wake_all_models(self) -> None:
        self._wake_up = None
        for model in {member.card.model for member in self._fleet.members.values()} | {""}:
            self._wake_next(model)

    def _wake_next(self, model: str) -> None:
        """Wake the first preempted request, and the first new one: the former may wait for its
        cache, which holds back no other.
        """
        for is_preempted in (True, False):
            self.waiting.changed.notify_one([_queue_name(model, is_preempted)])

    # --- placement -------------------------------------------------------------------------------

    async def schedule(self, wanted: LaneRequest) -> Decision:
        """Decide about a request: a place, a wait, or a rejection.

        A place is free for as long as nothing is awaited after this.
        """
        await self._interactive.wait_planned()
        now_ms = self._broker_clock.now_ms()
        view = self._interactive.routing_state(now_ms)
        planned = self._plan(wanted, view)
        if isinstance(planned, Placement):
            self._wake_next(wanted.prompt.request.model)  # there may be more room
        return planned

    def _plan(self, wanted: LaneRequest, view: RoutingState) -> Decision:
        """The place with the least prefill of those where the request may stay.

        The bounds on placement use the length of its own answer, those on preemption the mean; no
        request goes where it, or another for it, would have to give way at once. Decisions that are
        not read back count.
        """
        waited_ms = view.now_ms - wanted.since_ms
        awaited = self._interactive.ranks_with_reservations()
        place = partial(
            place_batch_request,
            wanted.prompt, view, self, self._bounds,
            seed=wanted.seed,
            waits_for_cache=wanted.prompt.has_output and waited_ms < RESUME_ELSEWHERE_MS,
            excluded=wanted.excluded,
            full_workers=self._interactive.worker_capacity.full_for_batch(view.now_ms),
        )  # fmt: skip
        while isinstance(planned := place(awaited=awaited), Placement):
            rank = planned.worker_rank
            key, run = BatchRunKey(wanted.key.id, -1), batch_run(wanted.key.id, planned)
            known = {**self._ledger.batch_runs.on_rank(rank), **self._unconfirmed.on_rank(rank)}
            interactive = view.committed.load(rank).add(view.unconfirmed.load(rank))
            if not self._victims(rank, view, interactive, {**known, key: run}):
                break
            awaited.add(rank)
        return planned

    def load(self, rank: WorkerRank) -> WorkerLoad:
        """The load of all batch runs of a rank."""
        return self._ledger.batch_runs.load(rank).add(self._unconfirmed.load(rank))

    # --- preemption ------------------------------------------------------------------------------

    def giving_way_on(self, rank: WorkerRank) -> Collection[str]:
        """The ids of the requests whose runs on a rank give way, by the ledger.

        They are searched again only after a change, since each of them is asked for by itself.
        """
        runs = self._ledger.batch_runs
        if not runs.on_rank(rank):
            return ()
        view = self._interactive.routing_state(self._broker_clock.now_ms())
        inputs = _SearchInputs(
            self._fleet.version, runs.changes.count, view.committed.load(rank),
            view.slowdown.get(rank.worker, 1.0), view.mean_output_tokens,
        )  # fmt: skip
        found = self._giving_way.get(rank)
        if found is None or found[0] != inputs:
            victims = self._victims(rank, view, inputs.interactive, runs.on_rank(rank))
            found = self._giving_way[rank] = (inputs, dict.fromkeys(key.id for key in victims))
        return found[1]

    def due(self) -> list[str]:
        """The ids of all requests whose runs give way, by the ledger."""
        return [
            found for rank in self._ledger.batch_runs.ranks() for found in self.giving_way_on(rank)
        ]

    def gives_way(self, request_id: str, state: RequestState) -> bool:
        """Whether the open run of a request gives way."""
        return any(
            run.state in OPEN
            and run.service_class == "batch"
            and request_id in self.giving_way_on(run.place)
            for run in state.runs.values()
        )

    def _victims(
        self,
        rank: WorkerRank,
        view: RoutingState,
        interactive: WorkerLoad,
        runs: Mapping[BatchRunKey, BatchRun],
    ) -> list[BatchRunKey]:
        """Those of the runs that give way to the interactive load of a rank."""
        member = self._fleet.members.get(rank.worker)
        if member is None or member.epoch != rank.epoch:
            return []
        profile = profile_from_card(member.card.config)._replace(
            slowdown=view.slowdown.get(rank.worker, 1.0)
        )
        return runs_to_preempt(
            profile,
            interactive,
            runs,
            self._bounds,
            view.mean_output_tokens,
            max_sequences(member.card),
        )


def _queue_name(model: str, is_preempted: bool) -> QueueName:  # noqa: FBT001
    return model, "preempted" if is_preempted else "new"


def batch_run(request_id: str, planned: Placement) -> BatchRun:
    """The run of a placed request."""
    prefill_tokens = max(planned.prefill_tokens, 1)
    return BatchRun(request_id, planned.tokens, prefill_tokens, planned.at_ms)
