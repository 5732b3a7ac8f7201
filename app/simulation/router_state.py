"""State of the simulated routers: the views of a real router, fed with the same records.

All routers read the same records with the same delay, so they share their views (`SharedViews`,
`LedgerReplica`), and differ only in their own decisions that they have not read back yet
(`RouterState`). Heartbeats come every `HEARTBEAT_MS`, as from real workers, so generated tokens are
known as of the last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from app.engine.simulated.batch import EngineLimits, StepResult
from app.routing.queueing.herd_avoidance import NO_STAGGER, BurstDetector
from app.routing.selection.decision import (
    NOTHING_PLANNED,
    Placement,
    PlannedReservations,
    RoutingState,
)
from app.routing.selection.eligibility import CandidatePools
from app.routing.state.active_load import ActiveLoad
from app.routing.state.batch_runs import BatchRuns
from app.routing.state.fleet import Fleet
from app.routing.state.kv_index import KvIndexView
from app.routing.state.performance import PerformanceModel
from app.routing.state.request_state import RunStatus
from app.routing.state.silent_workers import SilentWorkers
from app.routing.worker_rank import WorkerRank
from app.simulation.simulated_worker import SimulatedWorker
from app.simulation.trace_requests import MODEL, SIMULATION_SECRET
from indexer.events import CLEARED, CacheEvent, EventKind, Tier, encode_events
from streams.ports import Partition
from streams.record_base import InternalRecord
from streams.records import (
    Assigned,
    Blocks,
    EngineConfig,
    Finished,
    Heartbeat,
    LogRecord,
    Phase,
    PrefillDone,
    RequestOffset,
    Role,
    RunProgress,
    WorkerCard,
)

HEARTBEAT_MS = 1000.0
REGISTRY, EVENTS = Partition("registry", 0), Partition("kv-events", 0)
_ORIGIN = RequestOffset(topic="requests", partition=0, offset=0)

SimulatedLedgerRecord = Assigned | PrefillDone | Finished


class SharedViews:
    """Fleet and index. `keys`: key of each chunk in the index; `roles`: of the workers.

    `transfer_bytes_per_token`: on the cards; None: the engines transfer no caches.
    """

    def __init__(
        self,
        workers: Sequence[SimulatedWorker],
        shape: EngineLimits,
        keys: dict[int, int],
        *,
        publishes_curves: bool,
        roles: Sequence[Role],
        transfer_bytes_per_token: int | None = None,
    ) -> None:
        self.fleet = Fleet()
        self._index = KvIndexView(SIMULATION_SECRET)
        self._unread: dict[SimulatedWorker, list[CacheEvent]] = {}
        self._keys = keys
        self._positions: dict[Partition, int] = {}
        self._event_ids = dict.fromkeys([worker.epoch for worker in workers], 0)
        config = EngineConfig(
            model=MODEL, kv_cache_block_size=shape.block_size, total_kv_blocks=shape.cache_blocks,
            max_num_seqs=shape.max_sequences, max_num_batched_tokens=shape.max_batched_tokens,
            curve=shape.curves.coefficients() if publishes_curves else None,
            transfer_lease_s=None if transfer_bytes_per_token is None else 0.0,
            transfer_bytes_per_token=transfer_bytes_per_token,
        )  # fmt: skip
        for worker in workers:
            card = WorkerCard(
                id=worker.name, slot=worker.epoch, model=MODEL, config=config, epoch=worker.epoch,
                role=roles[worker.epoch],
            )  # fmt: skip
            self._apply(self.fleet, REGISTRY, card, 0.0)
            self._unread[worker] = [CLEARED]

    @property
    def index(self) -> KvIndexView:
        """The index, with all cache changes up to now.

        Changes since the last access are applied now, in one record per worker: caches change more
        often than routers read the index.
        """
        if self._unread:
            for worker, events in self._unread.items():
                self._apply_events(worker, events)
            self._unread.clear()
        return self._index

    def add_chunks(self, chunks: Sequence[int], keys: Sequence[int]) -> None:
        """Keys of chunks that are no part of the trace."""
        self._keys.update(zip(chunks, keys, strict=True))

    def on_heartbeat(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Apply a heartbeat; with one run for all, since only the sum of tokens is used."""
        tokens = worker.output_tokens(now_ms)
        runs = RunProgress(id="all", attempt=0, phase="aggregated", output_tokens=tokens)
        self._apply(self.fleet, EVENTS, Heartbeat(
            worker=worker.name, epoch=worker.epoch, slot_offset=0, running=(runs,)
        ), now_ms)  # fmt: skip

    def on_cache_change(self, worker: SimulatedWorker, done: StepResult) -> None:
        """Record the evicted and computed blocks of a step."""
        keys, events = self._keys, self._unread.setdefault(worker, [])
        if done.removed:
            gone = tuple([keys[chunk] for chunk in done.removed])
            events.append(CacheEvent(EventKind.REMOVED, keys=gone))
        for sequence, start, end in done.stored:
            stored = tuple([keys[chunk] for chunk in sequence.block_ids[start:end]])
            events.append(CacheEvent(EventKind.STORED, Tier.DEVICE, start, stored))

    def _apply_events(self, worker: SimulatedWorker, events: Sequence[CacheEvent]) -> None:
        first = self._event_ids[worker.epoch]
        self._event_ids[worker.epoch] = first + len(events)
        columns = encode_events(events)
        # The time matters only for workers that are dropped after a day of silence: none here.
        self._apply(self._index, EVENTS, Blocks(
            worker=worker.name, epoch=worker.epoch, first_event_id=first,
            hash_fingerprint=SIMULATION_SECRET.fingerprint, kinds=columns.kinds,
            tiers=columns.tiers,
            positions=columns.positions, counts=columns.counts, keys=columns.keys,
        ), 0.0)  # fmt: skip

    def _apply(
        self, view: Fleet | KvIndexView, source: Partition, record: InternalRecord, at_ms: float
    ) -> None:
        offset = self._positions.get(source, 0)
        self._positions[source] = offset + 1
        view.apply(source, [LogRecord(offset, int(at_ms), record)], offset + 1)


