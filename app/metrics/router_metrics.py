"""Prometheus metrics of a router: its decisions, its queue, and its views.

Every series exists, at zero, before the first request; series by worker come and go with workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.metrics.gateway_metrics import LATENCY_BUCKETS_S, TOKEN_BUCKETS, LoopDelayMonitor
from app.metrics.request_metrics import RequestMetrics
from app.metrics.view_metrics import ViewCollector
from app.routing.selection import policies
from app.routing.selection.decision import Placement
from app.routing.selection.prompt_hashes import PromptHashes
from app.routing.state.active_load import WorkerLoad
from app.routing.state.kv_index import KvIndexView
from streams.records import EndCode
from streams.views.follower import Follower

POLICIES = ("predictive", *policies.POLICIES)
_RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class RouterGauges(Protocol):
    """State of a router that is read for each scrape: of its `Scheduler`."""

    @property
    def queued_requests(self) -> int:
        """How many requests."""

    @property
    def deferred_requests(self) -> int:
        """How many prompts from Kafka were read and wait in the log."""

    @property
    def queued_tokens(self) -> int:
        """How many tokens of their prompts no cache has."""

    @property
    def queued_bytes(self) -> int:
        """How many bytes their prompts have."""

    @property
    def slowdown_by_worker(self) -> Mapping[str, float]:
        """By worker, how many times slower than its curve it has been."""

    @property
    def worker_loads(self) -> Mapping[str, WorkerLoad]:
        """Active load by worker, from the ledger."""

    @property
    def unconfirmed_assignments(self) -> int:
        """Assignments that were not yet read back from the ledger."""


class RouterMetrics:
    """The metrics of one router, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._folds: ViewCollector | None = None
        self._decisions = Counter(
            "kvlane_router_decisions", "Requests assigned to a worker, by policy",
            ["policy"], registry=registry,
        )  # fmt: skip
        self._outcomes = Counter(
            "kvlane_router_terminated_requests",
            "Requests that this router ended, by code",
            ["code"], registry=registry,
        )  # fmt: skip
        self._queries = Counter(
            "kvlane_router_dry_runs", "Dry runs: requests for a decision without its execution",
            registry=registry,
        )  # fmt: skip
        self._queue_s = Histogram(
            "kvlane_router_queue_time_seconds", "Time from the arrival of a request in the "
            "router to its first assignment", buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._prompt_tokens = Histogram(
            "kvlane_router_prompt_tokens",
            "Prompt tokens of a request",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._hit_rate = Histogram(
            "kvlane_router_prefix_cache_hit_ratio", "Fraction of a prompt's blocks that its "
            "worker has cached",
            buckets=_RATES, registry=registry,
        )  # fmt: skip
        self.requests = RequestMetrics(registry)
        self.loop_delay = LoopDelayMonitor(registry)
        ProcessCollector(registry=registry)
        for policy in POLICIES:
            self._decisions.labels(policy)
        for code in get_args(EndCode):
            self._outcomes.labels(code)

    def watch(
        self, queue: RouterGauges, followers: Mapping[str, Follower], index: KvIndexView
    ) -> None:
        """Add the metrics of these objects."""
        self._folds = ViewCollector(index, followers)
        self.registry.register(_Queue(queue))
        self.registry.register(self._folds)

    async def page(self) -> bytes:
        """Everything, in Prometheus' text format."""
        assert self._folds is not None, "watches nothing"
        return await self._folds.page(self.registry)

    def on_dry_run(self, prompt: PromptHashes, choice: Placement) -> None:
        """Count a dry run."""
        self._queries.inc()
        self._observe(prompt, choice)

    def on_dispatched(
        self, attempt: int, prompt: PromptHashes, choice: Placement, waited_s: float
    ) -> None:
        """Count a dispatched request; prompt and queue time of the first attempt only."""
        self._decisions.labels(choice.policy).inc()
        if attempt == 0:
            self._queue_s.observe(waited_s)
            self._observe(prompt, choice)

    def on_ended(self, code: EndCode) -> None:
        """The router ended a request."""
        self._outcomes.labels(code).inc()

    def _observe(self, prompt: PromptHashes, choice: Placement) -> None:
        self._prompt_tokens.observe(prompt.tokens)
        rate = prompt.hit_rate(choice.overlap_blocks, choice.block_size)
        if rate is not None:
            self._hit_rate.observe(rate)


class _Queue(Collector):
    """Collector of the queue and of the load of workers."""

    def __init__(self, queue: RouterGauges) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        queue = self._queue
        yield GaugeMetricFamily(
            "kvlane_router_queued_requests", "Requests queued in this router",
            queue.queued_requests,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "kvlane_router_deferred_requests",
            "Prompts from Kafka that are left in the log until the queue has "
            "room", queue.deferred_requests,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "kvlane_router_queued_tokens", "Prompt tokens of queued requests that no cache had "
            "on arrival", queue.queued_tokens,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "kvlane_router_queued_bytes", "Prompt bytes of queued requests", queue.queued_bytes
        )
        slowness = GaugeMetricFamily(
            "kvlane_router_worker_slowdown_ratio", "Measured latency of a worker relative to its "
            "profile",
            labels=["worker"],
        )  # fmt: skip
        for worker, factor in sorted(queue.slowdown_by_worker.items()):
            slowness.add_metric([worker], factor)
        yield slowness
        yield from _loads(queue.worker_loads)
        yield GaugeMetricFamily(
            "kvlane_router_unconfirmed_assignments", "Decisions of this router "
            "that it has not read back from the ledger", queue.unconfirmed_assignments,
        )  # fmt: skip


def _loads(loads: Mapping[str, WorkerLoad]) -> Iterator[Metric]:
    runs, tokens, prefill = (
        GaugeMetricFamily(f"kvlane_router_{name}", told, labels=["worker"])
        for name, told in (
            ("active_requests", "Active requests of a worker, from the ledger"),
            ("active_tokens", "Their prompt tokens, and output tokens when they were assigned"),
            ("pending_prefill_tokens", "Those of them that are neither computed nor cached"),
        )
    )
    for worker, burden in sorted(loads.items()):
        runs.add_metric([worker], burden.runs)
        tokens.add_metric([worker], burden.tokens)
        prefill.add_metric([worker], burden.prefill_tokens)
    yield from (runs, tokens, prefill)
