"""Metrics of a collector: results by status, their delay, transactions, and replies."""

from __future__ import annotations

from collections.abc import Callable

from kvlane.app.metrics.metric_set import MetricSet
from kvlane.streams.records import RequestUsage

RESULT_STATUSES = ("completed", "failed", "cancelled")
TRANSACTION_OUTCOMES = ("committed", "failed", "fenced")
MAX_TENANTS = 100
"""Tenants with a label of their own, the first that have used anything; the others count as
`other`. A client of Kafka may name any tenant."""
UNDELIVERED_REASONS = ("no_topic", "too_large", "failed")


class CollectorMetrics(MetricSet):
    """`open_requests`: unfinished requests of its lanes that get a result."""

    def __init__(
        self,
        open_requests: Callable[[], int],
        lanes: Callable[[], int],
        batch_jobs: Callable[[], int],
    ) -> None:
        super().__init__()
        self._results = self.counter(
            "kvlane_collector_results", "Results that were written, by status", "status"
        )
        self._delay = self.histogram(
            "kvlane_collector_result_delay_seconds",
            "Time from the end of a reply to its result in the log",
        )
        self._transactions = self.counter(
            "kvlane_collector_transactions", "Transactions with results, by outcome", "outcome"
        )
        self._undelivered = self.counter(
            "kvlane_collector_undelivered_replies",
            "Replies that were left out, by reason",
            "reason",
        )
        self._unreadable = self.counter(
            "kvlane_collector_unreadable_records",
            "Records that ended a reply, as they cannot be decoded; must stay 0",
        )
        for name, meaning, value in (
            ("open_requests", "Requests that get a result and are not over", open_requests),
            ("lanes", "Lanes whose results are collected", lanes),
            ("batch_jobs", "Batch jobs that this collector runs now", batch_jobs),
        ):
            self.gauge(f"kvlane_collector_{name}", meaning).set_function(value)
        self._tenants: set[str] = set()
        self._usage_requests = self.counter(
            "kvlane_collector_usage_requests",
            "Requests whose usage was written, by tenant; other: beyond the first 100",
            "tenant",
        )
        self._usage_tokens = self.counter(
            "kvlane_collector_usage_tokens",
            "Tokens in the usage of requests, by tenant and kind; cached are among prompt",
            "tenant", "kind",
        )  # fmt: skip
        for status in RESULT_STATUSES:
            self._results.labels(status)
        for outcome in TRANSACTION_OUTCOMES:
            self._transactions.labels(outcome)
        for reason in UNDELIVERED_REASONS:
            self._undelivered.labels(reason)

    def observe_result(self, status: str, delay_ms: float) -> None:
        """A result is in the log, `delay_ms` after the end of its reply."""
        self._results.labels(status).inc()
        self._delay.observe(max(0.0, delay_ms / 1000))

    def count_transaction(self, outcome: str) -> None:
        """A transaction has ended, or its end is unknown (failed)."""
        self._transactions.labels(outcome).inc()

    def count_usage(self, usage: RequestUsage) -> None:
        """The usage of a request is in the log."""
        tenant = usage.tenant
        if tenant not in self._tenants:
            if len(self._tenants) < MAX_TENANTS:
                self._tenants.add(tenant)
            else:
                tenant = "other"
        self._usage_requests.labels(tenant).inc()
        for kind, tokens in (
            ("prompt", usage.prompt_tokens), ("cached", usage.cached_tokens),
            ("output", usage.output_tokens), ("recomputed", usage.recomputed_tokens),
        ):  # fmt: skip
            self._usage_tokens.labels(tenant, kind).inc(tokens)

    def count_unreadable(self) -> None:
        self._unreadable.inc()

    def count_reply(self, reason: str) -> None:
        self._undelivered.labels(reason).inc()
