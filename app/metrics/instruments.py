"""Counters and histograms that are updated as things happen, read at each scrape.

Those of prometheus_client take a lock and check their labels at every call: the six updates of a
request take a router 12 us with them, 2 with these. No locks: all calls come from the thread of the
event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
"""Values of the labels of a series, in the order of their names."""


S = TypeVar("S")


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
        """Add an amount, at least 0, to a counter without labels."""
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
        """Count a value in a histogram without labels."""
        self._series[()].observe(value)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        bounds = [floatToGoString(bound) for bound in self._bounds]  # type: ignore[no-untyped-call]
        for values, series in self._series.items():
            counts = accumulate(series.counts)
            family.add_metric(values, list(zip(bounds, counts, strict=True)), series.total)
        return (family,)
