"""What the parts of one router share: its view of the world, and its ways to act on it.

The view is the three folds plus the overlay, i.e. this router's own decisions that it has not yet
read back from the ledger. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from app.bell import Bell
from app.http.router_metrics import RouterMetrics
from app.lanes.places import Places
from app.lanes.scan import Scanner
from app.lifetime import Lifetime
from app.routing.burdens import Burden, Burdens
from app.routing.classes import Classes
from app.routing.decisions import Tuning
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.load import Load, RunId
from app.routing.obligations import Patience
from app.routing.policies import DynamoWeights
from app.routing.predictive import PredictiveWeights
from app.routing.turns import Turns
from app.settings import Settings
from streams.clock import BrokerClock
from streams.follow import Follower
from streams.intake import Claim
from streams.outbox import Outbox
from streams.patience import until_answered
from streams.ports import Log, Partition
from streams.topics import ASSIGNMENTS, KV_EVENTS, partition_of


class FoldStopped(Exception):
    """A fold of this router ended, so it no longer knows what is true. It ends, too.

    The cause is what ended the fold; the log of the process says more.
    """


def tuning_of(settings: Settings) -> Tuning:
    """The policy that the settings ask for."""
    weights = DynamoWeights(
        overlap_score_credit=settings.overlap_score_credit,
        prefill_load_scale=settings.prefill_load_scale,
        temperature=settings.router_temperature,
    )
    # Where nobody may wait, who is held for a better place would be refused beside a free one.
    max_hold_s = settings.max_hold_s if settings.held_requests else 0.0
    predicting = PredictiveWeights(settings.decode_weight, max_hold_s * 1000)
    return Tuning(settings.policy, weights, predicting, settings.session_slack)


@dataclass
class RouterContext:
    """One per router process."""

    name: str
    log: Log
    settings: Settings
    life: Lifetime
    broker_clock: BrokerClock
    outbox: Outbox
    scanner: Scanner
    load: Load
    load_follower: Follower
    fleet: Fleet
    fleet_follower: Follower
    index: Index
    partitions: dict[str, int]
    """Partition counts of the topics this router addresses by key."""
    resume: Callable[[Claim], None]
    """Tells the intake that a lane may be read."""
    patience: Patience = field(default_factory=Patience)
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    heard: Bell = field(default_factory=Bell)
    """Rung when heartbeats were read."""
    places: Places = field(init=False)
    responses_ends: dict[int, int] = field(default_factory=dict)
    """Ends of the response lanes as of a moment ago: where a new request's answer begins, or
    before it. A lower bound is enough, it only makes a later scan longer."""
    _undelivered: Burdens = field(default_factory=Burdens)

    _turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self._turns = Turns(self.name)
        self.places = Places(
            self.fleet, self.load, self.index, self._undelivered, tuning_of(self.settings),
            self.broker_clock, self.worker_timeout_ms, self.settings.held_requests,
            turns=self._turns, counts_output=self.settings.track_output_blocks,
            bound_tokens=self.settings.held_tokens, bound_bytes=self.settings.held_bytes,
            absence_ms=1000 * self.settings.wait_for_worker_s,
            queue_order=self.settings.queue_order,
            classes=Classes(self.settings.queue_classes),
        )  # fmt: skip

    @property
    def worker_timeout_ms(self) -> int:
        """Silence after which a worker is suspected, in ms."""
        return int(self.settings.worker_timeout_s * 1000)

    @property
    def holding(self) -> int:
        """How many requests wait in this router; bounded by `settings.held_requests`."""
        return len(self.places.waiting)

    @contextmanager
    def overlay(self, run: RunId, rank: int, burden: Burden, adapter: str = "") -> Iterator[None]:
        """Count a decision at once, until it is read back (or given up)."""
        began_s = self.life.clock.now()
        self._undelivered.add(run.place(rank), burden, adapter)
        self.places.room.sent(run.worker, run.epoch)
        try:
            yield
            self._turns.read_back(1000 * (self.life.clock.now() - began_s))
        finally:
            self._undelivered.remove(run.place(rank), burden, adapter)

    async def end_of(self, source: Partition) -> int:
        """The next offset of a partition; asks until the broker answers."""
        ends = await until_answered(
            self.life.clock, lambda: self.log.end_offsets(source.topic, [source.partition])
        )
        return ends[source.partition]

    async def ledger_read(self, source: Partition, offset: int) -> None:
        """Wait until everything below `offset` of a lane's ledger is folded. Raises FoldStopped."""
        try:
            await self.load_follower.wait_for(source, offset)
        except Exception as e:
            raise FoldStopped(f"the ledger is not followed any more: {e}") from e

    def slot_of(self, worker: str) -> Partition:
        """Where a worker's assignments lie."""
        return Partition(ASSIGNMENTS, partition_of(worker.encode(), self.partitions[ASSIGNMENTS]))

    def events_of(self, worker: str) -> Partition:
        """Where a worker's heartbeats and cache events lie."""
        return Partition(KV_EVENTS, partition_of(worker.encode(), self.partitions[KV_EVENTS]))
