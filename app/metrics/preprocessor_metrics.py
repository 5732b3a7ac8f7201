"""Metrics of a preprocessor: prompts by outcome, how long they had waited, and those that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import Metric

from kvlane.app.metrics.metric_set import TOKEN_BUCKETS, MetricSet, gauges
from kvlane.app.prompts.backlog import Backlog, BacklogSize
from kvlane.streams.records import Cancel, Refused
from kvlane.streams.request import Request

PROMPT_OUTCOMES = ("request", "cancel", "refused", "dead_letter", "moved_to_batch", "deleted")


class PreprocessorMetrics(MetricSet):
    def __init__(
        self,
        models: Callable[[], int],
        is_paused: Callable[[], bool],
        credit: Callable[[], float],
        backlogs: Callable[[], Sequence[Backlog]],
    ) -> None:
        """`models`: models that prompts can name. `is_paused`: whether prompts are left in the log.
        `credit`: requests that routers have room for. `backlogs`: of each topic."""
        super().__init__()
        self._backlogs = backlogs
        self._sizes: list[tuple[str, BacklogSize]] = []
        self.read(self._backlog_families)
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

    async def page(self) -> bytes:
        """All metrics; the backlogs are measured first, and left out while no broker answers."""
        backlogs = self._backlogs()
        sizes = await asyncio.gather(*(backlog.measure() for backlog in backlogs))
        self._sizes = [
            (backlog.topic, size)
            for backlog, size in zip(backlogs, sizes, strict=True)
            if size is not None
        ]
        return await super().page()

    def _backlog_families(self) -> Iterable[Metric]:
        sizes = self._sizes
        yield gauges(
            "kvlane_backlog_records",
            "Prompts in the log that are not requests yet, of the partitions of this preprocessor",
            "topic",
            (((topic,), size.records) for topic, size in sizes),
        )
        yield gauges(
            "kvlane_backlog_tokens",
            "Prompt tokens of those that were read and wait for room in routers",
            "topic",
            (((topic,), size.tokens) for topic, size in sizes),
        )
        yield gauges(
            "kvlane_backlog_oldest_age_seconds",
            "Time since the append of the oldest of these prompts, at most",
            "topic",
            (((topic,), size.oldest_s) for topic, size in sizes),
        )

    def observe_read(self, age_s: float) -> None:
        """A record of `prompts` was read; `age_s`: since its append."""
        self._age.observe(max(0.0, age_s))

    def count_outcome(self, record: Request | Cancel | Refused | None) -> None:
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

    def count_deleted(self) -> None:
        """A prompt was older than any prompt is kept."""
        self._prompts.labels("deleted").inc()

    def count_moved(self) -> None:
        """A batch prompt was moved from `prompts` to `batch`."""
        self._prompts.labels("moved_to_batch").inc()
