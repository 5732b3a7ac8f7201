"""Metrics of a preprocessor: the prompts that it read, by outcome, and how long they had waited."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from app.metrics.gateway_metrics import LATENCY_BUCKETS_S, TOKEN_BUCKETS, LoopDelayMonitor
from streams.records import Cancel, Refused
from streams.request import Request

PROMPT_OUTCOMES = ("request", "cancel", "refused", "dead_letter")


class PreprocessorMetrics:
    """The metrics of one preprocessor, in a registry of its own."""

    def __init__(
        self, models: Callable[[], int], is_paused: Callable[[], bool], credit: Callable[[], float]
    ) -> None:
        """`models`: how many models prompts can name. `is_paused`: whether prompts are left in the
        log. `credit`: how many requests routers have room for."""
        self.registry = registry = CollectorRegistry()
        self._prompts = Counter(
            "kvlane_preprocessor_prompts", "Records of prompts, by outcome",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self._refused = Counter(
            "kvlane_preprocessor_rejected_prompts", "Rejected prompts, by code",
            ["code"], registry=registry,
        )  # fmt: skip
        self._age = Histogram(
            "kvlane_preprocessor_prompt_age_seconds",
            "Time from the append of a prompt to its being "
            "read", buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._tokens = Histogram(
            "kvlane_preprocessor_prompt_tokens", "Prompt tokens of a request, by model", ["model"],
            buckets=TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
        Gauge(
            "kvlane_preprocessor_models", "Models that prompts can name", registry=registry
        ).set_function(models)
        Gauge(
            "kvlane_preprocessor_paused",
            "1 while prompts are left in the log because routers have no room",
            registry=registry,
        ).set_function(is_paused)
        Gauge(
            "kvlane_preprocessor_credit_requests",
            "Requests that routers have room for, of this preprocessor's share", registry=registry,
        ).set_function(credit)  # fmt: skip
        self.loop_delay = LoopDelayMonitor(registry)
        ProcessCollector(registry=registry)
        for outcome in PROMPT_OUTCOMES:
            self._prompts.labels(outcome)

    async def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def observe_read(self, age_s: float) -> None:
        """A record of `prompts` was read; `age_s`: since its append."""
        self._age.observe(max(0.0, age_s))

    def count_outcome(self, record: Request | Cancel | Refused | None) -> None:
        """A prompt was published as this record; None: it goes to the dead letters."""
        match record:
            case Request():
                self._prompts.labels("request").inc()
                self._tokens.labels(record.model).observe(record.prompt_tokens)
            case Cancel():
                self._prompts.labels("cancel").inc()
            case Refused():
                self._prompts.labels("refused").inc()
                self._refused.labels(record.code).inc()
            case None:
                self._prompts.labels("dead_letter").inc()
