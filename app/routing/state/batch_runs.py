"""Open runs of batch requests, by rank.

An interactive decision that counts interactive runs alone (`active_load.py`) is the same with batch
work as without. This is the other part of the load, run by run, because preemption chooses among
runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from app.routing.state.active_load import WorkerLoad
from app.routing.worker_rank import WorkerRank


class BatchRun(msgspec.Struct, frozen=True, gc=False):
    """A run. `tokens` of its prompt, and of its answer when it began.

    `prefill_tokens`: still to be computed, 0 after its first token. `since_ms`: when it began, or
    when its prefill ended. `is_preemptible`: whether another run can continue its answer.
    """

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
    """The load of runs."""
    computing = [run.prefill_tokens for run in runs if run.prefill_tokens]
    tokens = sum([run.tokens for run in runs])
    return WorkerLoad(len(runs), tokens, sum(computing), len(computing))


class BatchLoads(Protocol):
    """The load of batch runs by rank."""

    def load(self, rank: WorkerRank) -> WorkerLoad:
        """The load of the runs of a rank."""


class BatchRuns:
    """The registry; runs in the order of their beginning."""

    def __init__(self) -> None:
        self.version = 0
        """Number of changes."""
        self._by_rank: dict[WorkerRank, dict[BatchRunKey, BatchRun]] = {}
        self._ranks: dict[BatchRunKey, WorkerRank] = {}
        self._by_worker = Counter[tuple[str, int]]()

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[BatchRunKey]:
        return iter(self._ranks)

    def put(self, rank: WorkerRank, key: BatchRunKey, run: BatchRun) -> None:
        """Add a run, or replace it."""
        if self._ranks.get(key, rank) != rank:
            self.discard(key)
        if key not in self._ranks:
            self._by_worker[rank[:2]] += 1
        self.version += 1
        self._ranks[key] = rank
        self._by_rank.setdefault(rank, {})[key] = run

    def discard(self, key: BatchRunKey) -> None:
        """Remove a run, if it is there."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            self.version += 1
            runs = self._by_rank[rank]
            del runs[key]
            if not runs:
                del self._by_rank[rank]
            self._by_worker[rank[:2]] -= 1
            if not self._by_worker[rank[:2]]:
                del self._by_worker[rank[:2]]

    def ranks(self) -> list[WorkerRank]:
        """The ranks that have any."""
        return list(self._by_rank)

    def on_worker(self, worker: str, epoch: int) -> int:
        """How many runs an epoch of a worker has, over all ranks."""
        return self._by_worker[worker, epoch]

    def on_rank(self, rank: WorkerRank) -> Mapping[BatchRunKey, BatchRun]:
        """The runs of a rank. Valid until the next change."""
        return self._by_rank.get(rank, NO_RUNS)

    def load(self, rank: WorkerRank) -> WorkerLoad:
        """The load of the runs of a rank."""
        return load_of(self.on_rank(rank).values())
