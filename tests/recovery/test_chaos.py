"""The runner that kills real processes under load: it works, and finds nothing wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.bench.chaos import Form, chaos, read
from app.settings import Settings
from streams.brokers.local import Broker
from tests.leftovers import delete_topics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

KINDS = ("worker", "router", "gateway", "preprocessor", "gateway-pause")


PREFIX = "chaos."


@pytest.fixture(autouse=True)
async def _no_topics_left(kafka: Broker) -> AsyncIterator[None]:
    yield
    await delete_topics(kafka.bootstrap_servers, PREFIX)


async def test_kills_lose_and_double_nothing_and_the_log_goes_on(
    kafka: Broker, tmp_path: Path
) -> None:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=PREFIX, cache_dir=tmp_path
    )
    form = Form(kills=4, kinds=KINDS, rate=3, tokens=40, workers=3)
    log = tmp_path / "rounds.jsonl"
    shares: list[float] = []
    report = await chaos(settings, form, lambda _: None, shares.append, [], log=log)
    bars = {bar.name: bar.value for bar in report.bars}
    assert {name: bars[name] for name in ("lost", "twice", "wrong")} == {
        "lost": 0, "twice": 0, "wrong": 0
    }  # fmt: skip
    assert bars["requests on the log without an end"] == 0
    assert bars["kills and stops"] == 4
    assert bars["asked"] > 20
    assert sum(shares) == pytest.approx(1.0)

    again = await chaos(settings, form, lambda _: None, shares.append, read(log), log=log)
    assert repr(again.rows) == repr(report.rows), "there was nothing left to kill"
