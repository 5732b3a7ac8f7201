"""Batch work beside the interactive requests of a simulated run.

An endless supply of requests is ordered in windows, placed and preempted by the shipped code:
`app/prompts/job_order.py`, `app/routing/selection/batch_placement.py`. Here are the queue, the
open runs, and the counts of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, get_args

import numpy as np

from kvlane.app.engine.simulated.batch import BatchSequence
from kvlane.app.prompts.job_order import BatchItem, JobOrder
from kvlane.app.routing.queueing.router_queue import RouterQueue
from kvlane.app.routing.selection.batch_placement import (
    RESUME_ELSEWHERE_MS,
    BatchBounds,
    max_sequences,
    place_batch_request,
    ranks_with_headroom,
    runs_to_preempt,
)
from kvlane.app.routing.selection.decision import Placement, RoutingState
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.select import select_worker
from kvlane.app.routing.state.batch_runs import BatchRun, BatchRunKey, BatchRuns
from kvlane.app.routing.state.performance import profile_from_card
from kvlane.app.routing.worker_rank import WorkerRank
from kvlane.app.simulation.simulated_worker import RemovedSequence, SimulatedWorker
from kvlane.app.simulation.trace_requests import SIMULATION_SECRET, SPREAD
from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS, TraceRow
from kvlane.indexer.block_keys import prompt_keys
from kvlane.streams.request import Request, StopConditions

WINDOW = 200
"""Requests that are ordered together: the batch of a preprocessor (`prompt_source.MAX_BATCH`)."""
BATCH_CHUNK = 1 << 40
"""Chunks of batch requests count from here, so that they differ from those of the trace."""

BatchMode = Literal["classes", "no preemption", "no classes"]
"""`no classes`: batch requests are routed as all others, so many at a time for each worker."""
MODES: tuple[BatchMode, ...] = get_args(BatchMode)


@dataclass(slots=True, eq=False)
class BatchTask:
    """A batch request. `chunks`: of its prompt and its answer. `made`: tokens of its answer."""

    id: str
    prompt_tokens: int
    output_tokens: int
    chunks: list[int]
    made: int = 0
    computed: int = 0
    """Tokens in a cache when it was preempted."""
    preempted_ms: float = 0.0
    sequence: BatchSequence | None = None
    worker: SimulatedWorker | None = None

    def prompt(self, block_size: int) -> PromptHashes:
        """Its state in a router: the prompt, and the tokens generated so far."""
        tokens = self.prompt_tokens + self.made
        local = np.array(self.chunks[: tokens // block_size], np.uint64) * SPREAD
        stop = StopConditions(max_tokens=self.output_tokens)
        request = Request(id=self.id, stop=stop, service_class="batch")
        return PromptHashes.from_hashes(request, tokens, local, block_size)


@dataclass(slots=True)
class BatchCounts:
    """Totals of a run, in tokens. `recomputed`: computed again after a preemption."""

    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    finished: int = 0


@dataclass(slots=True)
class BatchWork:
    """The batch work of one run. `on_chunks`: called with chunks and keys of each new request.
    `runs`: the open ones, as the ledger of the router has them."""

    rows: Sequence[TraceRow]
    mode: BatchMode
    bounds: BatchBounds
    block_size: int
    on_chunks: Callable[[Sequence[int], Sequence[int]], None]
    runs: BatchRuns
    runs_per_worker: int = 16
    """Mode `no classes`: runs at a time for each worker."""
    tasks: dict[str, BatchTask] = field(default_factory=dict)
    """Open ones by id."""
    counts: BatchCounts = field(default_factory=BatchCounts)
    _order: JobOrder = field(default_factory=JobOrder)
    _waiting: deque[BatchTask] = field(default_factory=deque)
    _preempted: dict[str, deque[BatchTask]] = field(default_factory=dict)
    """By worker, those that wait for their caches."""
    _supply: Iterator[BatchTask] = field(init=False)

    def __post_init__(self) -> None:
        self._supply = self._endless()

    def _endless(self) -> Iterator[BatchTask]:
        """All rows again and again, each time with contents of their own."""
        split = CHUNK_TOKENS // self.block_size
        own = count(BATCH_CHUNK)
        for lap in count():
            seen: dict[int, list[int]] = {}
            for number, row in enumerate(self.rows):
                chunks: list[int] = []
                for chunk in row.full_chunks:
                    if chunk not in seen:
                        seen[chunk] = [next(own) for _ in range(split)]
                    chunks += seen[chunk]
                whole = (row.input_length + max(row.output_length, 1)) // self.block_size
                chunks += [next(own) for _ in range(whole - len(chunks))]
                local = np.array(chunks, np.uint64) * SPREAD
                self.on_chunks(chunks, prompt_keys(local, SIMULATION_SECRET).tolist())
                yield BatchTask(
                    f"b{lap}-{number}", row.input_length, max(row.output_length, 1), chunks
                )

    def next_task(self) -> BatchTask:
        """The next request to place; it stays the first one until `begin`."""
        if not self._waiting:
            window = [next(self._supply) for _ in range(WINDOW)]
            items = [BatchItem("", tuple(task.chunks[:64]), task.prompt_tokens) for task in window]
            self._waiting += [window[i] for i in self._order.arranged(items)]
        return self._waiting[0]

    def place(
        self, queue: RouterQueue, awaited: Collection[WorkerRank], workers: int, now_ms: float
    ) -> tuple[BatchTask, Placement] | None:
        """The next request and its place, or None while there is none.

        A preempted one that has waited for RESUME_ELSEWHERE_MS goes to any worker.
        """
        state = queue.routing_state(int(now_ms))
        free: set[str] = set()
        if self.mode != "no classes":
            free = {
                rank.worker
                for rank in ranks_with_headroom("", state, self.runs, self.bounds)
                if rank not in awaited
            }
            if not free:
                return None
        for worker, line in self._preempted.items():
            task = line[0]
            waits_for_cache = now_ms - task.preempted_ms < RESUME_ELSEWHERE_MS
            if waits_for_cache and worker not in free:
                continue
            planned = place_batch_request(
                task.prompt(self.block_size), state, self.runs, self.bounds, seed=0,
                awaited=awaited,
                waits_for_cache=waits_for_cache,
            )  # fmt: skip
            if isinstance(planned, Placement):
                line.popleft()
                if not line:
                    del self._preempted[worker]
                return task, planned
        task = self.next_task()
        prompt = task.prompt(self.block_size)
        if self.mode == "no classes":
            if len(self.tasks) >= self.runs_per_worker * workers:
                return None
            planned = select_worker(prompt, state, queue.config, seed=len(self.tasks))
        else:
            planned = place_batch_request(
                prompt, state, self.runs, self.bounds, seed=0, awaited=awaited
            )
        if not isinstance(planned, Placement):
            return None
        self._waiting.popleft()
        return task, planned

    def begin(self, task: BatchTask, worker: SimulatedWorker, planned: Placement) -> BatchSequence:
        """A run begins; returns its sequence."""
        own = self.mode != "no classes"
        task.worker = worker
        task.sequence = sequence = BatchSequence(
            task, task.prompt_tokens + task.made, task.output_tokens - task.made, task.chunks,
            priority=int(own), caches_output=True,
        )  # fmt: skip
        self.tasks[task.id] = task
        if own:
            run = BatchRun(task.id, planned.tokens, max(planned.prefill_tokens, 1), planned.at_ms)
            self.runs.put(planned.worker_rank, BatchRunKey(task.id), run)
        return sequence

    def on_first_token(self, task: BatchTask, rank: WorkerRank) -> None:
        """The prefill of a run ended."""
        assert task.sequence is not None
        cached = task.sequence.cached_tokens
        self.counts.computed_tokens += task.sequence.prompt_tokens - cached
        self.counts.recomputed_tokens += max(task.computed - cached, 0)
        run = self.runs.on_rank(rank).get(BatchRunKey(task.id))
        if run is not None:
            self.runs.put(rank, BatchRunKey(task.id), BatchRun(run.id, run.tokens, 0, run.since_ms))

    def on_finished(self, task: BatchTask) -> None:
        """The last token of a request."""
        assert task.sequence is not None
        self._made(task.sequence.max_tokens)
        self.counts.finished += 1
        self._close(task)

    def on_removed(self, removed: RemovedSequence, now_ms: float) -> None:
        """A run was preempted: the rest of it goes before new requests."""
        task = removed.sequence.key
        assert isinstance(task, BatchTask)
        assert task.worker is not None
        worker = task.worker.name
        self._made(removed.output_tokens)
        task.made += removed.output_tokens
        task.computed = removed.computed_tokens
        self.counts.preemptions += 1
        task.preempted_ms = now_ms
        self._close(task)
        self._preempted.setdefault(worker, deque()).append(task)

    def _made(self, tokens: int) -> None:
        self.counts.output_tokens += tokens
        self.counts.computed_tokens += tokens

    def _close(self, task: BatchTask) -> None:
        self.runs.discard(BatchRunKey(task.id))
        self.tasks.pop(task.id, None)
        task.sequence = task.worker = None

    def victims(self, state: RoutingState, rank: WorkerRank) -> list[BatchTask]:
        """The requests that give way to the interactive runs of a rank."""
        if self.mode != "classes":
            return []
        load = state.committed.load(rank).add(state.unconfirmed.load(rank))
        member = state.fleet.members[rank.worker]
        profile = profile_from_card(member.card.config)._replace(
            slowdown=state.slowdown.get(rank.worker, 1.0)
        )
        keys = runs_to_preempt(
            profile, load, self.runs.on_rank(rank), self.bounds,
            state.mean_output_tokens, max_sequences(member.card),
        )  # fmt: skip
        for key in keys:
            self.runs.discard(key)
        return [self.tasks[key.id] for key in keys]
