"""Tests of the indexer as `faststream run` starts it, on a real broker."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from kvlane.app.settings import Settings
from kvlane.indexer.block_hashes import derive_secret, local_hashes, prompt_keys
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, encode_events
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Blocks, EngineConfig, WorkerCard
from kvlane.streams.topics import KV_EVENTS, REGISTRY
from tests.harness.kafka_processes import WAIT_S, app_process, provisioned, wait_answered

SECRET = "not the known one"
SIZE = 16
TOKENS = list(range(1000 * SIZE))

pytestmark = pytest.mark.slow


@pytest.fixture
async def settings(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Settings]:
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KVLANE_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("KVLANE_LANES", "2")
    monkeypatch.setenv("KVLANE_INDEXER_PORT", str(free_ports(1)[0]))
    monkeypatch.setenv("KVLANE_HASH_SECRET", SECRET)
    settings = Settings()
    async with provisioned(settings) as log:
        await write(log)
        yield settings


async def write(log: KafkaLog) -> None:
    """A worker's card, and what its cache holds."""
    publisher, secret = RecordPublisher(log, SystemClock()), derive_secret(SECRET.encode())
    config = EngineConfig(model="demo", kv_cache_block_size=SIZE)
    card = WorkerCard(id="w1", slot=0, model="demo", config=config)
    epoch = (await publisher.publish(REGISTRY, "worker/w1", card)).offset
    keys = prompt_keys(local_hashes(TOKENS, SIZE), secret).tolist()
    columns = encode_events([CLEARED, CacheEvent(EventKind.STORED, keys=tuple(keys))])
    blocks = Blocks(
        worker="w1", epoch=epoch, first_event_id=0, hash_fingerprint=secret.fingerprint,
        **columns._asdict(),
    )  # fmt: skip
    await publisher.publish(KV_EVENTS, "w1", blocks)


@pytest.fixture
def process(settings: Settings, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with app_process("indexer", tmp_path / "indexer.log") as process:
        yield process


async def test_indexer_answers_from_the_log_and_stops_on_sigterm(
    settings: Settings, process: subprocess.Popen[bytes]
) -> None:
    url = f"http://127.0.0.1:{settings.indexer_port}"
    async with httpx.AsyncClient(base_url=url) as http:
        await wait_answered(process, http, "/readyz", lambda answer: answer.json()["ready"])
        got = (await http.post("/query", json={"model": "demo", "token_ids": TOKENS})).json()
        assert [(h["worker"], h["blocks"]) for h in got["holders"]] == [("w1", 1000)]
        dumped = (await http.get("/dump")).text.splitlines()
        assert len(dumped) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
