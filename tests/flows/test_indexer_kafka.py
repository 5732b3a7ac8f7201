"""The indexer as `faststream run` starts it, on a real broker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from app.settings import Settings
from indexer.block_hashes import local_hashes
from indexer.block_keys import derive_secret, prompt_keys
from indexer.events import CLEARED, CacheEvent, EventKind, encode_events
from streams.brokers.broker_factory import Broker
from streams.clock import SystemClock
from streams.kafka import provision
from streams.kafka.kafka_log import KafkaLog
from streams.record_publisher import RecordPublisher
from streams.records import Blocks, EngineConfig, WorkerCard
from streams.topics import KV_EVENTS, REGISTRY
from tests.harness.topic_cleanup import delete_topics

SECRET = "not the known one"
SIZE = 16
TOKENS = list(range(1000 * SIZE))
WAIT_S = 40.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
async def settings(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Settings]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KVLANE_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("KVLANE_LANES", "2")
    monkeypatch.setenv("KVLANE_INDEXER_PORT", str(port))
    monkeypatch.setenv("KVLANE_HASH_SECRET", SECRET)
    settings = Settings()
    log = KafkaLog(settings.kafka_connection("test"), prefix=topic_prefix)
    await log.start()
    await provision.create_topics(log, lanes=2, replication=1, min_insync=1)
    await tell(log)
    yield settings
    await log.close()
    await delete_topics(kafka.bootstrap_servers, topic_prefix)


async def tell(log: KafkaLog) -> None:
    """A worker's card, and what its cache holds."""
    outbox, secret = RecordPublisher(log, SystemClock()), derive_secret(SECRET.encode())
    config = EngineConfig(model="demo", kv_cache_block_size=SIZE)
    card = WorkerCard(id="w1", slot=0, model="demo", config=config)
    epoch = (await outbox.publish(REGISTRY, "worker/w1", card)).offset
    keys = prompt_keys(local_hashes(TOKENS, SIZE), secret).tolist()
    columns = encode_events([CLEARED, CacheEvent(EventKind.STORED, keys=tuple(keys))])
    blocks = Blocks(
        worker="w1", epoch=epoch, first_event_id=0, hash_fingerprint=secret.fingerprint,
        **columns._asdict(),
    )  # fmt: skip
    await outbox.publish(KV_EVENTS, "w1", blocks)


@pytest.fixture
def process(settings: Settings, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "indexer.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "faststream", "run", "app.indexer:app"],
            stdout=output, stderr=subprocess.STDOUT, env=os.environ, start_new_session=True,
        )  # fmt: skip
    yield process
    process.kill()
    process.wait()


async def test_it_answers_from_the_log_and_stops_when_it_is_told_to(
    settings: Settings, process: subprocess.Popen[bytes]
) -> None:
    clock = SystemClock()
    deadline = clock.now() + WAIT_S
    url = f"http://127.0.0.1:{settings.indexer_port}"
    async with httpx.AsyncClient(base_url=url) as http:
        while True:
            assert process.poll() is None, "the indexer has ended"
            assert clock.now() < deadline, "the indexer is not ready"
            try:
                if (await http.get("/readyz")).json()["ready"]:
                    break
            except httpx.TransportError:
                pass
            await clock.sleep(0.1)
        told = (await http.post("/query", json={"model": "demo", "token_ids": TOKENS})).json()
        assert [(h["worker"], h["blocks"]) for h in told["holders"]] == [("w1", 1000)]
        dumped = (await http.get("/dump")).text.splitlines()
        assert len(dumped) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
