"""Counters and histograms that are updated as things happen, read at each scrape.

Those of prometheus_client take a lock and check their labels at every call: the six updates of a
request take a router 12 us with them, 2 with these. No locks: all calls come from the thread of the
event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
"""Values of the labels of a series, in the order of their names."""


class CounterSeries:
    """A sum that never falls."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add an amount, at least 0."""
        self.value += amount


class HistogramSeries:
    """Numbers of values up to each bound; beyond the last one they count as infinite."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Counter(Collector):
    """A counter; with names of labels, one for each combination of their values."""

    def __init__(self, name: str, meaning: str, labels: Sequence[str]) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self._series: dict[Labels, CounterSeries] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> CounterSeries:
        """The series with these values of the labels; it is shown from now on."""
        found = self._series.get(values)
        if found is None:
            _check(self._name, self._labels, values)
            found = self._series[values] = CounterSeries()
        return found

    def inc(self, amount: float = 1.0) -> None:
        """Add an amount, at least 0, to a counter without labels."""
        self._series[()].value += amount

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._meaning, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.value)
        return (family,)


class Histogram(Collector):
    """A histogram; with names of labels, one for each combination of their values."""

    def __init__(
        self, name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self._bounds = (*buckets, math.inf)
        self._series: dict[Labels, HistogramSeries] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> HistogramSeries:
        """The series with these values of the labels; it is shown from now on."""
        found = self._series.get(values)
        if found is None:
            _check(self._name, self._labels, values)
            found = self._series[values] = HistogramSeries(self._bounds)
        return found

    def observe(self, value: float) -> None:
        """Count a value in a histogram without labels."""
        self._series[()].observe(value)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        bounds = [floatToGoString(bound) for bound in self._bounds]  # type: ignore[no-untyped-call]
        for values, series in self._series.items():
            counts = accumulate(series.counts)
            family.add_metric(values, list(zip(bounds, counts, strict=True)), series.total)
        return (family,)


def _check(name: str, labels: Sequence[str], values: Labels) -> None:
    if len(values) != len(labels):
        raise ValueError(f"{name}: {len(values)} values for the labels {', '.join(labels)}")
