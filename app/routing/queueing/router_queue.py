"""The queue of a router: its requests, when each is planned, and the place it gets.

    look ──► plan_pass ──► decide ──► Placement: the caller counts it, and lets the request leave
     ▲                       │
     └── a wake-up ◄── wait ◄┴─ Wait: until a record, a freed place or the retry time

Plain and synchronous: times are arguments, and the caller acts on the results. A router
(`app/lanes/scheduler.py`) and the simulation (`app/simulation/simulated_router.py`) use the same
object. Batch requests have rules of their own (`batch_class.py`), and go last in a pass.

Requests wait in the router, since one that is queued at a worker can no longer be moved. Their
number is bounded, also by class: one more is refused if `waiting.is_full`, and one from Kafka waits
in the log if `waiting.must_defer`.

When a worker frees a place, the first waiting request of each phase that it serves is woken, by
priority, class and age; if it finds a place, the next one is woken. Every second each request
retries by itself, less often where many wait. While computed prompts wait to be decoded, new ones
wait behind them, so the bound holds for both. A request that policy predictive queues for a place
retries when that is predicted free (`pending.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvlane.app.routing.policy_names import QueueOrder
from kvlane.app.routing.queueing.batch_class import BatchClass
from kvlane.app.routing.queueing.deferred_prompts import QueueSize
from kvlane.app.routing.queueing.evacuation import Evacuation
from kvlane.app.routing.queueing.fair_share import UNBOUNDED, ClassConfig, FairQueue, QueueKey
from kvlane.app.routing.queueing.joint_planning import PlannedOrder, PlanningContext, plan_together
from kvlane.app.routing.queueing.objective import DecodeWeight
from kvlane.app.routing.queueing.pending import (
    MAX_WAKEUPS,
    LaneRequest,
    RequestKey,
    ReservedRequests,
)
from kvlane.app.routing.queueing.routing_inputs import FIRST_PHASES, RoutingInputs
from kvlane.app.routing.queueing.waiting_requests import WaitingRequests
from kvlane.app.routing.queueing.wake_ups import MIN_WAIT_MS, Priority, QueueName, WakeUps
from kvlane.app.routing.selection.batch_placement import BatchBounds
from kvlane.app.routing.selection.decision import (
    NOTHING_PLANNED,
    Decision,
    Placement,
    Reservation,
    Wait,
)
from kvlane.app.routing.selection.eligibility import NO_DECODE_WORKER, CandidatePools, can_take
from kvlane.app.routing.selection.handover_rules import (
    DEFAULT_RULES,
    WHOLE,
    FirstPhase,
    HandOverRules,
    can_be_split,
    first_phase,
)
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.selection.select import not_eligible, select_worker
from kvlane.app.routing.state.fleet import Fleet, WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import Finished, LogRecord, Phase, PrefillDone

log = logging.getLogger(__name__)

MAX_FREQUENT_RETRIES = 1000
"""Waiting requests beyond which each retries less often than once a second. A request that no
wake-up reaches, such as one behind others that is pinned to a free worker, waits for its retry."""
DEFERRABLE_SHARE = 0.5
"""The share of the queue that prompts from Kafka may fill; the rest is left to HTTP, where a
request beyond the bound is refused instead of waiting in the log."""


class QueueConfig(NamedTuple):
    """The settings of a queue. `classes`: of requests that share the workers. `counts_output`:
    whether output tokens of running requests count as load."""

    routing: RoutingConfig
    bound: QueueSize = QueueSize(UNBOUNDED, UNBOUNDED, UNBOUNDED)
    order: QueueOrder = "sjf"
    classes: Mapping[str, ClassConfig] | None = None
    handover_rules: HandOverRules = DEFAULT_RULES
    counts_output: bool = True
    batch_bounds: BatchBounds = BatchBounds()
    batch_bound: QueueSize = QueueSize(UNBOUNDED, UNBOUNDED, UNBOUNDED)

    @property
    def deferrable_bound(self) -> QueueSize:
        return QueueSize(*(max(1, int(DEFERRABLE_SHARE * each)) for each in self.bound))


class RouterQueue:
    """One per router. `router`: its name in the ledger. `silent`: the workers to which nothing is
    sent. The views are fed by their owner.
    """

    def __init__(
        self, router: str, fleet: Fleet, silent: SilentWorkers, ledger: LedgerState,
        index: KvIndexView, config: QueueConfig,
    ) -> None:  # fmt: skip
        rules = config.handover_rules
        self._decode_weight = DecodeWeight(config.routing.objective)
        self._use_weight(config.routing)
        self.handover_rules = rules
        self._classes = FairQueue(config.classes)
        self._wake_ups = WakeUps[RequestKey]()
        self.waiting = WaitingRequests(
            self._classes, config.bound, config.deferrable_bound, MAX_FREQUENT_RETRIES,
            self._wake_ups,
        )  # fmt: skip
        self._fleet = fleet
        self._ledger = ledger
        pools = CandidatePools(fleet, silent, rules.domain if rules.is_domain_required else "")
        self.inputs = inputs = RoutingInputs(
            router, fleet, pools, ledger, index, counts_output=config.counts_output
        )
        self.worker_capacity = inputs.worker_capacity
        self.evacuation = Evacuation(
            fleet, ledger, pools, inputs.worker_capacity, inputs.unconfirmed, inputs.herd_avoidance
        )
        self._reserved = ReservedRequests[RequestKey](config.order, self._classes)
        self._looking: dict[RequestKey, LaneRequest] = {}
        """Requests of the next pass."""
        self._new: set[RequestKey] = set()
        """Requests between `look` and `decide` that do not wait yet."""
        self.batch = BatchClass(
            config.batch_bounds, config.batch_bound, fleet, ledger,
            inputs.unconfirmed_batch, self._wake_ups, inputs.state,
        )  # fmt: skip
        self._joint_waits: dict[RequestKey, Wait] = {}
        """By request of a pass, the wait that was planned for it together with the others."""
        self._wakeups_left = MAX_WAKEUPS
        """Requests that records may still wake before the next pass, besides the next one of each
        place."""

    def set_config(self, config: QueueConfig) -> None:
        """Use other settings from now on, but for those of batch work and the domain of transfers.
        All waiting requests look again, and go in the new order."""
        self._decode_weight.set_objective(config.routing.objective)
        self._use_weight(config.routing)
        self.handover_rules = config.handover_rules
        self.inputs.counts_output = config.counts_output
        self._classes.set_shares(config.classes)
        self.waiting.set_bounds(config.bound, config.deferrable_bound)
        self._reserved = ReservedRequests(config.order, self._classes)
        self._joint_waits.clear()
        self._wake_ups.wake_all()

    # --- planning --------------------------------------------------------------------------------

    def look(self, request: LaneRequest) -> None:
        """Let a request take part in the next pass: a new one, or one that was woken."""
        self._looking[request.key] = request
        if not request.is_batch and request.key not in self.waiting.keys:
            self._new.add(request.key)

    def plan_pass(self, now_ms: int) -> Sequence[RequestKey]:
        """Plan all requests that look, together; returns the order in which to `decide` them."""
        looking = [request for request in self._looking.values() if not request.is_batch]
        batch = [key for key, request in self._looking.items() if request.is_batch]
        self._looking = {}
        self._wakeups_left = MAX_WAKEUPS
        self._wake_ups.wake(self._reserved.pass_time(now_ms))
        try:
            planned = self._plan_together(looking, now_ms)
        except Exception:
            # One request cannot be planned; that error is raised again when it goes, alone.
            log.exception(
                "joint planning failed for %d queued requests; planning them individually",
                len(looking),
            )
            planned = PlannedOrder(self._reserved.dispatch_order(looking), {}, ())
        self._joint_waits |= planned.waiting
        self._wake_ups.wake(planned.to_wake)
        return [*planned.order, *planned.waiting, *batch]

    def _plan_together(
        self, looking: Sequence[LaneRequest], now_ms: int
    ) -> PlannedOrder[RequestKey]:
        context = None
        if self.config.queues_for_places and len(looking) > 1:
            full_workers = self.worker_capacity.full_workers(now_ms)
            context = PlanningContext(self.inputs.state(now_ms), self.config, full_workers)
        return plan_together(
            looking, self._reserved, context, lambda request: self._plan(request, now_ms)
        )

    def decide(self, request: LaneRequest, now_ms: int) -> Decision:
        """Decide about a request of the last pass: a place, a wait, or a rejection. It is planned
        again, since a request of the same pass may have taken its place. A place is free until the
        next decision, so the caller counts the request there before."""
        decision = self._decide(request, now_ms)
        if isinstance(decision, Placement) and decision.phase != "decode":
            local = request.prompt.local_hashes(decision.block_size)
            return replace(decision, prefix_marks=self.inputs.routed.marks_of(local))
        return decision

    def _decide(self, request: LaneRequest, now_ms: int) -> Decision:
        if request.is_batch:
            awaited = self.ranks_with_reservations()
            full_workers = self.worker_capacity.full_for_batch(now_ms)
            return self.batch.decide(request, now_ms, awaited, full_workers)
        self._new.discard(request.key)
        if (joint_wait := self._joint_waits.pop(request.key, None)) is not None:
            return joint_wait
        planned = self._wait_behind_decodes(request, now_ms) or self._plan(request, now_ms)
        if isinstance(planned, Placement):
            self._take(request, planned.worker_rank)
        else:
            self._reserve(request, planned.reservation if isinstance(planned, Wait) else None)
        return planned

    def _take(self, request: LaneRequest, place: WorkerRank) -> None:
        """A request goes to a place: charge its class once, and wake those whose turn comes."""
        waits_for_places = self._wake_ups.waiting_for_places
        first = self._reserved.next_for(place) if waits_for_places else None
        if request.phase != "decode":  # its class was charged with its prefill
            self._classes.charge(request.cost)
        self._reserve(request, None)
        if waits_for_places and (now_first := self._reserved.next_for(place)) not in (first, None):
            self._wake_ups.wake([now_first])  # another class is first now
        self._wake_one(place.worker)

    def _wait_behind_decodes(self, request: LaneRequest, now_ms: int) -> Wait | None:
        """The wait of a prompt that no worker could decode now, while computed ones wait for that:
        its hand-over might expire. With no decode waiting, prompts are computed ahead."""
        model = request.prompt.request.model
        if request.phase != "prefill" or not self.waiting.has_decodes(model):
            return None
        decode = self._plan(replace(request, phase="decode"), now_ms)
        return decode if isinstance(decode, Wait) and not decode.needs_new_worker else None

    def first_phase(
        self, request: LaneRequest, now_ms: int, *, stays_whole: bool = False
    ) -> FirstPhase:
        """The phase that a request begins with; see `handover_rules.first_phase`."""
        model = request.prompt.request.model
        if (
            not self.inputs.pools.pool(model, "prefill").rows
            and not self.handover_rules.is_enforced
        ):
            return WHOLE
        others = self._reserved.reservations_of_others(request.key)
        return first_phase(
            request.prompt, self.inputs.state(now_ms, others), self.config, self.handover_rules,
            seed=request.seed, stays_whole=stays_whole,
            full_workers=self.worker_capacity.full_workers(now_ms),
        )  # fmt: skip

    def is_backed_up(self, request: LaneRequest) -> bool:
        """Whether the queue is full and every place for this request is reserved, of any phase that
        it may begin with. False with a priority, and with policies that reserve no places."""
        hints = request.prompt.request.hints
        if not len(self._reserved) or hints.strict_priority or hints.priority_jump:
            return False
        if not self.waiting.is_full(request.queue_key, planned=len(self._new)):
            return False
        model = request.prompt.request.model
        pools = [self.inputs.pools.pool(model, phase) for phase in FIRST_PHASES]
        places = [place for pool in pools for place in pool.table.worker_ranks]
        return bool(places) and self._reserved.has_reservations(places)

    def _use_weight(self, config: RoutingConfig) -> None:
        weights = config.predictive_weights._replace(decode_weight=self._decode_weight.value)
        self.config = config._replace(predictive_weights=weights)
        self._without_queueing = config._replace(
            predictive_weights=weights._replace(max_hold_ms=0.0)
        )

    def dry_run(self, request: LaneRequest, now_ms: int) -> Decision:
        """The decision for a request now, without a reservation or any other effect."""
        return self._plan(request, now_ms, self._without_queueing)

    def _plan(
        self, request: LaneRequest, now_ms: int, config: RoutingConfig | None = None
    ) -> Decision:
        if request.phase == "decode":
            config = self._without_queueing  # the blocks of its prompt are held for it elsewhere
        elif self._may_not_stay_whole(request):
            return not_eligible(NO_DECODE_WORKER)
        config = config or self.config
        others = NOTHING_PLANNED
        if config.queues_for_places:
            others = self._reserved.reservations_of_others(request.key)
        session = request.prompt.request.hints.session_control
        bound: WorkerRank | None = None
        if session is not None and session.action != "open":
            bound = self._ledger.sessions.preferred_rank(session.session_id, request.phase, now_ms)
        return select_worker(
            request.prompt,
            self.inputs.state(now_ms, others),
            config,
            seed=request.seed,
            phase=request.phase,
            dispatched_count=self.inputs.dispatched[request.phase],
            excluded=request.excluded,
            full_workers=self.worker_capacity.full_workers(now_ms),
            queued_since_ms=request.since_ms,
            deadline_ms=request.deadline_ms,
            session_rank=bound,
        )

    def _may_not_stay_whole(self, request: LaneRequest) -> bool:
        """Whether two workers have to share a request that is whole: when its phase was chosen, no
        worker could decode it. Such a worker may have come meanwhile."""
        is_whole = request.phase == "aggregated" and self.handover_rules.is_enforced
        return is_whole and can_be_split(request.prompt.request)

    def ranks_with_reservations(self) -> set[WorkerRank]:
        return self._reserved.ranks_with_reservations()

    # --- waiting ---------------------------------------------------------------------------------

    @property
    def reservations(self) -> int:
        return len(self._reserved)

    def waiting_of(self, service_class: ServiceClass) -> WaitingRequests:
        return self.batch.waiting if service_class == "batch" else self.waiting

    @property
    def next_wake_ms(self) -> float:
        """When to call `wake_due` next; inf if nothing wakes by time."""
        return min(self._wake_ups.next_ms, self.batch.wake_ms)

    def wake_due(self, now_ms: float) -> None:
        """Wake the requests whose retry times have come."""
        self._wake_ups.wake_due(now_ms)
        self.batch.wake_due(now_ms)

    @property
    def has_woken(self) -> bool:
        return self._wake_ups.has_woken

    def take_woken(self) -> list[RequestKey]:
        """The requests woken since the last call, which are to look again."""
        return self._wake_ups.take_woken()

    def cancel_wait(self, key: RequestKey) -> None:
        """Let a request wait no longer, without waking it."""
        self._wake_ups.discard(key)

    def wait(self, request: LaneRequest, planned: Wait, now_ms: int, until_ms: float) -> None:
        """Let a request wait until a place for it may be free, or its wait ends at `until_ms`."""
        if request.is_batch:
            self.batch.wait(request, now_ms, until_ms)
            return
        if request.key not in self.waiting.keys:
            self.waiting.add(request, self.inputs.uncached_tokens(request.prompt, request.phase))
        retry_ms = self.waiting.retry_ms(now_ms, until_ms)
        planned_ms = self._reserved.next_retry_ms(request.key, planned)
        if planned_ms is not None:
            retry_ms = min(retry_ms, max(planned_ms, now_ms + MIN_WAIT_MS))
        if planned.reservation is None:
            name = _queue_name(request.queue_key, request.phase)
            self._wake_ups.add(request.key, retry_ms, name, (*request.priority, request.arrival))
        else:
            self._wake_ups.add(request.key, retry_ms)

    def leave(self, request: LaneRequest) -> None:
        """Remove a request that has a place, or that ended. After the last decode of a model, new
        prompts may be computed."""
        key, model = request.key, request.prompt.request.model
        self._looking.pop(key, None)
        if request.is_batch:
            self.batch.waiting.remove(request)
            return
        self._joint_waits.pop(key, None)
        self._new.discard(key)
        self.waiting.remove(request)
        self._reserve(request, None)
        if request.phase == "decode" and not self.waiting.has_decodes(model):
            self._wake_first(model, "prefill")

    def _reserve(self, request: LaneRequest, planned: Reservation | None) -> None:
        if planned is None and not self._wake_ups.waiting_for_places:
            self._reserved.remove(request.key)  # as below, without a request to wake
        else:
            self._wake_ups.wake(self._reserved.reserve(request, planned))

    def wake_for(self, worker: str) -> None:
        """Wake the requests that a change of this worker concerns."""
        self._wake_one(worker)
        if self._wake_ups.waiting_for_places:
            keys = self._reserved.to_wake(worker, self._wakeups_left)
            self._wakeups_left = max(self._wakeups_left - len(keys), 0)
            self._wake_ups.wake(keys)

    def _wake_one(self, worker: str) -> None:
        """Wake the first request of each phase that this worker serves."""
        member = self._fleet.members.get(worker) if self._wake_ups.has_lines else None
        if member is not None:
            for phase in FIRST_PHASES:
                if can_take(member.card, phase):
                    self._wake_first(member.card.model, phase)

    def _wake_first(self, model: str, phase: Phase) -> None:
        queues = self._classes.waiting_queues(model, "")
        self._wake_ups.wake_first([_queue_name(queue, phase) for queue in queues], self._by_class)

    def _by_class(self, name: QueueName, priority: Priority) -> Priority:
        model, class_name, _ = name
        virtual_time = self._classes.virtual_time(QueueKey(model, class_name))
        return priority[0], virtual_time, *priority[1:]

    # --- records of the log -----------------------------------------------------------------------

    def on_record(self, record: LogRecord, now_ms: int, *, is_replay: bool = False) -> None:
        """A record of the ledger was applied; old records only train the estimates."""
        self.inputs.on_record(record, is_replay=is_replay)
        self._decode_weight.on_record(record)
        if self._decode_weight.value != self.config.predictive_weights.decode_weight:
            self._use_weight(self.config)
        if is_replay:
            return
        self.batch.on_record(record, now_ms)
        content = record.record
        if type(content) is Finished:
            if content.code == "worker_full" and content.retryable:
                return  # it freed no place
            self.wake_for(content.worker)
        elif type(content) is PrefillDone:
            self.wake_for(content.worker)  # it may have been too busy until now

    def on_fleet_changed(self) -> None:
        """Other workers may be eligible now: wake all requests."""
        self.inputs.on_fleet_changed()
        self.batch.on_fleet_changed()
        self.evacuation.on_fleet_changed()
        self._wake_ups.wake_lines()
        self._wake_ups.wake(self._reserved.in_dispatch_order())


def _queue_name(queue: QueueKey, phase: Phase) -> QueueName:
    """The line of requests for workers of the same roles: those of phase prefill apart, since no
    other worker serves them."""
    return (*queue, "prefill" if phase == "prefill" else "decode")
