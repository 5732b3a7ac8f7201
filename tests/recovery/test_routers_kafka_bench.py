"""Tests of real routers on a real Kafka: they agree, and the bench that compares them works."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from tests.harness.topic_cleanup import delete_topics
from workbench.bench.routing.routers_kafka import RouterScale, bench_kafka_routers

pytestmark = pytest.mark.slow

PREFIX = "several."
FORM = RouterScale(workers=2, rate=16, phase_s=1.5, lanes=8, bursts=1)


@pytest.fixture
async def shared(kafka: Broker) -> AsyncIterator[Broker]:
    """The broker of all tests, with nothing of ours left on it."""
    yield kafka
    await delete_topics(kafka.bootstrap_servers, PREFIX)


async def test_three_routers_agree_with_the_log_and_with_each_other(
    shared: Broker, tmp_path: Path
) -> None:
    settings = Settings(
        bootstrap_servers=shared.bootstrap_servers, topic_prefix=PREFIX, cache_dir=tmp_path
    )
    shares: list[float] = []
    report = await bench_kafka_routers(settings, FORM, lambda _: None, shares.append)
    assert [each.name for each in report.thresholds if not each.passed] == []
    assert sum(shares) == pytest.approx(1.0)
    assert [(row["routers"], row["arrivals"]) for row in report.rows] == [
        (1, "one by one"), (1, "in bursts"), (3, "one by one"), (3, "in bursts"),
    ]  # fmt: skip
    assert all(row["views"] >= row["routers"] for row in report.rows)
    assert [row["met %"] for row in report.rows[:2]] == [0, 0], "a single one meets nobody"
