"""Inputs of the decisions of a router: views of workers and ledger, estimates, and those of its own
decisions that it has not read back. Plain and synchronous; the views are fed by their owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvlane.app.routing.queueing.batch_class import batch_run
from kvlane.app.routing.queueing.herd_avoidance import HerdAvoidance
from kvlane.app.routing.queueing.worker_capacity import WorkerCapacity
from kvlane.app.routing.selection.decision import (
    NOTHING_PLANNED,
    Placement,
    PlannedReservations,
    RoutingState,
)
from kvlane.app.routing.selection.eligibility import CandidatePools, can_take, pinned_worker
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.state.active_load import NO_LOAD, ActiveLoad, WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchRunKey, BatchRuns
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.performance import PerformanceModel, WorkerKind, profile_from_card
from kvlane.app.routing.state.request_state import RunId
from kvlane.app.routing.state.routed_prefixes import RoutedPrefixes
from kvlane.indexer.events import Tier
from kvlane.streams.records import LogRecord, Phase, RunKey
from kvlane.streams.request import Request

FIRST_PHASES: tuple[Phase, ...] = ("aggregated", "prefill")


class RoutingInputs:
    """One per router. `router`: its name in the ledger. `pools`: of the workers to which requests
    are sent. `counts_output`: whether output tokens of running requests count as load."""

    def __init__(
        self, router: str, fleet: Fleet, pools: CandidatePools, ledger: LedgerState,
        index: KvIndexView, *, counts_output: bool,
    ) -> None:  # fmt: skip
        self.pools = pools
        self.counts_output = counts_output
        self._fleet = fleet
        self._ledger = ledger
        self._index = index
        self.unconfirmed, self.unconfirmed_batch = ActiveLoad(), BatchRuns()
        """The load of this router's decisions that it has not read back."""
        self.worker_capacity = WorkerCapacity(
            fleet, ledger, self.unconfirmed, self.unconfirmed_batch
        )
        self.herd_avoidance = HerdAvoidance(router)
        self.routed = RoutedPrefixes(index)
        self.dispatched = Counter[Phase]()
        """Decisions by phase, for policies that go in turn."""
        self._performance = PerformanceModel()
        self._prompt_workers: Sequence[str] = ()
        """The workers that compute prompts, of all models."""

    def state(self, now_ms: int, others: PlannedReservations = NOTHING_PLANNED) -> RoutingState:
        performance = self._performance
        performance.refresh(now_ms)
        return RoutingState(
            self._fleet, self.pools, self._index, self._ledger.active_load, self.unconfirmed,
            now_ms, performance.mean_output_tokens, performance.slowdown, others,
            count_output_tokens=self.counts_output,
            expected_followups=performance.expected_followups,
            prefill_shares=performance.prefill_shares,
            transfer_token_ms=performance.transfer_token_ms,
            recent_prefill=performance.recent_prefill, batch_runs=self._ledger.batch_runs,
            curves=performance.curves, step_shares=performance.step_shares,
            routed=self.routed, usual_load=performance.usual_load,
            stagger_ms=self.herd_avoidance.stagger_ms(
                self._prompt_workers, self._fleet.version, now_ms, performance.mean_prefill_ms
            ),
        )  # fmt: skip

    def add_unconfirmed(self, run: RunId, request: Request, placement: Placement) -> None:
        """Count the load of a decision that is carried out, until it is read back."""
        place = placement.worker_rank
        if request.service_class == "batch":
            self.unconfirmed_batch.put(
                place, _batch_key(run, request), batch_run(request.id, placement)
            )
        else:
            self.unconfirmed.add(place, placement.load, request.hints.lora_name or "")
        if pinned_worker(request.hints, run.phase) is None:
            self.dispatched[run.phase] += 1
        self.worker_capacity.on_assigned(run.worker, run.epoch)
        self.routed.add(
            RunKey(request.id, run.attempt, run.phase), place, placement.prefix_marks,
            placement.at_ms,
        )  # fmt: skip

    def remove_unconfirmed(self, run: RunId, request: Request, placement: Placement) -> None:
        """Undo `add_unconfirmed` when a decision was read back or not written, but not its turn."""
        self.routed.discard_unread(RunKey(request.id, run.attempt, run.phase))
        if request.service_class == "batch":
            self.unconfirmed_batch.discard(_batch_key(run, request))
        else:
            adapter = request.hints.lora_name or ""
            self.unconfirmed.remove(placement.worker_rank, placement.load, adapter)

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
        return sum(load.runs for load in self.unconfirmed.by_worker().values())

    @property
    def slowdown_by_worker(self) -> Mapping[str, float]:
        return self._performance.slowdown

    def uncached_tokens(self, prompt: PromptHashes, phase: Phase) -> int:
        """The tokens of a prompt that no worker of the phase has in the cache of its device."""
        block = self.pools.pool(prompt.request.model, phase).block_size
        depths = self._index.depths(prompt.local_hashes(block)).depths  # found when it was planned
        cached = int(depths[:, Tier.DEVICE].max(initial=0)) * block
        return max(prompt.tokens - cached, 0)

    def on_record(self, record: LogRecord, *, is_replay: bool = False) -> None:
        """A record of the ledger was applied; old ones only train the estimates."""
        self._performance.on_record(record)
        self.herd_avoidance.on_record(record)
        self.routed.on_record(record)
        if not is_replay:
            self.worker_capacity.on_record(record)

    def on_fleet_changed(self) -> None:
        self._prompt_workers = [
            name
            for name, member in self._fleet.members.items()
            if any(can_take(member.card, phase) for phase in FIRST_PHASES)
        ]
        self._performance.set_kinds({
            name: WorkerKind(member.card.model, profile_from_card(member.card.config))
            for name, member in self._fleet.members.items()
        })  # fmt: skip
        self.worker_capacity.on_fleet_changed()


def _batch_key(run: RunId, request: Request) -> BatchRunKey:
    return BatchRunKey(request.id, run.attempt, run.worker, run.epoch)
