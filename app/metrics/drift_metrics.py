"""Prometheus metrics of drift between expected and measured caches and latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvlane.app.audit.drift import DriftTracker
from kvlane.app.metrics.metric_set import gauges

_LABELS = "model worker"


class DriftCollector(Collector):
    """Collector that reads the drift of each worker; workers without recent runs have no series."""

    def __init__(
        self, drift: DriftTracker, model_of: Callable[[str], str], now_ms: Callable[[], int]
    ) -> None:
        """`model_of`: the model that a worker serves; `now_ms`: time of the broker."""
        self._drift = drift
        self._model_of = model_of
        self._now_ms = now_ms

    def collect(self) -> Iterator[Metric]:
        """Four families, with and without series."""
        now_ms = self._now_ms()
        drifts = [
            ([self._model_of(worker), worker], self._drift.summary_of([worker], now_ms))
            for worker in self._drift.workers_with_runs(now_ms)
        ]
        yield gauges(
            "kvlane_router_drift_runs",
            "Runs of the last ten minutes on which the other drift metrics rest", _LABELS,
            ((labels, now.runs) for labels, now in drifts),
        )  # fmt: skip
        yield gauges(
            "kvlane_router_drift_p95_cached_blocks",
            "Difference between the expected cached blocks of a prompt and those that the engine "
            "found, 95th percentile", _LABELS,
            ((labels, now.blocks) for labels, now in drifts if now.blocks is not None),
        )  # fmt: skip
        yield gauges(
            "kvlane_router_drift_p95_time_to_first_token_seconds",
            "Difference between the expected time to first token and the measured one, "
            "95th percentile", _LABELS,
            ((labels, now.ttft_ms / 1000) for labels, now in drifts if now.ttft_ms is not None),
        )  # fmt: skip
        yield gauges(
            "kvlane_router_drift_alert",
            "1 if kvlane_router_drift_p95_cached_blocks is above 1 block: the index "
            "differs from this cache", _LABELS,
            ((labels, not now.is_within_limit) for labels, now in drifts if now.blocks is not None),
        )  # fmt: skip
