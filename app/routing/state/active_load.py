"""Active load per worker: sums over its open runs, maintained incrementally. `ledger.py` has the
runs that are open by the ledger, the router's queue the decisions that are not read back.
"""

from __future__ import annotations

import msgspec

from kvlane.app.routing.state.change_log import ChangeLog
from kvlane.app.routing.state.fleet import WorkerRank


class WorkerLoad(msgspec.Struct, frozen=True, gc=False):
    """Load of the open runs on one rank of one epoch of a worker. `tokens`: of prompts, and of
    answers when they began; `prefill_tokens`: those that are neither computed nor expected in the
    cache. `prefill_runs`: runs without a first token, `prefill_since_ms`: the sum of the broker
    times at which they came there.
    """

    runs: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    prefill_runs: int = 0
    prefill_since_ms: int = 0

    def add(self, other: WorkerLoad) -> WorkerLoad:
        return WorkerLoad(
            self.runs + other.runs,
            self.tokens + other.tokens,
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_runs + other.prefill_runs,
            self.prefill_since_ms + other.prefill_since_ms,
        )

    def subtract(self, other: WorkerLoad) -> WorkerLoad:
        return self.replace(other, NO_LOAD)

    def replace(self, old_load: WorkerLoad, new_load: WorkerLoad) -> WorkerLoad:
        return WorkerLoad(
            self.runs + new_load.runs - old_load.runs,
            self.tokens + new_load.tokens - old_load.tokens,
            self.prefill_tokens + new_load.prefill_tokens - old_load.prefill_tokens,
            self.prefill_runs + new_load.prefill_runs - old_load.prefill_runs,
            self.prefill_since_ms + new_load.prefill_since_ms - old_load.prefill_since_ms,
        )


NO_LOAD = WorkerLoad()


class ActiveLoad:
    """Load by worker and epoch, and by rank. For tables with copies in columns: `changes`, the
    ranks whose load changed; `by_rank`, the load of ranks that have any; `last_first_token_ms`, of
    each rank since it was idle; `begun`, the load there was then: later prompts join a later
    step."""

    def __init__(self) -> None:
        self.changes = ChangeLog[WorkerRank]()
        self.by_rank: dict[WorkerRank, WorkerLoad] = {}
        self.last_first_token_ms: dict[WorkerRank, int] = {}
        self.begun: dict[WorkerRank, WorkerLoad] = {}
        self._ranks: dict[tuple[str, int], dict[WorkerRank, None]] = {}
        """By epoch, the ranks that have any load."""
        self._by_adapter: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self.by_rank)

    def total(self, worker: str, epoch: int) -> WorkerLoad:
        total = NO_LOAD
        for rank in self._ranks.get((worker, epoch), ()):
            total = total.add(self.by_rank[rank])
        return total

    def by_worker(self) -> dict[str, WorkerLoad]:
        found: dict[str, WorkerLoad] = {}
        for rank, load in self.by_rank.items():
            found[rank.worker] = found.get(rank.worker, NO_LOAD).add(load)
        return found

    def load(self, rank: WorkerRank) -> WorkerLoad:
        return self.by_rank.get(rank, NO_LOAD)

    def adapter_runs(self, adapter: str) -> int:
        return self._by_adapter.get(adapter, 0)

    def add(self, rank: WorkerRank, load: WorkerLoad, adapter: str = "") -> None:
        """Add load, of a request for `adapter` if it names one."""
        self.replace(rank, NO_LOAD, load, adapter)

    def remove(self, rank: WorkerRank, load: WorkerLoad, adapter: str = "") -> None:
        self.replace(rank, load, NO_LOAD, adapter)

    def replace(
        self, rank: WorkerRank, old_load: WorkerLoad, load: WorkerLoad, adapter: str = ""
    ) -> None:
        """Replace load that was added, by the load that a run has now."""
        if adapter and load.runs != old_load.runs:
            self._count(adapter, load.runs - old_load.runs)
        total = self.by_rank.get(rank, NO_LOAD).replace(old_load, load)
        self.changes.record(rank)
        if total != NO_LOAD:
            if rank not in self.by_rank:
                self._ranks.setdefault(rank[:2], {})[rank] = None
            self.by_rank[rank] = total
        elif self.by_rank.pop(rank, None) is not None:
            self.last_first_token_ms.pop(rank, None)
            self.begun.pop(rank, None)
            ranks = self._ranks[rank[:2]]
            del ranks[rank]
            if not ranks:
                del self._ranks[rank[:2]]

    def on_first_token(self, rank: WorkerRank, at_ms: int) -> None:
        """A run there had its first token; the latest such time is kept."""
        if rank in self.by_rank:
            self.last_first_token_ms[rank] = max(at_ms, self.last_first_token_ms.get(rank, 0))
            self.begun[rank] = self.by_rank[rank]
            self.changes.record(rank)

    def _count(self, adapter: str, more: int) -> None:
        if runs := self._by_adapter.get(adapter, 0) + more:
            self._by_adapter[adapter] = runs
        else:
            self._by_adapter.pop(adapter, None)
