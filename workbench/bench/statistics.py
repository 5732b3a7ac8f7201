"""Statistics of repeated measurements: quantiles of histograms, median and range. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

_DELAY = re.compile(r'^kvlane_event_loop_delay_seconds_bucket{le="([^"]+)"} (\S+)$', re.MULTILINE)


class Spread(NamedTuple):
    """Median and range of several repetitions; as text without a range if there is none."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return _short(self.median)
        return f"{_short(self.median)} ({_short(self.low)}-{_short(self.high)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def spread(values: Sequence[float]) -> Spread:
    """The spread of one or more values."""
    return Spread(median(values), min(values), max(values))


def histogram_quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """An upper bound of a quantile, from cumulative (upper bound, count) pairs of a histogram.

    nan when it is empty, infinity when the quantile lies above the last finite bound.
    """
    total = buckets[-1][1] if buckets else 0
    if not total:
        return float("nan")
    return next(bound for bound, count in buckets if count >= share * total)


def loop_delay_buckets(page: str) -> dict[float, float]:
    """Cumulative counts of the event loop delay in a page of metrics, by upper bound in seconds."""
    return {float(bound): float(count) for bound, count in _DELAY.findall(page)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; nan without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = -(-share * len(ordered) // 1)  # rounded up
    return ordered[max(0, int(place) - 1)]
