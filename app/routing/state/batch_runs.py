"""Open runs of batch requests, by rank.

Batch runs give way, so they are no part of the load of interactive decisions (`active_load.py`),
except for the step in progress. Kept run by run, because preemption chooses among runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from kvlane.app.routing.state.active_load import NO_LOAD, WorkerLoad
from kvlane.app.routing.state.change_log import ChangeLog
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.performance import EngineProfile


class BatchRun(msgspec.Struct, frozen=True, gc=False):
    """A run. `tokens` of its prompt, and of its answer when it began. `prefill_tokens`: to be
    computed, 0 after its first token. `since_ms`: its begin, or the end of its prefill.
    `is_preemptible`: whether another run can continue its answer."""

    id: str
    tokens: int
    prefill_tokens: int = 0
    since_ms: int = 0
    is_preemptible: bool = True


class BatchRunKey(NamedTuple):
    """A run in the registry: an attempt of a request, on an epoch of a worker."""

    id: str
    attempt: int = 0
    worker: str = ""
    epoch: int = 0


NO_RUNS: Mapping[BatchRunKey, BatchRun] = MappingProxyType({})


def load_of(runs: Collection[BatchRun]) -> WorkerLoad:
    computing = [run.prefill_tokens for run in runs if run.prefill_tokens]
    tokens = sum([run.tokens for run in runs])
    return WorkerLoad(len(runs), tokens, sum(computing), len(computing))


def batch_delay_ms(
    profile: EngineProfile, batch_load: WorkerLoad, mean_output_tokens: float
) -> float:
    """Expected delay of a prompt by the batch runs of its rank, in ms: a step of theirs, or 0. Half
    a step is left of the one under way, and half stands for their part of the next."""
    if not batch_load.runs:
        return 0.0
    step_ms = profile.decode_ms(batch_load.tokens + batch_load.runs * mean_output_tokens / 2)
    return step_ms + profile.prefill_ms(min(batch_load.prefill_tokens, profile.chunk_tokens))


class BatchLoads(Protocol):
    def load(self, rank: WorkerRank) -> WorkerLoad:
        """The load of the runs of a rank."""


class BatchRuns:
    """The registry; runs in the order of their beginning. `changes`: ranks whose runs changed."""

    def __init__(self) -> None:
        self.changes = ChangeLog[WorkerRank]()
        self._by_rank: dict[WorkerRank, dict[BatchRunKey, BatchRun]] = {}
        self._loads: dict[WorkerRank, WorkerLoad] = {}
        self._ranks: dict[BatchRunKey, WorkerRank] = {}
        self._by_worker = Counter[tuple[str, int]]()

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[BatchRunKey]:
        return iter(self._ranks)

    def put(self, rank: WorkerRank, key: BatchRunKey, run: BatchRun) -> None:
        if self._ranks.get(key, rank) != rank:
            self.discard(key)
        if key not in self._ranks:
            self._by_worker[rank[:2]] += 1
        self._ranks[key] = rank
        runs = self._by_rank.setdefault(rank, {})
        before = runs.get(key)
        runs[key] = run
        self._count(rank, run, before)

    def discard(self, key: BatchRunKey) -> None:
        rank = self._ranks.pop(key, None)
        if rank is not None:
            runs = self._by_rank[rank]
            self._count(rank, None, runs.pop(key))
            if not runs:
                del self._by_rank[rank], self._loads[rank]
            self._by_worker[rank[:2]] -= 1
            if not self._by_worker[rank[:2]]:
                del self._by_worker[rank[:2]]

    def _count(self, rank: WorkerRank, run: BatchRun | None, before: BatchRun | None) -> None:
        """Replace a run of a rank in its load."""
        load = self._loads.get(rank, NO_LOAD)
        if before is not None:
            load = load.subtract(load_of([before]))
        if run is not None:
            load = load.add(load_of([run]))
        self._loads[rank] = load
        self.changes.record(rank)

    def ranks(self) -> list[WorkerRank]:
        return list(self._by_rank)

    def on_worker(self, worker: str, epoch: int) -> int:
        return self._by_worker[worker, epoch]

    def on_rank(self, rank: WorkerRank) -> Mapping[BatchRunKey, BatchRun]:
        return self._by_rank.get(rank, NO_RUNS)

    def load(self, rank: WorkerRank) -> WorkerLoad:
        return self._loads.get(rank, NO_LOAD)
