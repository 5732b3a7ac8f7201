"""The metrics of one process: its registry, and one call for each metric.

A metric is either counted as things happen (`counter`, `gauge`, `histogram`), or read from its
owner at each scrape (`read`, with a function that yields families).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlane.app.metrics.instruments import Counter, Histogram
from kvlane.streams.clock import Clock

LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 500)
TOKEN_BUCKETS = (1, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_DELAY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)

LOOP_DELAY_PERIOD_S = 0.2
"""Period of event loop delay samples. Each wakes an idle process, and a p99 over a minute is based
on 300 values."""

Samples = Iterable[tuple[Sequence[str], float]]
"""Values of the labels of a sample, and its value."""
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


class MetricSet:
    """The metrics of one process in a registry of its own, with its CPU, memory and event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.loop_delay = LoopDelayMonitor(self)
        self.http_connections = self.gauge("kvlane_http_connections", "Open HTTP connections")
        self.http_overflow = self.counter(
            "kvlane_http_over_limit_connections",
            "New HTTP connections while the table was full: each closed the longest idle one, or "
            "was answered for probes only",
        )
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, meaning: str, *labels: str) -> Counter:
        counter = Counter(name, meaning, labels)
        self.registry.register(counter)
        return counter

    def gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(name, meaning, labels, registry=self.registry)

    def histogram(
        self, name: str, meaning: str, *labels: str, buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        histogram = Histogram(name, meaning, labels, buckets)
        self.registry.register(histogram)
        return histogram

    def read(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Add the families that this function yields; it is called at each scrape."""
        self.registry.register(_FunctionCollector(families))

    async def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _FunctionCollector(Collector):
    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


def gauges(name: str, meaning: str, labels: str, samples: Samples) -> GaugeMetricFamily:
    """A family of gauges. `labels`: their names, separated by spaces."""
    return _filled(GaugeMetricFamily(name, meaning, labels=labels.split()), samples)


def counters(name: str, meaning: str, labels: str, samples: Samples) -> CounterMetricFamily:
    """A family of counters. `labels`: their names, separated by spaces."""
    return _filled(CounterMetricFamily(name, meaning, labels=labels.split()), samples)


def _filled(family: Family, samples: Samples) -> Family:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


class LoopDelayMonitor:
    """Delay of timers in the event loop, a sign of blocking work."""

    def __init__(self, metrics: MetricSet) -> None:
        self._delay_s = metrics.histogram(
            "kvlane_event_loop_delay_seconds",
            "Delay of timers in the event loop",
            buckets=_DELAY_BUCKETS_S,
        )

    async def watch(self, clock: Clock) -> None:
        while True:
            due = clock.now() + LOOP_DELAY_PERIOD_S
            await clock.sleep(LOOP_DELAY_PERIOD_S)
            self._delay_s.observe(max(0.0, clock.now() - due))
