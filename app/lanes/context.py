"""The shared context of a router's parts: its views, its decisions that are not read back yet, and
its ways to act.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from kvlane.app.lanes.ordered_routing import OrderedRouting
from kvlane.app.lanes.scheduler import Scheduler
from kvlane.app.lanes.shared_reads import EndOffsets, SharedScanner
from kvlane.app.metrics.router_metrics import RouterMetrics
from kvlane.app.routing.queueing.deferred_prompts import QueueSize
from kvlane.app.routing.queueing.fair_share import UNBOUNDED
from kvlane.app.routing.queueing.router_queue import QueueConfig, RouterQueue
from kvlane.app.routing.reconcile import ReconcileTimeouts
from kvlane.app.routing.selection.batch_placement import BatchBounds
from kvlane.app.routing.selection.decision import Placement
from kvlane.app.routing.selection.handover_rules import HandOverRules
from kvlane.app.routing.selection.routing_config import (
    DynamoWeights,
    PredictiveWeights,
    RoutingConfig,
    TransferSpeed,
)
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.request_state import RunId
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.wait_queue import WaitQueue
from kvlane.streams.clock import BrokerClock
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.group_consumer import PartitionClaim
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import LogRecord
from kvlane.streams.request import Request
from kvlane.streams.topics import ASSIGNMENTS, KV_EVENTS, partition_of
from kvlane.streams.views.follower import Follower

MAX_MODELS = 10_000
"""Bound on the names of models; more than any registry has."""


class ModelAvailability:
    """Whether models have workers. `absence_ms`: how long requests wait for a model without any.
    `needs_prefill`: no request is served without a prefill worker."""

    def __init__(self, fleet: Fleet, absence_ms: float, *, needs_prefill: bool = False) -> None:
        self._fleet = fleet
        self._absence_ms = absence_ms
        self._needs_prefill = needs_prefill
        self._known: OrderedDict[str, None] = OrderedDict()
        self._absent_since_ms: OrderedDict[str, int] = OrderedDict()
        """By model, the time of the first request that found no worker."""
        self._fleet_version = -1
        """The version of the fleet for which `_served` is right."""
        self._served: frozenset[str] = frozenset()

    def has_worker(self, model: str) -> bool:
        """Whether workers that are not lost serve this model; any worker serves ""."""
        if self._fleet_version != self._fleet.version:
            self._served = self._served_models()
            self._fleet_version = self._fleet.version
        return model in self._served

    def _served_models(self) -> frozenset[str]:
        models: dict[bool, set[str]] = {False: set(), True: set()}
        for _, member in self._fleet.live_members():
            models[member.card.role == "prefill"] |= {member.card.model, ""}
        return frozenset(models[False] & models[True] if self._needs_prefill else models[False])

    def is_known(self, model: str) -> bool:
        """Whether a model has workers, had some, or has a card; any model, without a worker."""
        return (
            not model
            or model in self._known
            or self.has_worker(model)
            or not any(self._fleet.live_members())
        )

    def is_timed_out(self, model: str, now_ms: int) -> bool:
        """Whether a model has had no worker for `absence_ms` after the first request for it."""
        if self.has_worker(model):
            return False
        since_ms = self._absent_since_ms.setdefault(model, now_ms)
        _forget_first(self._absent_since_ms)
        return now_ms - since_ms > self._absence_ms

    def absent_until_ms(self, model: str) -> float:
        """The broker time at which requests that wait for a worker of this model are refused; inf
        if none has waited since it had one."""
        return self._absent_since_ms.get(model, math.inf) + self._absence_ms

    def on_card(self, model: str) -> None:
        self._known[model] = None
        _forget_first(self._known)

    def on_fleet_changed(self) -> None:
        """Drop the absences that are over."""
        for model in [each for each in self._absent_since_ms if self.has_worker(each)]:
            del self._absent_since_ms[model]


def _forget_first(models: OrderedDict[str, Any]) -> None:
    while len(models) > MAX_MODELS:
        models.popitem(last=False)


BATCH_BYTES_SHARE = 0.25
"""Bound on the bytes of batch prompts that wait, as a share of that for interactive ones, on top of
which they come."""
WORKER_CACHE_SIZE = 4096
"""Workers whose partitions are cached: every decision needs that of its worker."""


class ViewStopped(Exception):
    """A view of this router stopped, so its state is stale, and the router ends."""


class LedgerListener(Protocol):
    """A part of a router that reacts to records of the ledger, after they were applied."""

    def on_record(self, log_record: LogRecord, *, is_replay: bool) -> None:
        """A record was applied. `is_replay`: it was read while the router was catching up."""


def routing_config(settings: Settings) -> RoutingConfig:
    weights = DynamoWeights(
        overlap_score_credit=settings.overlap_score_credit,
        prefill_load_scale=settings.prefill_load_scale,
        host_weight=settings.host_cache_weight,
        disk_weight=settings.disk_cache_weight,
        active_request_weight=settings.active_request_weight,
        overlap_decay=settings.overlap_decay,
        temperature=settings.router_temperature,
    )
    # Without a queue, a request that waits for a better place would be refused while another one is
    # free.
    max_queue_wait_s = settings.max_queue_wait_s if settings.max_queued_requests else 0.0
    predicting = PredictiveWeights(max_hold_ms=max_queue_wait_s * 1000)
    transfers = TransferSpeed(settings.transfer_bandwidth, settings.transfer_latency_ms)
    return RoutingConfig(
        settings.policy,
        weights,
        predicting,
        settings.session_affinity_tolerance,
        transfers,
        settings.objective,
    )


def _interactive_bound(settings: Settings) -> QueueSize:
    return QueueSize(
        settings.max_queued_requests, settings.max_queued_tokens, settings.max_queued_bytes
    )


def _handover_rules(settings: Settings) -> HandOverRules:
    return HandOverRules(
        settings.handover_min_tokens,
        settings.handover_min_share,
        settings.enforce_disaggregation,
        settings.transfer_domain,
        settings.transfer_domain_required,
        settings.preferred_transfer_domain,
    )


def _batch_bound(settings: Settings) -> QueueSize:
    """The bound of the queue of batch requests; any number of tokens may wait."""
    return QueueSize(
        max(1, settings.max_queued_batch_requests),
        UNBOUNDED,
        max(1, int(BATCH_BYTES_SHARE * settings.max_queued_bytes)),
    )


def queue_config(settings: Settings) -> QueueConfig:
    return QueueConfig(
        routing_config(settings), _interactive_bound(settings), settings.queue_order,
        settings.queue_classes, _handover_rules(settings), settings.track_output_blocks,
        BatchBounds(
            max_slowdown=settings.batch_max_slowdown,
            max_blocked_share=settings.batch_max_blocked_share,
        ),
        _batch_bound(settings),
    )  # fmt: skip


@dataclass
class RouterContext:
    name: str
    log: Log
    settings: Settings
    ctx: ProcessContext
    broker_clock: BrokerClock
    publisher: RecordPublisher
    scanner: SharedScanner
    ledger: LedgerState
    ledger_follower: Follower
    fleet: Fleet
    fleet_follower: Follower
    silent_workers: SilentWorkers
    kv_index: KvIndexView
    partitions: dict[str, int]
    """Partition counts of the topics this router addresses by key."""
    resume: Callable[[PartitionClaim], None]
    """Lets the intake read a lane."""
    pause: Callable[[PartitionClaim], None] = lambda _: None
    """Stops the intake from reading a lane."""
    count_awaited: Callable[[int], None] = lambda _: None
    """Changes the number of waits for records of the ledger, which arrive sooner meanwhile."""
    timeouts: ReconcileTimeouts = field(default_factory=ReconcileTimeouts)
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    heartbeat_read: WaitQueue = field(default_factory=WaitQueue)
    """Notified when heartbeats were read."""
    routing: OrderedRouting = field(init=False)
    queue: RouterQueue = field(init=False)
    model_availability: ModelAvailability = field(init=False)
    scheduler: Scheduler = field(init=False)
    response_end_offsets: dict[int, int] = field(default_factory=dict)
    """Ends of the response lanes as of a moment ago: at or before a new request's answer."""
    _end_offsets: EndOffsets = field(init=False)

    def __post_init__(self) -> None:
        self._end_offsets = EndOffsets(self.log, self.ctx)
        self.routing = OrderedRouting(self.settings, self.fleet)
        self.queue = RouterQueue(
            self.name, self.fleet, self.silent_workers, self.ledger, self.kv_index,
            queue_config(self.settings),
        )  # fmt: skip
        self.model_availability = ModelAvailability(
            self.fleet, 1000 * self.settings.no_worker_timeout_s,
            needs_prefill=self.settings.enforce_disaggregation,
        )  # fmt: skip
        self.scheduler = Scheduler(self.queue, self.broker_clock, self.count_awaited)

    def on_fleet_changed(self) -> None:
        """Other workers may be eligible now, or other settings of routing hold."""
        if self.routing.take_order():
            self.queue.set_config(queue_config(self.routing.settings))
        self.model_availability.on_fleet_changed()
        self.scheduler.on_fleet_changed()

    @contextmanager
    def count_unconfirmed(self, run: RunId, request: Request, choice: Placement) -> Iterator[None]:
        """Count the load of a decision until it is read back, or given up."""
        began_s = self.ctx.clock.now()
        queue = self.queue
        queue.inputs.add_unconfirmed(run, request, choice)
        try:
            yield
            queue.inputs.herd_avoidance.observe_lag(1000 * (self.ctx.clock.now() - began_s))
        finally:
            queue.inputs.remove_unconfirmed(run, request, choice)

    async def end_offset(self, source: Partition) -> int:
        """The next offset of a partition, as of now or later; asks until the broker answers."""
        return await self._end_offsets.fetch(source)

    async def wait_for_ledger(self, source: Partition, offset: int) -> None:
        """Wait until this ledger is applied up to `offset`, exclusive. Raises ViewStopped."""
        try:
            await self.ledger_follower.wait_for(source, offset)
        except Exception as e:
            raise ViewStopped(f"the ledger is not followed any more: {e}") from e

    def assignments_partition(self, worker: str) -> Partition:
        return _partition_of(ASSIGNMENTS, worker, self.partitions[ASSIGNMENTS])

    def kv_events_partition(self, worker: str) -> Partition:
        return _partition_of(KV_EVENTS, worker, self.partitions[KV_EVENTS])


@lru_cache(WORKER_CACHE_SIZE)
def _partition_of(topic: str, worker: str, partitions: int) -> Partition:
    return Partition(topic, partition_of(worker.encode(), partitions))
