"""The scheduler of a router for batch requests: those that wait here, their places, and preemption.

Interactive requests go first (`scheduler.py`): a batch request looks for a place when no
interactive one does, and takes only what they leave (`app/routing/selection/batch_placement.py`).
Its queue has bounds of its own: what exceeds them waits in the log (`deferred_prompts.py`), none is
refused for load. Preempted requests are first, then the order of arrival.

A run gives way when the interactive runs of its rank need its place. Which ones is a function of
the ledger alone, so that all routers agree, and the owner of each lane moves its own requests
(`owner.py`), without a message between them.

Never here: the restart of a preempted request (`failover.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from functools import partial

from app.lanes.deferred_prompts import DeferredPrompts, QueueSize
from app.lanes.scheduler import LaneRequest, RequestKey, Scheduler
from app.routing.selection.batch_placement import (
    BatchBounds,
    max_sequences,
    place_batch_request,
    runs_to_preempt,
)
from app.routing.selection.decision import Decision, Placement, RoutingState, Wait
from app.routing.selection.prompt_hashes import PromptHashes
from app.routing.state.active_load import WorkerLoad
from app.routing.state.batch_runs import BatchRun, BatchRunKey, BatchRuns
from app.routing.state.fleet import Fleet
from app.routing.state.ledger import OPEN, LedgerState, RequestState
from app.routing.state.performance import profile_from_card
from app.routing.worker_rank import WorkerRank
from app.wait_queue import QueueName, WaitQueue
from streams.clock import BrokerClock
from streams.records import Ended, Fencing, Finished, LogRecord, PrefillDone

WAKE_INTERVAL_S = 0.05
"""From a record that may have freed a place to the next look: a busy ledger has thousands a second,
and a look takes 0.2 ms."""
RETRY_INTERVAL_S = 1.0
MAX_FREQUENT_RETRIES = 32
"""Waiting requests beyond which each retries less often than once in RETRY_INTERVAL_S."""
RESUME_ELSEWHERE_MS = 60_000
"""Time for which a preempted request waits for the worker that has most of it in its cache."""


class BatchScheduler:
    """One per router. `own`: runs of this router's decisions that it has not read back.

    `bound`: of the queue. `interactive`: the scheduler of the other requests.
    """

    def __init__(
        self,
        interactive: Scheduler,
        fleet: Fleet,
        ledger: LedgerState,
        own: BatchRuns,
        bounds: BatchBounds,
        bound: QueueSize,
        broker_clock: BrokerClock,
    ) -> None:
        self.waiting_keys: set[RequestKey] = set()
        """The requests that wait: for a place, or backing off after a refusal."""
        self._interactive = interactive
        self._fleet = fleet
        self._ledger = ledger
        self._own = own
        self._bounds = bounds
        self._bound = bound
        self._broker_clock = broker_clock
        self._arrived = 0
        self._changed = WaitQueue()
        self._sizes: dict[RequestKey, QueueSize] = {}
        self._size = QueueSize()
        self._lane_bytes = Counter[int]()
        self._wake_up: asyncio.TimerHandle | None = None
        self.deferred = DeferredPrompts[RequestKey](lambda _: self._has_room())
        """Requests beyond the bound."""

    # --- the queue -------------------------------------------------------------------------------

    @property
    def queued_requests(self) -> int:
        """Number of waiting requests, with those that wait in the log."""
        return len(self.waiting_keys) + self.deferred.size.requests

    def queued_bytes_of_lane(self, lane: int) -> int:
        """Bytes of the prompts that wait in one lane."""
        return self._lane_bytes[lane]

    def must_defer(self, wanted: LaneRequest) -> bool:
        """Whether a request that finds no place has to wait in the log."""
        is_its_turn = self.deferred.release(wanted.key) or not self.deferred.has_waiting(
            wanted.queue_key
        )
        return not (is_its_turn and self._has_room())

    def _has_room(self) -> bool:
        waiting = QueueSize(len(self.waiting_keys), self._size.tokens, self._size.bytes)
        return waiting.plus(self.deferred.granted).has_room_below(self._bound)

    def new_pending_request(
        self,
        key: RequestKey,
        prompt: PromptHashes,
        seed: int,
        deadline_ms: int,
        excluded: Collection[str],
    ) -> LaneRequest:
        """A request begins to look for a place, until `leave`."""
        self._arrived += 1
        now_ms = self._broker_clock.now_ms()
        return LaneRequest(key, self._arrived, prompt, seed, now_ms, deadline_ms, excluded)

    def start_waiting(self, wanted: LaneRequest) -> None:
        """Add a request that found no place at once to the queue."""
        self.waiting_keys.add(wanted.key)
        self._end_waiting(wanted)
        prompt = wanted.prompt
        size = self._sizes[wanted.key] = QueueSize(1, prompt.tokens, prompt.request.prompt_bytes)
        self._size = self._size.plus(size)
        self._lane_bytes[wanted.key.lane] += size.bytes

    def leave(self, wanted: LaneRequest) -> None:
        """Remove a request that has a place, or that ended."""
        self.waiting_keys.discard(wanted.key)
        self._end_waiting(wanted)
        self.deferred.release(wanted.key)
        self.deferred.grant_next()

    def _end_waiting(self, wanted: LaneRequest) -> None:
        size = self._sizes.pop(wanted.key, None)
        if size is not None:
            self._size = self._size.plus(size, -1)
            self._lane_bytes[wanted.key.lane] -= size.bytes

    async def wait_for_change(self, wanted: LaneRequest, _: Wait) -> None:
        """Wait until a place for this request may be free."""
        look_s = RETRY_INTERVAL_S * max(1, len(self.waiting_keys) / MAX_FREQUENT_RETRIES)
        name = _queue_name(wanted.prompt.request.model, wanted.prompt.has_output)
        await self._changed.wait(look_s, name, (float(wanted.arrival),))

    def on_record(self, fact: LogRecord, *, is_replay: bool) -> None:
        """A record of the ledger was applied: a place may be free."""
        if is_replay or not self.waiting_keys or self._wake_up is not None:
            return
        if isinstance(fact.record, PrefillDone | Finished | Fencing | Ended):
            loop = asyncio.get_running_loop()
            self._wake_up = loop.call_later(WAKE_INTERVAL_S, self._wake_all_models)

    def on_fleet_changed(self) -> None:
        """Wake all requests, since other workers may be eligible now."""
        self._changed.notify_all()

    def _wake_all_models(self) -> None:
        self._wake_up = None
        for model in {member.card.model for member in self._fleet.members.values()} | {""}:
            self._wake_next(model)

    def _wake_next(self, model: str) -> None:
        """Wake the first preempted request, and the first new one: the former may wait for its
        cache, which holds back no other.
        """
        for is_preempted in (True, False):
            self._changed.notify_one([_queue_name(model, is_preempted)])

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

        The bounds on placement know the length of its own answer, those on preemption the mean; one
        that would have to give way at once does not come.
        """
        waited_ms = view.now_ms - wanted.since_ms
        reserved = self._interactive.reserved_ranks()
        place = partial(
            place_batch_request,
            wanted.prompt, view, self, self._bounds,
            seed=wanted.seed,
            waits_for_cache=wanted.prompt.has_output and waited_ms < RESUME_ELSEWHERE_MS,
            excluded=wanted.excluded,
            full_workers=self._interactive.worker_capacity.full_for_batch(view.now_ms),
        )  # fmt: skip
        while isinstance(planned := place(reserved=reserved), Placement):
            rank = planned.worker_rank
            key, run = BatchRunKey(wanted.key.id, -1), batch_run(wanted.key.id, planned)
            if key not in self._victims(rank, view, {key: run}):
                break
            reserved.add(rank)
        return planned

    def load(self, rank: WorkerRank) -> WorkerLoad:
        """The load of all batch runs of a rank."""
        return self._ledger.batch_runs.load(rank).add(self._own.load(rank))

    # --- preemption ------------------------------------------------------------------------------

    def on_rank(self, rank: WorkerRank) -> list[str]:
        """The ids of the requests whose runs on a rank give way, by the ledger."""
        if not self._ledger.batch_runs.on_rank(rank):
            return []
        view = self._interactive.routing_state(self._broker_clock.now_ms())
        return [key.id for key in self._victims(rank, view, {})]

    def due(self) -> list[str]:
        """The ids of all requests whose runs give way, by the ledger."""
        return [found for rank in self._ledger.batch_runs.ranks() for found in self.on_rank(rank)]

    def gives_way(self, request_id: str, state: RequestState) -> bool:
        """Whether the open run of a request gives way."""
        return any(
            run.state in OPEN
            and run.service_class == "batch"
            and request_id in self.on_rank(run_id.worker_rank(run.rank))
            for run_id, run in state.runs.items()
        )

    def _victims(
        self, rank: WorkerRank, view: RoutingState, more: dict[BatchRunKey, BatchRun]
    ) -> list[BatchRunKey]:
        """The runs that give way. `more`: runs beside those of the ledger."""
        member = self._fleet.members.get(rank.worker)
        if member is None or member.epoch != rank.epoch:
            return []
        profile = profile_from_card(member.card.config)._replace(
            slowdown=view.slowdown.get(rank.worker, 1.0)
        )
        return runs_to_preempt(
            profile,
            view.committed.load(rank),
            {**self._ledger.batch_runs.on_rank(rank), **more},
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
