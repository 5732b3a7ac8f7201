"""Prometheus metrics of a router: its decisions, its queue, and its views.

Every series exists, at zero, before the first request; series by worker come and go with workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Literal, Protocol, get_args

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from kvlane.app.metrics.metric_set import TOKEN_BUCKETS, MetricSet, gauges
from kvlane.app.metrics.request_metrics import RequestMetrics
from kvlane.app.metrics.view_metrics import ViewCollector
from kvlane.app.routing.policy_names import RECORDED_POLICIES
from kvlane.app.routing.selection.decision import Placement
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.state.active_load import WorkerLoad
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.streams.records import EndCode
from kvlane.streams.views.follower import Follower


class QueueGauges(Protocol):
    """State of a queue that is read for each scrape: of a router's `WaitingRequests`."""

    @property
    def queued_requests(self) -> int:
        """Number of requests that wait here."""

    @property
    def deferred_requests(self) -> int:
        """Number of prompts that wait in the log."""

    @property
    def queued_tokens(self) -> int:
        """Tokens of their prompts that no cache has."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of their prompts."""


HandOverUse = Literal["used", "unused"]


class RouterGauges(Protocol):
    """State of a router that is read for each scrape: of its `RouterQueue`."""

    @property
    def slowdown_by_worker(self) -> Mapping[str, float]:
        """By worker, how many times slower than its curve it has been."""

    @property
    def worker_loads(self) -> Mapping[str, WorkerLoad]:
        """Active load by worker, from the ledger."""

    @property
    def unconfirmed_assignments(self) -> int:
        """Assignments that were not yet read back from the ledger."""


class RouterMetrics(MetricSet):
    def __init__(self) -> None:
        super().__init__()
        self._views: ViewCollector | None = None
        self._decisions = self.counter(
            "kvlane_router_decisions", "Requests assigned to a worker, by policy", "policy"
        )
        self._outcomes = self.counter(
            "kvlane_router_terminated_requests", "Requests that this router ended, by code", "code"
        )
        self._preempted = self.counter(
            "kvlane_router_preempted_runs", "Batch runs that gave way to interactive requests"
        )
        self._handovers = self.counter(
            "kvlane_router_handed_over_requests",
            "Requests whose prompt a prefill worker has computed, by use: used by a decode worker, "
            "or unused, so that the next attempt began",
            "use",
        )
        self._dry_runs = self.counter(
            "kvlane_router_dry_runs", "Dry runs: requests for a decision without its execution"
        )
        self._queue_s = self.histogram(
            "kvlane_router_queue_time_seconds",
            "Time from the arrival of a request in the router to its first assignment",
        )
        self._prompt_tokens = self.histogram(
            "kvlane_router_prompt_tokens", "Prompt tokens of a request", buckets=TOKEN_BUCKETS
        )
        self._hit_ratio = self.histogram(
            "kvlane_router_prefix_cache_hit_ratio",
            "Fraction of a prompt's blocks that its worker has cached",
            buckets=[tenth / 10 for tenth in range(11)],
        )
        self.requests = RequestMetrics(self)
        for use in get_args(HandOverUse):
            self._handovers.labels(use)
        for policy in RECORDED_POLICIES:
            self._decisions.labels(policy)
        for code in get_args(EndCode):
            self._outcomes.labels(code)

    def watch(
        self,
        scheduler: RouterGauges,
        queue: QueueGauges,
        batch_queue: QueueGauges,
        followers: Mapping[str, Follower],
        index: KvIndexView,
    ) -> None:
        """Add the metrics of these objects."""
        self._views = ViewCollector(index, followers)
        self.read(partial(_queue_families, scheduler, queue, batch_queue))
        self.registry.register(self._views)

    async def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        assert self._views is not None, "watches nothing"
        await self._views.refresh()
        return await super().page()

    def on_dry_run(self, prompt: PromptHashes, choice: Placement) -> None:
        self._dry_runs.inc()
        self._observe(prompt, choice)

    def on_dispatched(
        self, attempt: int, prompt: PromptHashes, choice: Placement, waited_s: float
    ) -> None:
        """Count a dispatched phase; prompt and queue time of the first one only."""
        self._decisions.labels(choice.policy).inc()
        if attempt == 0 and choice.phase != "decode":
            self._queue_s.observe(waited_s)
            self._observe(prompt, choice)

    def on_preempted(self) -> None:
        self._preempted.inc()

    def on_handover(self, use: HandOverUse) -> None:
        """A hand-over was used, or never will be."""
        self._handovers.labels(use).inc()

    def on_ended(self, code: EndCode) -> None:
        self._outcomes.labels(code).inc()

    def _observe(self, prompt: PromptHashes, choice: Placement) -> None:
        self._prompt_tokens.observe(prompt.tokens)
        rate = prompt.hit_rate(choice.overlap_blocks, choice.block_size)
        if rate is not None:
            self._hit_ratio.observe(rate)


def _queue_families(
    scheduler: RouterGauges, queue: QueueGauges, batch: QueueGauges
) -> Iterator[Metric]:
    """The queue, and the load of workers."""
    for name, meaning, value in (
        ("queued_requests", "Requests queued in this router", queue.queued_requests),
        ("queued_batch_requests",
         "Batch requests queued in this router or deferred in the log, besides interactive ones",
         batch.queued_requests + batch.deferred_requests),
        ("deferred_requests", "Prompts from Kafka that stay in the log until the queue has room",
         queue.deferred_requests),
        ("queued_tokens", "Prompt tokens of queued requests that no cache had on arrival",
         queue.queued_tokens),
        ("queued_bytes", "Prompt bytes of queued requests", queue.queued_bytes),
        ("unconfirmed_assignments", "Decisions of this router not yet read back from the ledger",
         scheduler.unconfirmed_assignments),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"kvlane_router_{name}", meaning, value)
    yield gauges(
        "kvlane_router_worker_slowdown_ratio",
        "Measured latency of a worker relative to its profile", "worker",
        (([worker], ratio) for worker, ratio in sorted(scheduler.slowdown_by_worker.items())),
    )  # fmt: skip
    loads = sorted(scheduler.worker_loads.items())
    for name, meaning, field in (
        ("active_requests", "Active requests of a worker, from the ledger", "runs"),
        ("active_tokens", "Their prompt tokens, and output tokens when they were assigned",
         "tokens"),
        ("pending_prefill_tokens", "Those of them that are neither computed nor cached",
         "prefill_tokens"),
    ):  # fmt: skip
        samples = [([worker], getattr(load, field)) for worker, load in loads]
        yield gauges(f"kvlane_router_{name}", meaning, "worker", samples)
