"""What a router tells Prometheus of drift; see `app/audit/drift.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.audit.drift import Drift


class DriftMetrics(Collector):
    """Read off when a page is asked for. Figures come and go with runs: no runs, no figures."""

    def __init__(
        self, drift: Drift, model_of: Callable[[str], str], now_ms: Callable[[], int]
    ) -> None:
        """`model_of`: the model that a worker serves; `now_ms`: time of the broker."""
        self._drift = drift
        self._model_of = model_of
        self._now_ms = now_ms

    def collect(self) -> Iterator[Metric]:
        """Four families, with and without series."""
        whose = ["model", "worker"]
        runs = GaugeMetricFamily(
            "kvlane_drift_runs", "Runs of the last ten minutes that the others are about",
            labels=whose,
        )  # fmt: skip
        blocks = GaugeMetricFamily(
            "kvlane_drift_cached_blocks_p95", "Between the expected cached blocks of a prompt "
            "and those that the engine found, at most, in 95 of 100 runs", labels=whose,
        )  # fmt: skip
        ttft = GaugeMetricFamily(
            "kvlane_drift_ttft_seconds_p95", "Between the expected time to the first token, from "
            "dispatch on, and what the worker took, at most, in 95 of 100 runs", labels=whose,
        )  # fmt: skip
        alarm = GaugeMetricFamily(
            "kvlane_drift_alarm", "1 if kvlane_drift_cached_blocks_p95 is above 1 block: what "
            "routers know of this cache is not what it holds", labels=whose,
        )  # fmt: skip
        now_ms = self._now_ms()
        for worker in self._drift.workers(now_ms):
            labels, now = [self._model_of(worker), worker], self._drift.of([worker], now_ms)
            runs.add_metric(labels, now.runs)
            if now.blocks is not None:
                blocks.add_metric(labels, now.blocks)
                alarm.add_metric(labels, not now.holds)
            if now.ttft_ms is not None:
                ttft.add_metric(labels, now.ttft_ms / 1000)
        yield from (runs, blocks, ttft, alarm)
