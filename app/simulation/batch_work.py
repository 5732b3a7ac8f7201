"""Batch work beside the interactive requests of a simulated run: an endless supply of requests.

The shipped code orders it in windows (`app/prompts/job_order.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, get_args

import numpy as np

from kvlane.app.engine.simulated.batch import BatchSequence
from kvlane.app.prompts.job_order import BatchItem, JobOrder
from kvlane.app.routing.selection.batch_placement import BatchBounds
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.simulation.simulated_worker import RemovedSequence, SimulatedWorker
from kvlane.app.simulation.trace_requests import SIMULATION_SECRET, SPREAD
from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS, TraceRow
from kvlane.indexer.block_hashes import prompt_keys
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.request import Request, StopConditions

WINDOW = 200
"""Requests that are ordered together: the batch of a preprocessor (`prompt_source.MAX_BATCH`)."""
QUEUED_REQUESTS = 128
"""Requests in the queue of a router: the default of KVLANE_MAX_QUEUED_BATCH_REQUESTS."""
BATCH_CHUNK = 1 << 40
"""Chunks of batch requests count from here, so that they differ from those of the trace."""

BatchMode = Literal["classes", "no preemption", "no classes"]
"""`no classes`: batch requests are interactive as all others, so many at a time for each worker."""
MODES: tuple[BatchMode, ...] = get_args(BatchMode)


@dataclass(slots=True, eq=False)
class BatchTask:
    """A batch request. `chunks`: of its prompt and its answer. `made`: tokens of its answer."""

    id: str
    prompt_tokens: int
    output_tokens: int
    chunks: list[int]
    made: int = 0
    attempt: int = 0
    computed: int = 0
    """Tokens in a cache when it was preempted."""
    sequence: BatchSequence | None = None
    worker: SimulatedWorker | None = None


@dataclass(slots=True)
class BatchCounts:
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    finished: int = 0


@dataclass(slots=True)
class BatchWork:
    rows: Sequence[TraceRow]
    mode: BatchMode
    bounds: BatchBounds
    block_size: int
    runs_per_worker: int = 16
    """Mode `no classes`: runs at a time for each worker."""
    tasks: dict[str, BatchTask] = field(default_factory=dict)
    counts: BatchCounts = field(default_factory=BatchCounts)
    _order: JobOrder = field(default_factory=JobOrder)
    _window: deque[BatchTask] = field(default_factory=deque)
    _supply: Iterator[BatchTask] = field(init=False)

    def __post_init__(self) -> None:
        self._supply = self._endless()

    @property
    def has_class(self) -> bool:
        return self.mode != "no classes"

    def first_count(self, workers: int) -> int:
        """The requests that come at the start; later ones come one by one."""
        return QUEUED_REQUESTS if self.has_class else self.runs_per_worker * workers

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
                yield BatchTask(
                    f"b{lap}-{number}", row.input_length, max(row.output_length, 1), chunks
                )

    def next_task(self) -> BatchTask:
        if not self._window:
            window = [next(self._supply) for _ in range(WINDOW)]
            items = [BatchItem("", tuple(task.chunks[:64]), task.prompt_tokens) for task in window]
            self._window += [window[i] for i in self._order.arranged(items)]
        task = self._window.popleft()
        self.tasks[task.id] = task
        return task

    def keys(self, task: BatchTask) -> list[int]:
        local = np.array(task.chunks, np.uint64) * SPREAD
        keys: list[int] = prompt_keys(local, SIMULATION_SECRET).tolist()
        return keys

    def prompt(self, task: BatchTask) -> PromptHashes:
        """The state of a request in a router: its prompt, and the tokens generated so far."""
        tokens = task.prompt_tokens + task.made
        local = np.array(task.chunks[: tokens // self.block_size], np.uint64) * SPREAD
        stop = StopConditions(max_tokens=task.output_tokens)
        service_class: ServiceClass = "batch" if self.has_class else "interactive"
        request = Request(id=task.id, stop=stop, service_class=service_class)
        return PromptHashes.from_hashes(request, tokens, local, self.block_size, bytes(task.made))

    def begin(self, task: BatchTask, worker: SimulatedWorker) -> BatchSequence:
        task.worker = worker
        task.sequence = BatchSequence(
            task, task.prompt_tokens + task.made, task.output_tokens - task.made, task.chunks,
            priority=int(self.has_class), caches_output=True,
        )  # fmt: skip
        return task.sequence

    def on_first_token(self, task: BatchTask) -> None:
        assert task.sequence is not None
        cached = task.sequence.cached_tokens
        self.counts.computed_tokens += task.sequence.prompt_tokens - cached
        self.counts.recomputed_tokens += max(task.computed - cached, 0)

    def on_finished(self, task: BatchTask) -> None:
        assert task.sequence is not None
        self._made(task.sequence.max_tokens)
        self.counts.finished += 1
        del self.tasks[task.id]

    def on_removed(self, removed: RemovedSequence) -> BatchTask:
        """A run was preempted; returns its request, of which the rest is to be made."""
        task = removed.sequence.key
        assert isinstance(task, BatchTask)
        self._made(removed.output_tokens)
        task.made += removed.output_tokens
        task.computed = removed.computed_tokens
        task.sequence = task.worker = None
        return task

    def _made(self, tokens: int) -> None:
        self.counts.output_tokens += tokens
        self.counts.computed_tokens += tokens
