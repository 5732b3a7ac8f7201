"""The scheduler of a router: the requests that wait here for a worker, and the place each gets.

Requests wait here instead of being sent to and fro. Their number is bounded, also by class:
`waiting.is_full` means that one more has to be refused, `waiting.must_defer` that one from Kafka
has to wait in the log. A freed place wakes one request of a phase that its worker serves, by
priority, class and age; a request that finds a place wakes the next, since there may be more. Every
second each request retries by itself, less often where many wait. While prompts that are computed
wait to be decoded, new ones wait behind them: so the bound holds for both.

A request that policy predictive queues for a place retries when that is predicted free; see
`app/routing/queueing/pending.py`, also for the requests that a record wakes. Requests that retry in
one turn of the event loop, such as those of one poll, are planned together before one of them goes.

Never here: the cost of waiting, and the end of a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from app.lanes.scheduling.deferred_prompts import QueueSize
from app.lanes.scheduling.model_availability import ModelAvailability
from app.lanes.scheduling.waiting_requests import (
    LaneRequest,
    RequestKey,
    WaitingRequests,
    wait_queue_name,
)
from app.lanes.scheduling.worker_capacity import WorkerCapacity
from app.routing.queueing.fair_share import FairQueue, QueueKey
from app.routing.queueing.herd_avoidance import HerdAvoidance
from app.routing.queueing.joint_planning import PlannedOrder, PlanningContext, plan_together
from app.routing.queueing.pending import MAX_WAKEUPS, QueueOrder, ReservedRequests
from app.routing.selection.decision import (
    NOTHING_PLANNED,
    Decision,
    Placement,
    PlannedReservations,
    Reservation,
    RoutingConfig,
    RoutingState,
    Wait,
)
from app.routing.selection.eligibility import CandidatePools, can_take, pinned_worker
from app.routing.selection.handover_rules import WHOLE, FirstPhase, HandOverRules, first_phase
from app.routing.selection.select import select_worker
from app.routing.state.active_load import NO_LOAD, ActiveLoad, WorkerLoad
from app.routing.state.batch_runs import BatchRuns
from app.routing.state.fleet import Fleet
from app.routing.state.kv_index import KvIndexView
from app.routing.state.ledger import LedgerState
from app.routing.state.performance import PerformanceModel
from app.routing.state.silent_workers import SilentWorkers
from app.routing.worker_rank import WorkerRank
from app.wait_queue import Priority, QueueName, WaitQueue
from indexer.events import Tier
from streams.clock import BrokerClock
from streams.records import Finished, LogRecord, ModelCard, Phase, PrefillDone, WorkerCard
from streams.request import Request

log = logging.getLogger(__name__)

MAX_FREQUENT_RETRIES = 1000
"""Waiting requests beyond which each retries less often than once a second: a try takes some 60 us.
A request that no wake-up reaches, such as one behind others that is pinned to a free worker, is
dispatched at most 4 s late with 4096 waiting. With 200 it would be 20 s, at the same capacity."""

KAFKA_QUEUE_SHARE = 0.5
"""The share of the queue that prompts from Kafka may fill; the rest is left to HTTP, where a
request beyond the bound is refused instead of waiting in the log."""


class _Looking(NamedTuple):
    """A request that is scheduled in this turn of the event loop, with the future of its turn.

    The result of the future is the wait that was planned for it together with the others, if any.
    """

    wanted: LaneRequest
    turn: asyncio.Future[Wait | None]


class Scheduler:
    """One per router.

    `unconfirmed`, `unconfirmed_batch`: this router's decisions that it has not read back.
    `silent`: the workers to which nothing is sent. `absence_ms`: for how long requests wait while
    their model has no worker. `herd_avoidance`: the delays of this router among others.
    `handover_rules`: when prompts are handed over. `count_awaited`: called with each change of the
    number of requests that wait, for which records of the ledger arrive sooner.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: LedgerState,
        index: KvIndexView,
        unconfirmed: ActiveLoad,
        tuning: RoutingConfig,
        broker_clock: BrokerClock,
        silent: SilentWorkers,
        bound: QueueSize,
        *,
        unconfirmed_batch: BatchRuns,
        herd_avoidance: HerdAvoidance,
        counts_output: bool,
        absence_ms: float,
        queue_order: QueueOrder,
        classes: FairQueue,
        handover_rules: HandOverRules,
        count_awaited: Callable[[int], None],
    ) -> None:
        self._classes = classes
        self.waiting = WaitingRequests(
            self._classes, broker_clock, bound,
            QueueSize(*(max(1, int(KAFKA_QUEUE_SHARE * each)) for each in bound)),
            MAX_FREQUENT_RETRIES,
        )  # fmt: skip
        self._fleet = fleet
        self._ledger = ledger
        self._index = index
        self._unconfirmed = unconfirmed
        self.worker_capacity = WorkerCapacity(fleet, ledger, unconfirmed, unconfirmed_batch)
        self._tuning = tuning
        no_queueing = tuning.predictive_weights._replace(max_hold_ms=0.0)
        self._without_queueing = tuning._replace(predictive_weights=no_queueing)
        self.handover_rules = handover_rules
        needed = handover_rules.domain if handover_rules.is_domain_required else ""
        self._pools = CandidatePools(fleet, silent, needed)
        self._broker_clock = broker_clock
        self._herd_avoidance = herd_avoidance
        self._counts_output = counts_output
        self._count_awaited = count_awaited
        self._dispatched = Counter[Phase]()
        self.model_availability = ModelAvailability(
            fleet, broker_clock, absence_ms, needs_prefill=handover_rules.is_enforced
        )
        self._performance = PerformanceModel()
        self._prompt_workers: Sequence[str] = ()
        """The workers that compute prompts, of all models."""
        self._pending = ReservedRequests[RequestKey](queue_order, self._classes)
        self._wait_queues: dict[RequestKey, WaitQueue] = {}
        """By request that is queued for a place."""
        self._looking: dict[RequestKey, _Looking] = {}
        self._wakeups_left = MAX_WAKEUPS
        """Requests that records may still wake in this turn of the event loop, besides the next one
        of each place."""
        self._planning = self._planning_new = 0
        """Calls of `schedule` under way, and those of them for requests that do not wait yet."""
        self._is_idle = asyncio.Event()
        """Set while there are none."""
        self._is_idle.set()

    # --- planning --------------------------------------------------------------------------------

    async def schedule(self, wanted: LaneRequest) -> Decision:
        """Decide about a request: a place, a wait, or a rejection.

        A place is free for as long as nothing is awaited after this.
        """
        loop = asyncio.get_running_loop()
        if not self._looking:
            loop.call_soon(self._start_pass)
        turn: asyncio.Future[Wait | None] = loop.create_future()
        self._looking[wanted.key] = _Looking(wanted, turn)
        is_new = wanted.key not in self.waiting.keys
        self._planning += 1
        self._planning_new += is_new
        self._is_idle.clear()
        try:
            joint_wait = await turn
        finally:
            self._planning -= 1
            self._planning_new -= is_new
            if not self._planning:
                self._is_idle.set()
            self._looking.pop(wanted.key, None)
        if joint_wait is not None:
            return joint_wait
        # Planned a second time, now for good: a request that was planned together with it and went
        # before may have taken the place that was planned for this one.
        planned = self._wait_behind_decodes(wanted) or self._plan(wanted)
        if isinstance(planned, Placement):
            self._take(wanted, planned.worker_rank)
        else:
            self._intend(wanted, planned.reservation if isinstance(planned, Wait) else None)
        return planned

    async def wait_planned(self) -> None:
        """Wait until the requests of this turn of the event loop were planned, such as those of the
        same poll."""
        await asyncio.sleep(0)
        await self._is_idle.wait()

    def _take(self, wanted: LaneRequest, place: WorkerRank) -> None:
        """A request goes to a place: charge its class once, and wake those whose turn comes."""
        first = self._pending.next_for(place) if self._wait_queues else None
        if wanted.phase != "decode":  # its class was charged with its prefill
            self._classes.charge(wanted.cost)
        self._intend(wanted, None)
        if self._wait_queues and (now_first := self._pending.next_for(place)) not in (first, None):
            self._wake([now_first])  # another class is first now
        self._wake_one(place.worker)

    def _wait_behind_decodes(self, wanted: LaneRequest) -> Wait | None:
        """The wait of a prompt that no worker could decode now, while computed ones wait for that.

        Computed now, it would wait with them, and its hand-over might expire. With no decode
        waiting, prompts are computed ahead, so that decode workers need not wait for them.
        """
        model = wanted.prompt.request.model
        if wanted.phase != "prefill" or not self.waiting.has_decodes(model):
            return None
        decode = self._plan(replace(wanted, phase="decode"))
        return decode if isinstance(decode, Wait) and not decode.needs_new_worker else None

    def _start_pass(self) -> None:
        """Plan all requests of this turn together; resolve their futures in dispatch order."""
        looking, self._looking = self._looking, {}
        self._wakeups_left = MAX_WAKEUPS
        try:
            ordered = self._plan_waiting([each.wanted for each in looking.values()])
            for key in (*ordered.order, *ordered.waiting):
                if not looking[key].turn.done():
                    looking[key].turn.set_result(ordered.waiting.get(key))
            self._wake(ordered.to_wake)
        finally:  # where that failed, each is planned alone: nothing else would wake them
            for each in looking.values():
                if not each.turn.done():
                    each.turn.set_result(None)

    def _plan_waiting(self, wanted: Sequence[LaneRequest]) -> PlannedOrder[RequestKey]:
        if self._tuning.queues_for_places:
            now_ms = self._broker_clock.now_ms()
            by = PlanningContext(
                self.routing_state(now_ms), self._tuning, self.worker_capacity.full_workers(now_ms)
            )
            try:
                return plan_together(wanted, self._pending, by, self._plan)
            except Exception:
                # One request cannot be planned; that error is raised again when it goes, alone.
                log.exception(
                    "joint planning failed for %d queued requests; planning them individually",
                    len(wanted),
                )
        return plan_together(wanted, self._pending, None, self._plan)

    def first_phase(self, wanted: LaneRequest, *, stays_whole: bool) -> FirstPhase:
        """The phase that a request begins with; see `handover_rules.first_phase`."""
        now_ms, model = self._broker_clock.now_ms(), wanted.prompt.request.model
        if not self._pools.pool(model, "prefill").rows and not self.handover_rules.is_enforced:
            return WHOLE
        others = self._pending.reservations_of_others(wanted.key)
        return first_phase(
            wanted.prompt, self.routing_state(now_ms, others), self._tuning, self.handover_rules,
            seed=wanted.seed, stays_whole=stays_whole,
            full_workers=self.worker_capacity.full_workers(now_ms),
        )  # fmt: skip

    def is_backed_up(self, wanted: LaneRequest) -> bool:
        """Whether the queue is full and every place for this request is reserved, of any phase that
        it may begin with. False with a priority, by which it may go before the others, and with
        policies that reserve no places.
        """
        hints = wanted.prompt.request.hints
        if not self._wait_queues or hints.strict_priority or hints.priority_jump:
            return False
        if not self.waiting.is_full(wanted.queue_key, planned=self._planning_new):
            return False
        model = wanted.prompt.request.model
        phases: tuple[Phase, ...] = ("aggregated", "prefill")
        pools = [self._pools.pool(model, phase) for phase in phases]
        places = [place for pool in pools for place in pool.table.worker_ranks]
        return bool(places) and self._pending.has_reservations(places)

    def dry_run(self, wanted: LaneRequest) -> Decision:
        """The decision for a request now, without a reservation or any other effect."""
        return self._plan(wanted, self._without_queueing)

    def _plan(self, wanted: LaneRequest, tuning: RoutingConfig | None = None) -> Decision:
        if wanted.phase == "decode":
            tuning = self._without_queueing  # the blocks of its prompt are held for it elsewhere
        tuning = tuning or self._tuning
        now_ms = self._broker_clock.now_ms()
        others = NOTHING_PLANNED
        if tuning.queues_for_places:
            others = self._pending.reservations_of_others(wanted.key)
        session = wanted.prompt.request.hints.session_control
        bound: WorkerRank | None = None
        if session is not None and session.action != "open":
            bound = self._ledger.sessions.preferred_rank(session.session_id, wanted.phase, now_ms)
        return select_worker(
            wanted.prompt,
            self.routing_state(now_ms, others),
            tuning,
            seed=wanted.seed,
            phase=wanted.phase,
            dispatched_count=self._dispatched[wanted.phase],
            excluded=wanted.excluded,
            full_workers=self.worker_capacity.full_workers(now_ms),
            queued_since_ms=wanted.since_ms,
            deadline_ms=wanted.deadline_ms,
            session_rank=bound,
        )

    def ranks_with_reservations(self) -> set[WorkerRank]:
        """The places that requests are queued for."""
        return self._pending.ranks_with_reservations()

    def routing_state(
        self, now_ms: int, others: PlannedReservations = NOTHING_PLANNED
    ) -> RoutingState:
        """The state for a decision, with the reservations of `others`."""
        performance = self._performance
        return RoutingState(
            self._fleet, self._pools, self._index, self._ledger.active_load, self._unconfirmed,
            now_ms, performance.mean_output_tokens, performance.slowdown, others,
            count_output_tokens=self._counts_output,
            expected_followups=performance.expected_followups,
            prefill_shares=performance.prefill_shares,
            transfer_token_ms=performance.transfer_token_ms,
            recent_prefill=performance.recent_prefill, batch_runs=self._ledger.batch_runs,
            stagger_ms=self._herd_avoidance.stagger_ms(
                self._prompt_workers, self._fleet.version, now_ms, performance.mean_prefill_ms
            ),
        )  # fmt: skip

    def on_dispatched(self, request: Request, phase: Phase) -> None:
        """Count a decision that is carried out, for policies that go in turn."""
        if pinned_worker(request.hints, phase) is None:
            self._dispatched[phase] += 1

    # --- figures ---------------------------------------------------------------------------------

    @property
    def worker_loads(self) -> Mapping[str, WorkerLoad]:
        """Load by worker according to the ledger, as far as it was read."""
        loads = dict.fromkeys(self._fleet.members, NO_LOAD) | self._ledger.active_load.by_worker()
        for rank in self._ledger.batch_runs.ranks():
            before = loads.get(rank.worker, NO_LOAD)
            loads[rank.worker] = before.add(self._ledger.batch_runs.load(rank))
        return loads

    @property
    def unconfirmed_assignments(self) -> int:
        """Decisions of this router that it has not read back."""
        return sum(load.runs for load in self._unconfirmed.by_worker().values())

    @property
    def slowdown_by_worker(self) -> Mapping[str, float]:
        """By worker, the measured factor on its curve."""
        return self._performance.slowdown

    # --- waiting ---------------------------------------------------------------------------------

    async def wait_for_change(self, wanted: LaneRequest, planned: Wait, until_ms: float) -> None:
        """Wait until a place for this request may be free, or its wait ends, at `until_ms`."""
        self._count_awaited(1)
        try:
            if planned.reservation is None:
                name = wait_queue_name(wanted.queue_key, wanted.phase)
                await self.waiting.wait_for_change(name, wanted.priority, until_ms)
            else:
                await self._wait_for_place(wanted.key, planned, until_ms)
        finally:
            self._count_awaited(-1)

    async def _wait_for_place(self, key: RequestKey, planned: Wait, until_ms: float) -> None:
        longest_s = self.waiting.max_wait_s(until_ms)
        ends_ms, left_s = self._pending.next_retry_ms(key, planned), longest_s
        if ends_ms is not None:
            left_s = (ends_ms - self._broker_clock.now_ms()) / 1000
        wait_queue = self._wait_queues[key] = WaitQueue()
        try:
            await wait_queue.wait(min(left_s, longest_s))
        finally:
            del self._wait_queues[key]

    def start_waiting(self, wanted: LaneRequest) -> None:
        """Add a request that found no place at once to the queue."""
        prompt, model = wanted.prompt, wanted.prompt.request.model
        block = self._pools.pool(model, wanted.phase).block_size
        depths = self._index.depths(prompt.local_hashes(block)).depths  # found when it was planned
        cached = int(depths[:, Tier.DEVICE].max(initial=0)) * block
        self.waiting.add(wanted, max(prompt.tokens - cached, 0))

    def leave(self, wanted: LaneRequest) -> None:
        """Remove a request that has a place, or that ended. After the last decode of a model, new
        prompts may be computed."""
        model = wanted.prompt.request.model
        self.waiting.remove(wanted)
        self._intend(wanted, None)
        if wanted.phase == "decode" and not self.waiting.has_decodes(model):
            self._wake_first(model, "prefill")

    def _intend(self, wanted: LaneRequest, planned: Reservation | None) -> None:
        if planned is None and not self._wait_queues:
            self._pending.remove(wanted.key)  # as below, without a request to wake
        else:
            self._wake(self._pending.reserve(wanted, planned))

    def _wake(self, keys: Iterable[RequestKey]) -> None:
        """Wake these requests in this order, as far as they wait."""
        for key in keys:
            if (wait_queue := self._wait_queues.get(key)) is not None:
                wait_queue.notify_all()

    def on_fleet_changed(self) -> None:
        """Other workers may be eligible now: wake all requests."""
        self._prompt_workers = [
            name
            for name, member in self._fleet.members.items()
            if can_take(member.card, "aggregated") or can_take(member.card, "prefill")
        ]
        self.worker_capacity.on_fleet_changed()
        self.model_availability.on_fleet_changed()
        self._wake_all()

    def _wake_for(self, worker: str) -> None:
        """Wake the requests that a change of this worker concerns."""
        self._wake_one(worker)
        if self._wait_queues:
            keys = self._pending.to_wake(worker, self._wakeups_left)
            self._wakeups_left = max(self._wakeups_left - len(keys), 0)
            self._wake(keys)

    def _wake_all(self) -> None:
        self.waiting.changed.notify_all()
        self._wake(self._pending.in_dispatch_order())

    def _wake_one(self, worker: str) -> None:
        """Wake the first request of each phase that this worker serves."""
        member = self._fleet.members.get(worker) if self.waiting.changed.has_waiting else None
        if member is not None:
            phases: tuple[Phase, ...] = ("aggregated", "prefill")
            for phase in phases:
                if can_take(member.card, phase):
                    self._wake_first(member.card.model, phase)

    def _wake_first(self, model: str, phase: Phase) -> None:
        queues = self._classes.waiting_queues(model, "")
        names = [wait_queue_name(queue, phase) for queue in queues]
        self.waiting.changed.notify_one(names, self._by_class)

    def _by_class(self, name: QueueName, rank: Priority) -> Priority:
        model, class_name, _ = name
        virtual_time = self._classes.virtual_time(QueueKey(model, class_name))
        return rank[0], virtual_time, *rank[1:]

    # --- records of the log -----------------------------------------------------------------------

    def on_record(self, fact: LogRecord, *, is_replay: bool) -> None:
        """A record of the ledger was applied; old records only train the performance model."""
        self._performance.on_record(fact)
        self._herd_avoidance.on_record(fact)
        if is_replay:
            return
        self.worker_capacity.on_record(fact)
        record = fact.record
        if type(record) is Finished:
            if record.code == "worker_full" and record.retryable:
                return  # it freed no place
            self._wake_for(record.worker)
        elif type(record) is PrefillDone:
            self._wake_for(record.worker)  # it may have been too busy until now

    def on_fleet_record(self, fact: LogRecord) -> None:
        """A record of the registry or of kv-events was applied."""
        match fact.record:
            case WorkerCard(model=model) | ModelCard(name=model):
                self.model_availability.on_card(model)
