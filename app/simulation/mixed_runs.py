"""Runs of a trace with batch work, and their figures.

Blocks have 64 tokens, not the 512 of the trace's chunks: a preempted run computes the part of its
last block again. Idle capacity: the time of workers without a request of the trace, in the run
without batch work, times the tokens per second of a worker with batch work only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvlane.app.engine.simulated.batch import DECODE, EngineLimits
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.selection.batch_placement import BatchBounds
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.simulation.batch_work import BatchCounts, BatchMode, BatchWork
from kvlane.app.simulation.simulated_router import NetworkConditions
from kvlane.app.simulation.simulation_runs import RunMetrics, metrics_of
from kvlane.app.simulation.simulator import Simulator, new_simulator
from kvlane.app.simulation.trace_requests import (
    ArrivalRate,
    RequestArrival,
    SimulatedRequest,
    TraceRequest,
    schedule_arrivals,
    trace_requests,
)
from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS, TraceRow

BLOCK_TOKENS = 64
SPLIT = CHUNK_TOKENS // BLOCK_TOKENS
UNBOUNDED = BatchBounds(max_step_ms=400.0, max_blocked_share=1.0)
ALONE_S = 30.0


class MixedRun(NamedTuple):
    """`publishes_curves`: as in `NetworkConditions`."""

    workers: int
    speed: float = 1.0
    cache_chunks: int = 2048
    bounds: BatchBounds = BatchBounds()
    curves: PerfCurves = PerfCurves()
    publishes_curves: bool = True


class MixedMetrics(NamedTuple):
    """Figures of a run. `batch`: None without batch work; `idle_tokens`: see the module."""

    mode: str
    requests: RunMetrics
    batch: BatchCounts | None
    idle_tokens: float


class Mix:
    def __init__(
        self, rows: Sequence[TraceRow], batch_rows: Sequence[TraceRow], run: MixedRun
    ) -> None:
        self._run = run
        self._batch_rows = batch_rows
        split = [_split(row) for row in rows]
        requests = trace_requests(split, block_size=BLOCK_TOKENS)
        self._arrivals = schedule_arrivals(split, requests, ArrivalRate(run.speed), 0)
        self._short = TraceRequest(requests[0].prompt, 1, requests[0].chunks, requests[0].keys)

    def compare(
        self, modes: Sequence[BatchMode], progress: Callable[[int], None] = lambda _: None
    ) -> list[MixedMetrics]:
        """The run without batch work, then one of each mode. Raises as `new_simulator` does."""
        simulator = self._simulator(self._arrivals, None, self._run.bounds, progress)
        requests = simulator.run()
        idle_tokens = _idle_s(requests, simulator) * self._alone_rate()
        found = [MixedMetrics("no batch", metrics_of(requests), None, idle_tokens)]
        for mode in modes:
            simulator = self._simulator(self._arrivals, mode, self._run.bounds, progress)
            requests = simulator.run()
            assert simulator.batch is not None
            counts = simulator.batch.counts
            found.append(MixedMetrics(mode, metrics_of(requests), counts, idle_tokens))
        return found

    def _alone_rate(self) -> float:
        ends_ms = ALONE_S * 1000
        arrivals = [RequestArrival(at_ms, self._short) for at_ms in (0.0, ends_ms)]
        simulator = self._simulator(arrivals, "classes", UNBOUNDED)
        ends_ms = simulator.run()[-1].last_token_ms
        assert simulator.batch is not None
        open_tokens = 0
        for task in simulator.batch.tasks.values():
            if task.sequence and task.worker and task.sequence.phase == DECODE:
                steps = task.sequence.offset + task.worker.state.step_count
                open_tokens += steps + 1 - task.sequence.prompt_tokens
        tokens = simulator.batch.counts.output_tokens + open_tokens
        return tokens / (ends_ms / 1000) / self._run.workers

    def _simulator(
        self,
        arrivals: Sequence[RequestArrival],
        mode: BatchMode | None,
        bounds: BatchBounds,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Simulator:
        limits = EngineLimits(BLOCK_TOKENS, self._run.cache_chunks * SPLIT, curves=self._run.curves)
        return new_simulator(
            arrivals, self._run.workers, limits, RoutingConfig("predictive"), 0, progress,
            NetworkConditions(publishes_curves=self._run.publishes_curves),
            batch=None if mode is None else BatchWork(self._batch_rows, mode, bounds, BLOCK_TOKENS),
        )  # fmt: skip


def mixed_row(found: MixedMetrics) -> dict[str, Any]:
    """The row of a run in tables and files. Shares of batch tokens are NaN without batch work."""
    requests, batch = found.requests, found.batch
    return {
        "batch": found.mode,
        "ttft_ms": {"mean": requests.ttft_mean, "p99": requests.ttft_p99},
        "itl_ms": requests.itl_mean,
        "batch_tokens": 0 if batch is None else batch.output_tokens,
        "of_idle_capacity": 0.0 if batch is None else batch.output_tokens / found.idle_tokens,
        "recomputed": 0.0 if batch is None else recomputed_share(batch),
        "preemptions": 0 if batch is None else batch.preemptions,
    }


def recomputed_share(batch: BatchCounts) -> float:
    return batch.recomputed_tokens / max(batch.computed_tokens, 1)


def _idle_s(requests: Sequence[SimulatedRequest], simulator: Simulator) -> float:
    ends_ms = max(each.last_token_ms for each in requests)
    idle_ms = 0.0
    for worker in simulator.workers:
        runs = sorted((r.sent_ms, r.last_token_ms) for r in requests if r.worker == worker.name)
        until_ms = 0.0
        for began_ms, ended_ms in runs:
            idle_ms += max(began_ms - until_ms, 0.0)
            until_ms = max(until_ms, ended_ms)
        idle_ms += ends_ms - until_ms
    return idle_ms / 1000


def _split(row: TraceRow) -> TraceRow:
    ids = np.array(row.hash_ids, np.int64)[:, None] * SPLIT + np.arange(SPLIT)
    blocks = ids.ravel()[: -(-row.input_length // BLOCK_TOKENS)].tolist()
    return TraceRow(row.timestamp, row.input_length, row.output_length, blocks)
