"""Metrics of a worker: its runs, its engine and its heartbeats.

Latencies begin when the worker accepts a run; those of whole requests are in `router_metrics.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Protocol, get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvlane.app.metrics.metric_set import MetricSet, counters
from kvlane.app.serving.run_executor import Run
from kvlane.indexer.cache_events.event_normalizer import NormalizerCounters
from kvlane.streams.records import EngineStats, RunCode


class MeasuredWorker(Protocol):
    """The state of a worker that is read when a page is asked for."""

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last acknowledged heartbeat."""

    @property
    def open_runs(self) -> tuple[int, int]:
        """Runs in the engine, and runs that wait for it."""

    def engine_stats(self) -> EngineStats | None:
        """State of the engine, if the engine gives it."""

    def cache_event_counters(self) -> Sequence[NormalizerCounters]:
        """Counters of the engine's cache events, one for each data-parallel rank."""


class WorkerMetrics(MetricSet):
    """The metrics of one worker. `model`: set when the engine has one."""

    def __init__(self, worker: MeasuredWorker) -> None:
        super().__init__()
        self.model = ""
        self._runs = self.counter("kvlane_worker_runs", "Runs that ended, by code", "model", "code")
        self._ttft = self.histogram(
            "kvlane_worker_time_to_first_token_seconds",
            "Time from the acceptance of a run to its first token",
            "model",
        )
        self._itl = self.histogram(
            "kvlane_worker_inter_token_latency_seconds",
            "Inter-token latency, averaged over a run",
            "model",
        )
        self._prompt, self._cached, self._output = (
            self.counter(f"kvlane_worker_{name}_tokens", meaning, "model")
            for name, meaning in (
                ("prompt", "Tokens of the prompts of runs with a first token"),
                ("cached_prompt", "Those of them that the engine's prefix cache held"),
                ("output", "Tokens that runs generated"),
            )
        )
        self._calls, self._malformed, self._unfit = (
            self.counter(f"kvlane_worker_{name}", meaning, "model", "parser")
            for name, meaning in (
                ("tool_calls", "Tool calls in answers, by parser"),
                ("malformed_tool_calls", "Tool calls that stayed text, or ended at a fault"),
                ("unfit_replays", "Answers that did not continue: versions of workers differ"),
            )
        )
        self.read(partial(_state_families, worker))

    async def page(self) -> bytes:
        for code in get_args(RunCode):
            self._runs.labels(self.model, code)
        return await super().page()

    def on_finished(self, run: Run, code: RunCode) -> None:
        self._runs.labels(self.model, code).inc()
        if (parsing := run.assignment.request.parsing) is not None:
            (calls, malformed), name = run.calls, parsing.tools or parsing.reasoning
            self._calls.labels(self.model, name).inc(calls)
            self._malformed.labels(self.model, name).inc(malformed)
            self._unfit.labels(self.model, name).inc(run.is_unfit)
        if not run.ttft_ms:
            return
        self._ttft.labels(self.model).observe(run.ttft_ms / 1000)
        if run.itl_ms:
            self._itl.labels(self.model).observe(run.itl_ms / 1000)
        self._prompt.labels(self.model).inc(run.assignment.request.prompt_tokens)
        self._cached.labels(self.model).inc(run.cached_tokens)
        if run.is_counted:
            self._output.labels(self.model).inc(run.output_tokens)


def _state_families(worker: MeasuredWorker) -> Iterator[Metric]:
    running, waiting = worker.open_runs
    engine = worker.engine_stats() or EngineStats()
    for name, meaning, value in (
        (
            "heartbeat_age_seconds",
            "Time since the last acknowledged heartbeat",
            worker.heartbeat_age_s,
        ),
        ("requests_running", "Runs in the engine, or closing", running),
        ("requests_waiting", "Runs that wait in the worker for the engine", waiting),
        ("engine_requests_running", "Requests that the engine runs, as it reports", engine.running),
        ("engine_requests_waiting", "Requests that wait inside the engine", engine.waiting),
        ("kv_cache_used_blocks", "Blocks of the KV cache in use", engine.kv_used_blocks),
        ("kv_cache_blocks", "Blocks of the KV cache", engine.kv_total_blocks),
    ):
        yield GaugeMetricFamily(f"kvlane_worker_{name}", meaning, value)
    yield CounterMetricFamily("kvlane_worker_engine_steps", "Steps of the engine", engine.steps)
    ranks = [asdict(each) for each in worker.cache_event_counters()]
    yield counters(
        "kvlane_worker_skipped_kv_events",
        "Cache events of the engine that are not in the log unchanged, by reason",
        "reason",
        (
            ([field.name], sum(rank[field.name] for rank in ranks))
            for field in fields(NormalizerCounters)
        ),
    )
