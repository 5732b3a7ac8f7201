"""Prometheus metrics of drift between expected and measured caches and latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.audit.drift import DriftTracker


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
        whose = ["model", "worker"]
        runs = GaugeMetricFamily(
            "kvlane_router_drift_runs",
            "Runs of the last ten minutes on which the other drift metrics rest",
            labels=whose,
        )  # fmt: skip
        blocks = GaugeMetricFamily(
            "kvlane_router_drift_p95_cached_blocks",
            "Difference between the expected cached blocks "
            "of a prompt and those that the engine found, 95th percentile", labels=whose,
        )  # fmt: skip
        ttft = GaugeMetricFamily(
            "kvlane_router_drift_p95_time_to_first_token_seconds", "Difference between "
            "the expected time to first token and the measured one, 95th percentile", labels=whose,
        )  # fmt: skip
        alarm = GaugeMetricFamily(
            "kvlane_router_drift_alert",
            "1 if kvlane_router_drift_p95_cached_blocks is above 1 block: the index "
            "differs from this cache", labels=whose,
        )  # fmt: skip
        now_ms = self._now_ms()
        for worker in self._drift.workers_with_runs(now_ms):
            labels, now = [self._model_of(worker), worker], self._drift.summary_of([worker], now_ms)
            runs.add_metric(labels, now.runs)
            if now.blocks is not None:
                blocks.add_metric(labels, now.blocks)
                alarm.add_metric(labels, not now.is_within_limit)
            if now.ttft_ms is not None:
                ttft.add_metric(labels, now.ttft_ms / 1000)
        yield from (runs, blocks, ttft, alarm)
