"""Shared views of the simulated routers: those of a real router, fed with the same records.

All routers read them with the same delay, so they share the views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from kvlane.app.engine.simulated.batch import EngineLimits, StepResult
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.queueing.router_queue import RouterQueue
from kvlane.app.routing.selection.decision import Placement
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.app.simulation.simulated_worker import SimulatedWorker
from kvlane.app.simulation.trace_requests import MODEL, SIMULATION_SECRET
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, Tier, encode_events
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import InternalRecord, ServiceClass
from kvlane.streams.records import (
    Assigned,
    Blocks,
    EngineConfig,
    Fencing,
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
REGISTRY, EVENTS, LEDGER = (Partition(topic, 0) for topic in ("registry", "kv-events", "ledger"))
_ORIGIN = RequestOffset(topic="requests", partition=0, offset=0)

SimulatedLedgerRecord = Assigned | PrefillDone | Finished | Fencing


class SharedViews:
    """Fleet and index. `keys`: key of each chunk in the index; `roles`: of the workers.
    `transfer_bytes_per_token`: on the cards; None: the engines transfer no caches."""

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
        self._publishes_curves = publishes_curves
        self.silent = SilentWorkers(self.fleet, math.inf)
        self.kv_index = KvIndexView(SIMULATION_SECRET)
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

    def apply_cache_changes(self) -> None:
        """Bring the index up to date, with one record for each worker whose cache has changed."""
        for worker, events in self._unread.items():
            self._apply_events(worker, events)
        self._unread.clear()

    def on_changed_engines(self, curves: PerfCurves) -> None:
        coefficients = curves.coefficients() if self._publishes_curves else None
        for member in list(self.fleet.members.values()):
            config = replace(member.card.config, curve=coefficients)
            self._apply(self.fleet, REGISTRY, replace(member.card, config=config), 0.0)

    def add_chunks(self, chunks: Sequence[int], keys: Sequence[int]) -> None:
        self._keys.update(zip(chunks, keys, strict=True))

    def on_heartbeat(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Apply a heartbeat, with one run for the sum of all tokens."""
        tokens = worker.output_tokens(now_ms)
        runs = RunProgress(id="all", attempt=0, phase="aggregated", output_tokens=tokens)
        self._apply(self.fleet, EVENTS, Heartbeat(
            worker=worker.name, epoch=worker.epoch, slot_offset=0, running=(runs,)
        ), now_ms)  # fmt: skip

    def on_cache_change(self, worker: SimulatedWorker, done: StepResult) -> None:
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
        self._apply(self.kv_index, EVENTS, Blocks(
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


class SimulatedLedger:
    """The ledger, as read by routers (`queues`) that read it at the same time."""

    def __init__(self) -> None:
        self.state = LedgerState(dedup_window_ms=0)
        self.queues: list[RouterQueue] = []
        self._position = 0

    def on_record(self, record: SimulatedLedgerRecord, at_ms: float) -> None:
        log_record = LogRecord(self._position, int(at_ms), record)
        self._position += 1
        self.state.apply(LEDGER, (log_record,), self._position)
        for queue in self.queues:
            queue.on_record(log_record, int(at_ms))


def assigned_record(
    request_id: str,
    placement: Placement,
    router: str = "",
    attempt: int = 0,
    service_class: ServiceClass = "interactive",
) -> Assigned:
    """Ledger record of a decision, with the chosen candidate only."""
    worker, epoch, rank = placement.worker_rank
    chosen = placement.record.candidate(placement.worker_rank)
    return Assigned(
        id=request_id, attempt=attempt, phase=placement.phase, worker=worker, epoch=epoch,
        rank=rank,
        origin=_ORIGIN, responses_from=0, deadline_ms=0, prompt_tokens=placement.tokens,
        policy=placement.policy, params=placement.params, seed=placement.seed,
        block_size=placement.block_size, cached_tokens_predicted=placement.cached_tokens,
        prefill_tokens=placement.prefill_tokens, listed=() if chosen is None else (chosen,),
        held_ms=placement.forecast.waited_ms, router=router,
        ttft_ms_predicted=placement.forecast.ttft_ms, service_class=service_class,
        itl_ms_predicted=placement.forecast.itl_ms, prefix_marks=placement.prefix_marks,
    )  # fmt: skip


def prefill_done_record(
    request_id: str,
    worker: SimulatedWorker,
    cached_tokens: int,
    prefill_ms: float,
    phase: Phase = "aggregated",
    attempt: int = 0,
) -> PrefillDone:
    """Ledger record of a first token, `prefill_ms` after its worker got the request."""
    return PrefillDone(
        id=request_id, attempt=attempt, phase=phase, worker=worker.name, epoch=worker.epoch,
        run=0, cached_tokens=cached_tokens, ttft_ms=prefill_ms, prefill_ms=prefill_ms,
    )  # fmt: skip


def finished_record(
    request_id: str,
    worker: SimulatedWorker,
    output_tokens: int,
    phase: Phase = "aggregated",
    attempt: int = 0,
    ttft_ms: float = 0.0,
    itl_ms: float = 0.0,
) -> Finished:
    """Ledger record of a last token; `ttft_ms` from when its worker got the request, `itl_ms` a
    mean."""
    return Finished(
        id=request_id, attempt=attempt, phase=phase, worker=worker.name, epoch=worker.epoch,
        code="length", output_tokens=output_tokens, ttft_ms=ttft_ms, itl_ms=itl_ms,
    )  # fmt: skip
