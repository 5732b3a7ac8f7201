"""The shared context of a router's parts: its state, and its ways to act.

The state is the three folds plus this router's own decisions that it has not yet read back from the
ledger. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from app.lanes.end_offsets import EndOffsets
from app.lanes.scheduler import Scheduler
from app.lanes.shared_scan import SharedScanner
from app.metrics.router_metrics import RouterMetrics
from app.routing.queueing.fair_share import FairQueue
from app.routing.queueing.herd_avoidance import HerdAvoidance
from app.routing.reconcile import ReconcileTimeouts
from app.routing.selection.decision import RoutingConfig
from app.routing.selection.policies import DynamoWeights
from app.routing.selection.predictive import PredictiveWeights
from app.routing.state.active_load import ActiveLoad, WorkerLoad
from app.routing.state.fleet import Fleet
from app.routing.state.kv_index import KvIndexView
from app.routing.state.ledger import LedgerState, RunId
from app.runtime.process import ProcessContext
from app.settings import Settings
from app.wait_queue import WaitQueue
from streams.clock import BrokerClock
from streams.ports import Log, Partition
from streams.reading.group_consumer import PartitionClaim
from streams.record_publisher import RecordPublisher
from streams.records import LogRecord
from streams.topics import ASSIGNMENTS, KV_EVENTS, partition_of
from streams.views.follower import Follower


class ViewStopped(Exception):
    """A fold of this router stopped, so its state is stale. The router ends, too.

    The cause is what ended the fold; the log of the process says more.
    """


class LedgerListener(Protocol):
    """A part of a router that reacts to records of the ledger, after they were folded."""

    def on_record(self, fact: LogRecord, *, is_replay: bool) -> None:
        """A record was folded. `is_replay`: it was read while the router was catching up."""


def routing_config(settings: Settings) -> RoutingConfig:
    """The policy that the settings ask for."""
    weights = DynamoWeights(
        overlap_score_credit=settings.overlap_score_credit,
        prefill_load_scale=settings.prefill_load_scale,
        temperature=settings.router_temperature,
    )
    # Where nobody may wait, who is held for a better place would be refused beside a free one.
    max_queue_wait_s = settings.max_queue_wait_s if settings.max_queued_requests else 0.0
    predicting = PredictiveWeights(settings.decode_weight, max_queue_wait_s * 1000)
    return RoutingConfig(settings.policy, weights, predicting, settings.session_affinity_tolerance)


@dataclass
class RouterContext:
    """One per router process."""

    name: str
    log: Log
    settings: Settings
    ctx: ProcessContext
    broker_clock: BrokerClock
    outbox: RecordPublisher
    scanner: SharedScanner
    ledger: LedgerState
    ledger_follower: Follower
    fleet: Fleet
    fleet_follower: Follower
    kv_index: KvIndexView
    partitions: dict[str, int]
    """Partition counts of the topics this router addresses by key."""
    resume: Callable[[PartitionClaim], None]
    """Lets the intake read a lane."""
    pause: Callable[[PartitionClaim], None] = lambda _: None
    """Stops the intake from reading a lane."""
    timeouts: ReconcileTimeouts = field(default_factory=ReconcileTimeouts)
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    heartbeat_read: WaitQueue = field(default_factory=WaitQueue)
    """Notified when heartbeats were read."""
    scheduler: Scheduler = field(init=False)
    response_end_offsets: dict[int, int] = field(default_factory=dict)
    """Ends of the response lanes as of a moment ago: where a new request's answer begins, or
    before it. A lower bound is enough, it only makes a later scan longer."""
    _undelivered: ActiveLoad = field(default_factory=ActiveLoad)
    _ends: EndOffsets = field(init=False)
    _turns: HerdAvoidance = field(init=False)

    def __post_init__(self) -> None:
        self._turns = HerdAvoidance(self.name)
        self._ends = EndOffsets(self.log, self.ctx)
        self.scheduler = Scheduler(
            self.fleet, self.ledger, self.kv_index, self._undelivered,
            routing_config(self.settings),
            self.broker_clock, self.worker_timeout_ms, self.settings.max_queued_requests,
            turns=self._turns, counts_output=self.settings.track_output_blocks,
            bound_tokens=self.settings.max_queued_tokens,
            bound_bytes=self.settings.max_queued_bytes,
            absence_ms=1000 * self.settings.no_worker_timeout_s,
            queue_order=self.settings.queue_order,
            classes=FairQueue(self.settings.queue_classes),
        )  # fmt: skip

    @property
    def worker_timeout_ms(self) -> int:
        """Silence after which a worker is suspected, in ms."""
        return int(self.settings.worker_timeout_s * 1000)

    @property
    def queued_requests(self) -> int:
        """Number of requests that wait here; bounded by `settings.max_queued_requests`."""
        return len(self.scheduler.waiting_keys)

    @contextmanager
    def count_in_flight(
        self, run: RunId, rank: int, burden: WorkerLoad, adapter: str = ""
    ) -> Iterator[None]:
        """Count the load of a decision until it is read back, or given up."""
        began_s = self.ctx.clock.now()
        self._undelivered.add(run.worker_rank(rank), burden, adapter)
        self.scheduler.worker_capacity.on_assigned(run.worker, run.epoch)
        try:
            yield
            self._turns.observe_lag(1000 * (self.ctx.clock.now() - began_s))
        finally:
            self._undelivered.remove(run.worker_rank(rank), burden, adapter)

    async def end_offset(self, source: Partition) -> int:
        """The next offset of a partition, as of now or later; asks until the broker answers."""
        return await self._ends.fetch(source)

    async def wait_for_ledger(self, source: Partition, offset: int) -> None:
        """Wait until this ledger is folded up to `offset`, exclusive. Raises ViewStopped."""
        try:
            await self.ledger_follower.wait_for(source, offset)
        except Exception as e:
            raise ViewStopped(f"the ledger is not followed any more: {e}") from e

    def assignments_partition(self, worker: str) -> Partition:
        """The partition of a worker's assignments."""
        return Partition(ASSIGNMENTS, partition_of(worker.encode(), self.partitions[ASSIGNMENTS]))

    def kv_events_partition(self, worker: str) -> Partition:
        """The partition of a worker's heartbeats and cache events."""
        return Partition(KV_EVENTS, partition_of(worker.encode(), self.partitions[KV_EVENTS]))
