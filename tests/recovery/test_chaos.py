"""Tests of the benches that kill real processes and cut their links: they find nothing wrong."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from tests.harness.topic_cleanup import delete_topics
from workbench.bench.chaos.backlog_drain import BacklogScale, bench_backlog
from workbench.bench.chaos.chaos_run import ChaosScale, bench_chaos, read_rounds
from workbench.bench.report import Report

pytestmark = pytest.mark.slow

KINDS = ("worker", "router", "gateway", "gateway-pause")


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
    form = ChaosScale(kills=2, kinds=KINDS, rate=3, tokens=40, workers=3)
    log = tmp_path / "rounds.jsonl"
    shares: list[float] = []
    report = await bench_chaos(settings, form, lambda _: None, shares.append, [], log_file=log)
    check(report, kills=2)
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


@pytest.mark.kafka
@pytest.mark.cluster
@pytest.mark.skipif(
    "KVLANE_TEST_LONG" not in os.environ,
    reason="four minutes of two cores, and other tests kill readers and cut links: "
    "KVLANE_TEST_LONG=1 runs it",
)
@pytest.mark.timeout(600)
async def test_backlog_has_one_result_each_beside_cut_links_and_restarts_of_its_readers(
    tmp_path: Path,
) -> None:
    """One link of a process of each kind is cut; then preprocessors and collectors restart."""
    scale = BacklogScale(
        prompts=100, window_s=10.0, cuts_links=True, together=True, kills=6, round_s=0.0,
        settle_s=3.0,
    )  # fmt: skip
    lines, shares = list[str](), list[float]()
    settings = Settings(topic_prefix=PREFIX, cache_dir=tmp_path)
    report = await bench_backlog(settings, scale, lines.append, shares.append)
    missed = [each.name for each in report.thresholds if not each.passed]
    assert missed == [], "\n".join(lines)
    assert report.rows[0]["faults"] == 13
    assert sum(shares) == pytest.approx(1.0)