class LedgerReplica:
    """The ledger, as far as it was read.

    Simplified from `app/routing/state/request_transitions.py`, whose other rules have no effect
    here: each request has one run, each record comes once and in order. The full view took a tenth
    of a simulation.
    """

    def __init__(self, lag_ms: float = 0.0) -> None:
        self.active_load = ActiveLoad()
        self.performance = PerformanceModel()
        self.burst_detector = BurstDetector(lag_ms)
        self._open: dict[str, RunStatus] = {}
        self._position = 0

    def on_record(self, record: SimulatedLedgerRecord, at_ms: float) -> None:
        """Apply a record that was written at `at_ms`."""
        fact = LogRecord(self._position, int(at_ms), record)
        self._position += 1
        self._update_load(record, fact.timestamp_ms)
        self.performance.on_record(fact)
        self.burst_detector.on_record(fact)

    def _update_load(self, record: SimulatedLedgerRecord, at_ms: int) -> None:
        if isinstance(record, Assigned):
            place = WorkerRank(record.worker, record.epoch, record.rank)
            run = self._open[record.id] = RunStatus(
                "assigned", at_ms, place, record.prompt_tokens, record.prefill_tokens
            )
            self.active_load.add(place, run.load)
            return
        run = self._open[record.id]
        place, before = run.place, run.load
        if isinstance(record, Finished):
            self.active_load.remove(place, before)
            del self._open[record.id]
            return
        run.state, run.since_ms = "prefilled", at_ms
        self.active_load.replace(place, before, run.load)
        self.active_load.on_first_token(place, at_ms)


class RouterState:
    """State of one router. `own_load`: load of its decisions that are not in `ledger` yet."""

    def __init__(
        self, views: SharedViews, books: LedgerReplica, later_ms: Mapping[str, float] = NO_STAGGER
    ) -> None:
        """`later_ms`: `stagger_ms` of `RoutingState`, used while requests arrive in bursts."""
        self._later_ms = later_ms
        self.shared_views = views
        self.ledger = books
        self.own_load = ActiveLoad()
        self.batch_runs: BatchRuns | None = None
        """Those of batch work beside the trace."""
        self._pools = CandidatePools(views.fleet, SilentWorkers(views.fleet, math.inf))

    def routing_state(
        self, now_ms: float, others: PlannedReservations = NOTHING_PLANNED
    ) -> RoutingState:
        """View for `select_worker`, valid until the next record. `others`: see `RoutingState`."""
        views, books = self.shared_views, self.ledger
        is_bursty = books.burst_detector.is_bursty(
            books.performance.mean_prefill_ms, len(self._later_ms)
        )
        return RoutingState(
            views.fleet, self._pools, views.index, books.active_load, self.own_load, int(now_ms),
            books.performance.mean_output_tokens, books.performance.slowdown, others,
            stagger_ms=self._later_ms if is_bursty else NO_STAGGER,
            expected_followups=books.performance.expected_followups,
            prefill_shares=books.performance.prefill_shares,
            transfer_token_ms=books.performance.transfer_token_ms,
            recent_prefill=books.performance.recent_prefill, batch_runs=self.batch_runs,
        )  # fmt: skip


def assigned_record(request_id: str, decision: Placement, phase: Phase = "aggregated") -> Assigned:
    """Ledger record of a decision, with the chosen candidate only: the others are not used."""
    worker, epoch, rank = decision.worker_rank
    chosen = decision.record.candidate(decision.worker_rank)
    return Assigned(
        id=request_id, attempt=0, phase=phase, worker=worker, epoch=epoch, rank=rank,
        origin=_ORIGIN, responses_from=0, deadline_ms=0, prompt_tokens=decision.tokens,
        policy=decision.policy, params=decision.params, seed=decision.seed,
        block_size=decision.block_size, cached_tokens_predicted=decision.cached_tokens,
        prefill_tokens=decision.prefill_tokens, listed=() if chosen is None else (chosen,),
        held_ms=decision.forecast.waited_ms,
    )  # fmt: skip


def prefill_done_record(
    request_id: str,
    worker: SimulatedWorker,
    cached_tokens: int,
    prefill_ms: float,
    phase: Phase = "aggregated",
) -> PrefillDone:
    """Ledger record of a first token, `prefill_ms` after its worker got the request."""
    return PrefillDone(
        id=request_id, attempt=0, phase=phase, worker=worker.name, epoch=worker.epoch,
        run=0, cached_tokens=cached_tokens, ttft_ms=prefill_ms, prefill_ms=prefill_ms,
    )  # fmt: skip


def finished_record(
    request_id: str, worker: SimulatedWorker, output_tokens: int, phase: Phase = "aggregated"
) -> Finished:
    """Ledger record of a last token."""
    return Finished(
        id=request_id, attempt=0, phase=phase, worker=worker.name, epoch=worker.epoch,
        code="length", output_tokens=output_tokens,
    )  # fmt: skip
