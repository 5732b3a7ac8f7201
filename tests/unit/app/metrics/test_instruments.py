"""Tests of counters and histograms of a process: their pages are those of prometheus_client."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as LibraryCounter
from prometheus_client import Histogram as LibraryHistogram

from kvlane.app.metrics.metric_set import Counter, Histogram

BUCKETS = (0.5, 1, 1_000_000)
VALUES = (0.1, 0.5, 0.7, 1.0, 999.0, 2e6)


def lines(registry: CollectorRegistry) -> list[str]:
    """The page, without the times at which series began, which nothing reads."""
    return [
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    ]


@pytest.mark.parametrize("labels", [(), ("model", "outcome")])
def test_page_is_the_one_of_the_library(labels: tuple[str, ...]) -> None:
    own, library = CollectorRegistry(), CollectorRegistry()
    values = tuple(f"a {label}" for label in labels)
    counters = (
        Counter("runs", "Runs", labels),
        LibraryCounter("runs", "Runs", labels, registry=library),
    )
    histograms = (
        Histogram("delay_seconds", "Delay", labels, BUCKETS),
        LibraryHistogram("delay_seconds", "Delay", labels, registry=library, buckets=BUCKETS),
    )
    own.register(counters[0])
    own.register(histograms[0])
    assert lines(own) == lines(library)
    for counter in counters:
        (counter.labels(*values) if labels else counter).inc(2)
    for histogram in histograms:
        for value in VALUES:
            (histogram.labels(*values) if labels else histogram).observe(value)
    assert lines(own) == lines(library)


def test_wrong_number_of_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="runs: 1 values for the labels model, outcome"):
        Counter("runs", "Runs", ("model", "outcome")).labels("m")
