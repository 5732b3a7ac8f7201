"""Test of `kvlane rehearse` on a real broker: two models, the second with planted differences."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.request import Request
from kvlane.streams.topics import REQUESTS
from tests.harness.kafka_processes import WAIT_S, KafkaParts, kvlane, provisioned, set_environment
from tests.harness.rehearsal_harness import changed, engine_of, greedy_requests

COUNT = 40
PLANTED = {4: 3, 31: 0}
SPEEDUP = 20.0


@asynccontextmanager
async def staff(settings: Settings, differences: dict[bytes, int]) -> AsyncIterator[None]:
    """A router, a preprocessor, and a worker for each of the models a and b."""
    parts = KafkaParts(settings)
    for name, texts in (("a", {}), ("b", differences)):
        await parts.start_worker(name, engine_of(SystemClock(), name, changed(texts), SPEEDUP))
    await parts.start("router", Router)
    await parts.start("preprocessor", Preprocessor)
    try:
        yield
    finally:
        await parts.stop()


async def serve(settings: Settings, requests: Sequence[Request]) -> None:
    """Let model a answer all requests."""
    clock, log = SystemClock(), open_log(settings, "client")
    await log.start()
    publisher = RecordPublisher(log, clock)
    async with Client(log, clock) as client:
        for request in requests:
            await publisher.publish(REQUESTS, request.id, request)
        await asyncio.gather(*(client.result(request.id, WAIT_S) for request in requests))
    await log.close()


@pytest.mark.slow
async def test_rehearsal_on_a_real_broker_finds_the_planted_differences(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_environment(monkeypatch, kafka, topic_prefix, lanes=2, drain_grace_s=0)
    settings = Settings(status_port=None)
    requests = greedy_requests(SystemClock(), "a", COUNT)
    differences = {requests[n].token_ids: at for n, at in PLANTED.items()}
    result, page = tmp_path / "it.json", tmp_path / "it.html"
    async with provisioned(settings), staff(settings, differences):
        await serve(settings, requests)
        for _ in range(2):  # the second time from the log
            shown = await kvlane(
                "rehearse", "--from", "-10m", "--model", "a", "--to", "b", "--share", "1",
                "--json", f"{result}", "--html", f"{page}",
            )  # fmt: skip
            assert f"{COUNT - 2} answers are equal, 2 differ" in shown
            report = json.loads(result.read_bytes())
            found = {pair["id"]: pair["first_difference"] for pair in report["differences"]}
            assert found == {requests[n].id: at for n, at in PLANTED.items()}
            assert "<svg" in page.read_text()
            assert page.read_text().count("rehearsal-") == 2
