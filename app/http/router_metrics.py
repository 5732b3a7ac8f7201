"""What a router tells Prometheus: its decisions, its queue, and how far it has read.

All of it is there, at zero, before the first request; series by worker come and go with them.
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

from app.http.folds import Folds
from app.http.metrics import SECONDS, TOKENS, LoopDelay
from app.routing.burdens import Burden
from app.routing.decisions import Chosen
from app.routing.index import Index
from app.routing.prompt import Prompt
from streams.follow import Follower
from streams.records import EndCode

POLICIES = (
    "dynamo", "predictive", "least_loaded", "round_robin", "random", "power_of_two",
    "session_hash", "direct",
)  # fmt: skip
_RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Queue(Protocol):
    """What waits in a router, and what it knows of its workers."""

    @property
    def waiting_requests(self) -> int:
        """How many requests."""

    @property
    def waiting_tokens(self) -> int:
        """How many tokens of their prompts no cache has."""

    @property
    def waiting_bytes(self) -> int:
        """How many bytes their prompts have."""

    @property
    def slowness(self) -> Mapping[str, float]:
        """By worker, how many times slower than its curve it has been."""

    @property
    def loads(self) -> Mapping[str, Burden]:
        """By worker, what the ledger says lies on it."""

    @property
    def undelivered_runs(self) -> int:
        """Decisions that were not read back."""


class RouterMetrics:
    """The metrics of one router, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._folds: Folds | None = None
        self._decisions = Counter(
            "kvlane_router_decisions", "Requests that were given to a worker, by policy",
            ["policy"], registry=registry,
        )  # fmt: skip
        self._outcomes = Counter(
            "kvlane_router_outcomes", "Requests that this router ended, by code",
            ["code"], registry=registry,
        )  # fmt: skip
        self._queries = Counter(
            "kvlane_router_queries", "Requests that only asked where they would go",
            registry=registry,
        )  # fmt: skip
        self._queue_s = Histogram(
            "kvlane_router_queue_seconds", "From a request's arrival in the router to its first "
            "worker", buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._prompt_tokens = Histogram(
            "kvlane_router_prompt_tokens", "Tokens of a prompt", buckets=TOKENS, registry=registry
        )
        self._hit_rate = Histogram(
            "kvlane_router_hit_rate", "Part of a prompt's blocks that its worker has cached",
            buckets=_RATES, registry=registry,
        )  # fmt: skip
        self.loop_delay = LoopDelay(registry)
        ProcessCollector(registry=registry)
        for policy in POLICIES:
            self._decisions.labels(policy)
        for code in get_args(EndCode):
            self._outcomes.labels(code)

    def watch(self, queue: Queue, followers: Mapping[str, Follower], index: Index) -> None:
        """Tell of these, too."""
        self._folds = Folds(index, followers)
        self.registry.register(_Queue(queue))
        self.registry.register(self._folds)

    async def page(self) -> bytes:
        """Everything, in Prometheus' text format."""
        assert self._folds is not None, "watches nothing"
        return await self._folds.page(self.registry)

    def planned(self, prompt: Prompt, choice: Chosen) -> None:
        """A request only asked where it would go."""
        self._queries.inc()
        self._observe(prompt, choice)

    def dispatched(self, attempt: int, prompt: Prompt, choice: Chosen, waited_s: float) -> None:
        """A request goes to a worker. Only the first attempt says what it was and how it waited."""
        self._decisions.labels(choice.policy).inc()
        if attempt == 0:
            self._queue_s.observe(waited_s)
            self._observe(prompt, choice)

    def ended(self, code: EndCode) -> None:
        """The router ended a request."""
        self._outcomes.labels(code).inc()

    def _observe(self, prompt: Prompt, choice: Chosen) -> None:
        self._prompt_tokens.observe(prompt.tokens)
        rate = prompt.hit_rate(choice.overlap_blocks, choice.block_size)
        if rate is not None:
            self._hit_rate.observe(rate)


class _Queue(Collector):
    """What waits, read off when a page is asked for."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        queue = self._queue
        yield GaugeMetricFamily(
            "kvlane_router_waiting_requests", "Requests that wait in this router",
            queue.waiting_requests,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "kvlane_router_waiting_tokens", "Tokens of their prompts that no cache had when they "
            "came", queue.waiting_tokens,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "kvlane_router_waiting_bytes", "Bytes of their prompts", queue.waiting_bytes
        )
        slowness = GaugeMetricFamily(
            "kvlane_router_slowness", "How many times slower than its curve a measured worker is",
            labels=["worker"],
        )  # fmt: skip
        for worker, factor in sorted(queue.slowness.items()):
            slowness.add_metric([worker], factor)
        yield slowness
        yield from _loads(queue.loads)
        yield GaugeMetricFamily(
            "kvlane_router_undelivered_runs", "Decisions of this router that it has not read back "
            "from the ledger", queue.undelivered_runs,
        )  # fmt: skip


def _loads(loads: Mapping[str, Burden]) -> Iterator[Metric]:
    runs, tokens, prefill = (
        GaugeMetricFamily(f"kvlane_router_{name}", told, labels=["worker"])
        for name, told in (
            ("open_runs", "Open runs by the ledger, as far as this router has read it"),
            ("open_tokens", "Tokens of their prompts, and of their answers when they began"),
            ("prefill_tokens", "Those of them that are neither computed nor expected in the cache"),
        )
    )
    for worker, burden in sorted(loads.items()):
        runs.add_metric([worker], burden.runs)
        tokens.add_metric([worker], burden.tokens)
        prefill.add_metric([worker], burden.prefill_tokens)
    yield from (runs, tokens, prefill)
