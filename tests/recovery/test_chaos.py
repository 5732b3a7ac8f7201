"""The runner that kills real processes under load: it works, and finds nothing wrong."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.bench.chaos.chaos_run import ChaosScale, bench_chaos, read_rounds
from app.commands.simulation.report import Report
from app.settings import Settings
from streams.brokers.broker_factory import Broker
from tests.harness.topic_cleanup import delete_topics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

KINDS = ("worker", "router", "gateway", "preprocessor", "collector", "gateway-pause")


PREFIX = "chaos."


@pytest.fixture
async def shared(kafka: Broker) -> AsyncIterator[Broker]:
    """The broker of all tests, with nothing of ours left on it."""
    yield kafka
    await delete_topics(kafka.bootstrap_servers, PREFIX)


def check(report: Report, kills: int) -> None:
    thresholds = {each.name: each.value for each in report.thresholds}
    bad = (
        "lost", "twice", "wrong", "requests on the log without an end",
        "answers without results", "answers with several results",
    )  # fmt: skip
    assert {name: thresholds[name] for name in bad} == dict.fromkeys(bad, 0)
    assert thresholds["kills and stops"] == kills
    assert thresholds["asked"] > 20


async def test_kills_lose_and_double_nothing_and_the_log_continues(
    shared: Broker, tmp_path: Path
) -> None:
    settings = Settings(
        bootstrap_servers=shared.bootstrap_servers, topic_prefix=PREFIX, cache_dir=tmp_path
    )
    form = ChaosScale(kills=4, kinds=KINDS, rate=3, tokens=40, workers=3)
    log = tmp_path / "rounds.jsonl"
    shares: list[float] = []
    report = await bench_chaos(settings, form, lambda _: None, shares.append, [], log_file=log)
    check(report, kills=4)
    assert sum(shares) == pytest.approx(1.0)

    again = await bench_chaos(
        settings, form, lambda _: None, shares.append, read_rounds(log), log_file=log
    )
    assert repr(again.rows) == repr(report.rows), "there was nothing left to kill"


@pytest.mark.kafka
@pytest.mark.cluster
@pytest.mark.skipif(
    "KVLANE_TEST_LONG" not in os.environ,
    reason="90 s, and test_broker_failover.py has these faults too: KVLANE_TEST_LONG=1 runs it",
)
async def test_brokers_that_die_and_hang_lose_and_double_nothing(tmp_path: Path) -> None:
    form = ChaosScale(
        kills=2, seed=1, kinds=("broker", "broker-pause"), rate=4, tokens=30, workers=3
    )
    settings = Settings(topic_prefix=PREFIX, cache_dir=tmp_path)
    check(await bench_chaos(settings, form, lambda _: None, lambda _: None, []), kills=2)
