"""The metrics of one process: its registry, and one call for each metric.

A metric is counted as things happen (`counter`, `gauge`, `histogram`), or read from its owner at
each scrape (`read`). Counted ones take no lock and check no labels at a call, unlike those of
prometheus_client: all calls come from the thread of the event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvlane.streams.clock import Clock

Labels = tuple[str, ...]
"""Values of the labels of a series, in the order of their names."""


S = TypeVar("S")


class CounterSeries:
    """A sum that never falls."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class HistogramSeries:
    """Numbers of values up to each bound; beyond the last one they count as infinite."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class _Family(Collector, Generic[S]):
    """Series of one name, one for each combination of values of its labels."""

    def __init__(
        self, name: str, meaning: str, labels: Sequence[str], new_series: Callable[[], S]
    ) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self._new_series = new_series
        self._series: dict[Labels, S] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> S:
        """The series with these values of the labels; it is shown from now on."""
        found = self._series.get(values)
        if found is None:
            if len(values) != len(self._labels):
                wanted = ", ".join(self._labels)
                raise ValueError(f"{self._name}: {len(values)} values for the labels {wanted}")
            found = self._series[values] = self._new_series()
        return found


class Counter(_Family[CounterSeries]):
    """A counter; with names of labels, one for each combination of their values."""

    def __init__(self, name: str, meaning: str, labels: Sequence[str]) -> None:
        super().__init__(name, meaning, labels, CounterSeries)

    def inc(self, amount: float = 1.0) -> None:
        self._series[()].value += amount

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._meaning, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.value)
        return (family,)


class Histogram(_Family[HistogramSeries]):
    """A histogram; with names of labels, one for each combination of their values."""

    def __init__(
        self, name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> None:
        self._bounds = (*buckets, math.inf)
        super().__init__(name, meaning, labels, partial(HistogramSeries, self._bounds))

    def observe(self, value: float) -> None:
        self._series[()].observe(value)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        bounds = [floatToGoString(bound) for bound in self._bounds]  # type: ignore[no-untyped-call]
        for values, series in self._series.items():
            counts = accumulate(series.counts)
            family.add_metric(values, list(zip(bounds, counts, strict=True)), series.total)
        return (family,)


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
