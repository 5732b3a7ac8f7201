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

from kvlane.app.lanes.scheduling.scheduler import Scheduler
from kvlane.app.lanes.scheduling.waiting_tasks import WaitingTasks
from kvlane.app.routing.queueing.deferred_prompts import QueueSize
from kvlane.app.routing.queueing.fair_share import FairQueue
from kvlane.app.routing.queueing.pending import LaneRequest
from kvlane.app.routing.queueing.router_queue import batch_run
from kvlane.app.routing.queueing.waiting_requests import WaitingRequests
from kvlane.app.routing.queueing.wake_ups import QueueName
from kvlane.app.routing.selection.batch_placement import (
    RESUME_ELSEWHERE_MS,
    BatchBounds,
    max_sequences,
    place_batch_request,
    runs_to_preempt,
)
from kvlane.app.routing.selection.decision import Decision, Placement, RoutingState, Wait
from kvlane.app.routing.state.active_load import WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchRun, BatchRunKey
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.performance import profile_from_card
from kvlane.app.routing.state.request_state import OPEN, RequestState
from kvlane.app.routing.worker_rank import WorkerRank
from kvlane.streams.clock import BrokerClock
from kvlane.streams.records import Ended, Fencing, Finished, LogRecord, PrefillDone

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
    """One per router. `bound`: of the queue. `interactive`: the scheduler of the other requests."""

    def __init__(
        self,
        interactive: Scheduler,
        fleet: Fleet,
        ledger: LedgerState,
        bounds: BatchBounds,
        bound: QueueSize,
        broker_clock: BrokerClock,
    ) -> None:
        self.waiting = WaitingRequests(FairQueue(), bound, bound, MAX_FREQUENT_RETRIES)
        self._tasks = WaitingTasks(self.waiting.wake_ups, broker_clock)
        self._interactive = interactive
        self._queue = interactive.queue
        self._fleet = fleet
        self._ledger = ledger
        self._unconfirmed = self._queue.unconfirmed_batch
        self._bounds = bounds
        self._broker_clock = broker_clock
        self._wake_up: asyncio.TimerHandle | None = None
        self._giving_way: dict[WorkerRank, tuple[_SearchInputs, dict[str, None]]] = {}
        """By rank, the requests whose runs give way, and the inputs of that search."""

    # --- waiting ---------------------------------------------------------------------------------

    def leave(self, request: LaneRequest) -> None:
        """Remove a request that has a place, or that ended."""
        self.waiting.remove(request)

    async def wait_for_change(self, request: LaneRequest, _: Wait, until_ms: float) -> None:
        """Wait until a place for this request may be free, or its wait ends."""
        if request.key not in self.waiting.keys:
            self.waiting.add(request, request.prompt.tokens)
        name = _queue_name(request.prompt.request.model, request.prompt.has_output)
        retry_ms = self.waiting.retry_ms(self._broker_clock.now_ms(), until_ms)
        self.waiting.wake_ups.add(request.key, retry_ms, name, (float(request.arrival),))
        await self._tasks.wait(request.key)

    def on_record(self, record: LogRecord, *, is_replay: bool) -> None:
        """A record of the ledger was applied: a place may be free."""
        if is_replay or not self.waiting.keys or self._wake_up is not None:
            return
        if isinstance(record.record, PrefillDone | Finished | Fencing | Ended):
            loop = asyncio.get_running_loop()
            self._wake_up = loop.call_later(WAKE_INTERVAL_S, self._wake_all_models)

    def on_fleet_changed(self) -> None:
        """Wake all requests, since other workers may be eligible now."""
        self._giving_way.clear()
        self.waiting.wake_ups.wake_lines()
        self._tasks.resume()

    def _wake_all_models(self) -> None:
        self._wake_up = None
        for model in {member.card.model for member in self._fleet.members.values()} | {""}:
            self._wake_next(model)

    def _wake_next(self, model: str) -> None:
        """Wake the first preempted request, and the first new one: the former may wait for its
        cache, which holds back no other.
        """
        for is_preempted in (True, False):
            self.waiting.wake_ups.wake_first([_queue_name(model, is_preempted)])
        self._tasks.resume()

    # --- placement -------------------------------------------------------------------------------

    async def schedule(self, request: LaneRequest) -> Decision:
        """Decide about a request: a place, a wait, or a rejection.

        A place is free for as long as nothing is awaited after this.
        """
        await self._interactive.wait_planned()
        now_ms = self._broker_clock.now_ms()
        state = self._queue.routing_state(now_ms)
        planned = self._plan(request, state)
        if isinstance(planned, Placement):
            self._wake_next(request.prompt.request.model)  # there may be more room
        return planned

    def _plan(self, request: LaneRequest, state: RoutingState) -> Decision:
        """The place with the least prefill of those where the request may stay.

        The bounds on placement use the length of its own answer, those on preemption the mean; no
        request goes where it, or another for it, would have to give way at once. Decisions that are
        not read back count.
        """
        waited_ms = state.now_ms - request.since_ms
        awaited = self._queue.ranks_with_reservations()
        place = partial(
            place_batch_request,
            request.prompt, state, self, self._bounds,
            seed=request.seed,
            waits_for_cache=request.prompt.has_output and waited_ms < RESUME_ELSEWHERE_MS,
            excluded=request.excluded,
            full_workers=self._queue.worker_capacity.full_for_batch(state.now_ms),
        )  # fmt: skip
        while isinstance(planned := place(awaited=awaited), Placement):
            rank = planned.worker_rank
            key, run = BatchRunKey(request.key.id, -1), batch_run(request.key.id, planned)
            known = {**self._ledger.batch_runs.on_rank(rank), **self._unconfirmed.on_rank(rank)}
            interactive = state.committed.load(rank).add(state.unconfirmed.load(rank))
            if not self._victims(rank, state, interactive, {**known, key: run}):
                break
            awaited.add(rank)
        return planned

    def load(self, rank: WorkerRank) -> WorkerLoad:
        """The load of all batch runs of a rank."""
        return self._ledger.batch_runs.load(rank).add(self._unconfirmed.load(rank))

    # --- preemption ------------------------------------------------------------------------------

    def giving_way_on(self, rank: WorkerRank) -> Collection[str]:
        """The ids of the requests whose runs on a rank give way, by the ledger.

        Cached: callers ask once for each request, so the search is repeated only after a change.
        """
        runs = self._ledger.batch_runs
        if not runs.on_rank(rank):
            return ()
        state = self._queue.routing_state(self._broker_clock.now_ms())
        inputs = _SearchInputs(
            self._fleet.version, runs.changes.count, state.committed.load(rank),
            state.slowdown.get(rank.worker, 1.0), state.mean_output_tokens,
        )  # fmt: skip
        found = self._giving_way.get(rank)
        if found is None or found[0] != inputs:
            victims = self._victims(rank, state, inputs.interactive, runs.on_rank(rank))
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
        state: RoutingState,
        interactive: WorkerLoad,
        runs: Mapping[BatchRunKey, BatchRun],
    ) -> list[BatchRunKey]:
        """Those of the runs that give way to the interactive load of a rank."""
        member = self._fleet.members.get(rank.worker)
        if member is None or member.epoch != rank.epoch:
            return []
        profile = profile_from_card(member.card.config)._replace(
            slowdown=state.slowdown.get(rank.worker, 1.0)
        )
        return runs_to_preempt(
            profile,
            interactive,
            runs,
            self._bounds,
            state.mean_output_tokens,
            max_sequences(member.card),
        )


def _queue_name(model: str, is_preempted: bool) -> QueueName:  # noqa: FBT001
    return model, "preempted" if is_preempted else "new"
