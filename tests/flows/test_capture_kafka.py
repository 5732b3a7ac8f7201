"""Tests of captures on a real broker: decisions of routers, repeated by the command line."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.router import Router
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Finished
from kvlane.streams.topics import LEDGER, REQUESTS
from tests.harness.capture_harness import SHAPE, conversations
from tests.harness.kafka_processes import KafkaParts, kvlane, provisioned, set_environment

LANES = 4
COUNT = 60
WITHIN_S = 120.0
SPEEDUP = 20.0


@asynccontextmanager
async def staff(settings: Settings) -> AsyncIterator[None]:
    """Two routers and three workers in this process, each on its own connection."""
    parts = KafkaParts(settings)
    for name in ("w0", "w1", "w2"):
        engine = SimulatedEngine(
            SystemClock(), SHAPE, model="demo", context_length=4096, speedup=SPEEDUP
        )
        await parts.start_worker(name, engine)
    for name in ("r0", "r1"):
        await parts.start(name, Router)
    try:
        yield
    finally:
        await parts.stop()


async def answers(log: KafkaLog) -> set[str]:
    """Requests of which a run ended as it should, as soon as there are enough."""
    found: set[str] = set()
    reader = log.reader()
    reader.assign({Partition(LEDGER, lane): 0 for lane in range(LANES)})
    try:
        async with asyncio.timeout(WITHIN_S):
            while len(found) < COUNT:
                for records in (await reader.poll(1.0)).values():
                    got = map(decode, records)
                    found |= {r.id for r in got if isinstance(r, Finished) and r.code == "length"}
    finally:
        await reader.close()
    return found


@pytest.mark.parametrize("policy", ["predictive", "dynamo"])
async def test_every_decision_on_a_real_broker_is_recomputed_bit_for_bit(
    kafka: Broker, topic_prefix: str, policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_environment(monkeypatch, kafka, topic_prefix, lanes=LANES, policy=policy, drain_grace_s=0)
    settings = Settings()
    async with provisioned(settings) as log:
        async with staff(settings):
            publisher, clock = RecordPublisher(log, SystemClock()), SystemClock()
            for request in conversations(clock, random.Random(policy), COUNT):
                await publisher.publish(REQUESTS, request.id, request)
                await clock.sleep(0.02)
            assert len(await answers(log)) == COUNT
        file = tmp_path / "run.jsonl.zst"
        wrote = await kvlane("capture", "--from", "-10m", "--out", str(file))
        assert f"{COUNT} requests, " in wrote
        for source in (str(file), "-10m"):
            result = tmp_path / "result"
            await kvlane("verify-decisions", source, "--json", str(result))
            again = json.loads(result.read_bytes())
            assert (again["differ"], again["first"]) == (0, "")
            assert again["same"] == again["decisions"] >= COUNT
            assert again["policies"] == {policy: again["decisions"]}
        table = await kvlane("simulate", "--from-ledger", str(file), "--policy", "predictive")
        assert f"{COUNT} requests for demo, 3 workers of 400 blocks of 16 tokens" in table
