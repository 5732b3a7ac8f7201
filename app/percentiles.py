"""Percentiles of measured values."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; nan without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = -(-share * len(ordered) // 1)  # rounded up
    return ordered[max(0, int(place) - 1)]
