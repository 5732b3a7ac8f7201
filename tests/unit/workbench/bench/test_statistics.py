"""Tests of figures of repeated measurements."""

from __future__ import annotations

import math

import pytest

from workbench.bench.statistics import histogram_quantile, loop_delay_buckets, percentile, spread


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 2), (0.75, 3), (0.76, 4), (1, 4)])
def test_percentile_is_one_of_the_values(share: float, expected: int) -> None:
    assert percentile([4, 2, 3, 1], share) == expected


def test_statistics_of_no_samples_are_not_a_number() -> None:
    assert math.isnan(percentile([], 0.5))
    assert math.isnan(histogram_quantile([], 0.5))
    assert math.isnan(histogram_quantile([(1, 0), (math.inf, 0)], 0.5))


def test_spread_has_the_median_and_both_ends() -> None:
    assert spread([5, 1, 2]) == (2, 1, 5)
    assert str(spread([5, 1, 2])) == "2 (1-5)"


def test_quantile_of_a_histogram_is_the_bound_that_holds_it() -> None:
    buckets = [(0.01, 90), (0.02, 98), (0.05, 100), (math.inf, 100)]
    assert histogram_quantile(buckets, 0.9) == 0.01
    assert histogram_quantile(buckets, 0.99) == 0.05
    assert histogram_quantile([(0.01, 1), (math.inf, 2)], 0.99) == math.inf


def test_event_loops_delays_are_read_off_a_page_of_metrics() -> None:
    page = (
        "# TYPE kvlane_event_loop_delay_seconds histogram\n"
        'kvlane_event_loop_delay_seconds_bucket{le="0.001"} 3.0\n'
        'kvlane_event_loop_delay_seconds_bucket{le="+Inf"} 4.0\n'
        "kvlane_event_loop_delay_seconds_count 4.0\n"
    )
    assert loop_delay_buckets(page) == {0.001: 3.0, float("inf"): 4.0}
