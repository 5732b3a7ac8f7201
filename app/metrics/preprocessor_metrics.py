"""Metrics of a preprocessor: the prompts that it read, by outcome, and how long they had waited."""

from __future__ import annotations

from collections.abc import Callable

from app.metrics.metric_set import TOKEN_BUCKETS, MetricSet
from streams.records import Cancel, Refused
from streams.request import Request

PROMPT_OUTCOMES = ("request", "cancel", "refused", "dead_letter")


class PreprocessorMetrics(MetricSet):
    def __init__(
        self, models: Callable[[], int], is_paused: Callable[[], bool], credit: Callable[[], float]
    ) -> None:
        """`models`: how many models prompts can name. `is_paused`: whether prompts are left in the
        log. `credit`: how many requests routers have room for."""
        super().__init__()
        self._prompts = self.counter(
            "kvlane_preprocessor_prompts", "Records of prompts, by outcome", "outcome"
        )
        self._refused = self.counter(
            "kvlane_preprocessor_rejected_prompts", "Rejected prompts, by code", "code"
        )
        self._age = self.histogram(
            "kvlane_preprocessor_prompt_age_seconds",
            "Time from the append of a prompt to its being read",
        )
        self._tokens = self.histogram(
            "kvlane_preprocessor_prompt_tokens",
            "Prompt tokens of a request, by model",
            "model",
            buckets=TOKEN_BUCKETS,
        )
        self.gauge("kvlane_preprocessor_models", "Models that prompts can name").set_function(
            models
        )
        self.gauge(
            "kvlane_preprocessor_paused",
            "1 while prompts are left in the log because routers have no room",
        ).set_function(is_paused)
        self.gauge(
            "kvlane_preprocessor_credit_requests",
            "Requests that routers have room for, of this preprocessor's share",
        ).set_function(credit)
        for outcome in PROMPT_OUTCOMES:
            self._prompts.labels(outcome)

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
