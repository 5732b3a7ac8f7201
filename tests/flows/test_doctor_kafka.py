"""Test of `kvlane doctor` on a real Kafka: a healthy deployment, then faults that are planted one
after the other."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.codecs import encode
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Entry
from kvlane.streams.records import (
    Blocks,
    Cordon,
    EngineConfig,
    Heartbeat,
    Lost,
    ModelCard,
    Tombstone,
    WorkerCard,
)
from kvlane.streams.topics import DEAD_LETTERS, KV_EVENTS, REGISTRY
from tests.harness.kafka_processes import provisioned, set_environment

WORKER = "w1"
WAIT_S = 120.0
PATIENCE = (
    ("diagnosis.fact_reader.READ_S", 40.0), ("diagnosis.fact_reader.MAX_REQUEST_TIMEOUT_MS", 4000),
    ("diagnosis.fleet_checks.SLOW_S", 20.0), ("waits.SILENCE_MS", 30_000),
)  # fmt: skip
"""Time-outs for a busy machine."""


async def doctor(*arguments: str) -> tuple[int, set[tuple[str, str]]]:
    """The exit code, and name and object of each warning and fault."""
    options = ("doctor", "--json", "-", "--since", "-10m", *arguments)
    result = await asyncio.to_thread(CliRunner().invoke, app, options)
    findings = json.loads(result.stdout)["findings"]
    return result.exit_code, {
        (each["name"], each["object"])
        for each in findings
        if each["severity"] in ("warning", "fault")
    }


class MadeWorker:
    """The records of a worker, without its process."""

    def __init__(self, log: KafkaLog) -> None:
        self.log = log
        self.epoch = -1

    async def register(self, worker: str = WORKER, block_size: int = 16) -> int:
        card: dict[str, Any] = {
            "id": worker, "slot": 0, "model": "demo",
            "config": EngineConfig(model="demo", kv_cache_block_size=block_size),
        }  # fmt: skip
        key = f"worker/{worker}"
        first = await self.log.append(REGISTRY, encode(WorkerCard(**card), key), 0)
        await self.log.append(REGISTRY, encode(WorkerCard(**card, epoch=first.offset), key), 0)
        return first.offset

    async def beat(self, epoch: int, worker: str = WORKER, **over: Any) -> None:
        beat = Heartbeat(worker=worker, epoch=epoch, slot_offset=0, **over)
        await self.log.append(KV_EVENTS, encode(beat, worker))

    async def keep_beating(self) -> None:
        while True:
            await self.beat(self.epoch)
            await asyncio.sleep(0.3)

    async def publish(self, first_event_id: int, fingerprint: str) -> None:
        blocks = Blocks(
            worker=WORKER, epoch=self.epoch, first_event_id=first_event_id,
            hash_fingerprint=fingerprint, kinds=b"\2", tiers=b"\0", positions=b"\0" * 4,
            counts=b"\0" * 4,
        )  # fmt: skip
        await self.log.append(KV_EVENTS, encode(blocks, WORKER))


class OddProbes(BaseHTTPRequestHandler):
    """A process that is alive and not ready."""

    def do_GET(self) -> None:
        is_alive = self.path == "/livez"
        body = b"" if self.path == "/metrics" else b'{"ready": false, "fleet_read": false}'
        self.send_response(200 if is_alive or self.path == "/metrics" else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def odd_process() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), OddProbes)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def change_topics(servers: str, prefix: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        for topic, setting in (
            ("ledger", {"retention.ms": "60000"}), ("results", {"min.insync.replicas": "2"}),
            ("prompts", {"segment.ms": "700000"}),
        ):  # fmt: skip
            resource = ConfigResource(ConfigResourceType.TOPIC, prefix + topic, setting)
            await admin.alter_configs([resource])
    finally:
        await admin.close()


async def test_planted_faults_are_found_and_none_before(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_environment(monkeypatch, kafka, topic_prefix, lanes=2, worker_timeout_s=40)
    for name, limit in PATIENCE:
        monkeypatch.setattr(f"kvlane.app.audit.{name}", limit)
    settings = Settings(router_id="r1", status_port=0)
    fingerprint = settings.block_key_secret().fingerprint
    ctx = ProcessContext("r1", rng=random.Random(1))
    async with provisioned(settings) as log:
        worker = MadeWorker(log)
        worker.epoch = await worker.register()
        await log.append(REGISTRY, encode(ModelCard(name="demo"), "model/demo"), 0)
        await worker.publish(0, fingerprint)
        router = Router(log, settings, ctx)
        await router.start()
        beating = asyncio.create_task(worker.keep_beating())
        until_s = asyncio.get_running_loop().time() + WAIT_S
        while (healthy := await doctor("--url", router.url)) != (0, set()):  # it may still start
            assert asyncio.get_running_loop().time() < until_s, healthy

        await log.append(REGISTRY, encode(Cordon(worker=WORKER), f"cordon/{WORKER}"), 0)
        await worker.publish(5, "another")
        await log.append(DEAD_LETTERS, Entry(b"a", b"?"), 0)
        await log.append(KV_EVENTS, Entry(b"a", b"?", (("t", b"Heartbeat"),)), 0)
        await worker.beat(await worker.register("w2", 64), "w2", state="unhealthy", reason="no GPU")
        lost = Lost(worker="w3", epoch=await worker.register("w3"), by="r1", silent_ms=4000)
        await log.append(KV_EVENTS, encode(lost, "w3"))
        await log.append(REGISTRY, encode(Tombstone(key="deployment"), "deployment"), 0)
        await change_topics(kafka.bootstrap_servers, topic_prefix)
        keys = tmp_path / "keys.json"
        keys.write_text("{")
        secret = tmp_path / "stream-secret"
        secret.write_text("a secret")
        secret.chmod(0o666)
        monkeypatch.setenv("KVLANE_API_KEYS_FILE", str(keys))
        monkeypatch.setenv("KVLANE_STREAM_SECRET_FILE", str(secret))
        with odd_process() as url:
            code, found = await doctor("--url", url, "--url", "http://127.0.0.1:1")
        assert code == 1
        assert found >= {
            ("worker-cordoned", WORKER), ("hash-secret-differs", WORKER),
            ("cache-events-lost", f"{WORKER}/0"), ("dead-letters", DEAD_LETTERS),
            ("malformed-records", "the log"), ("worker-unhealthy", "w2"), ("workers-differ", "w2"),
            ("worker-lost", "w3"), ("model-without-worker", "demo"),
            ("deployment-missing", REGISTRY), ("topic-loses-records", "ledger"),
            ("topic-unwritable", "results"), ("topic-setting", "prompts"),
            ("process-not-ready", url), ("process-unreachable", "http://127.0.0.1:1"),
            ("key-file", str(keys)), ("file-writable", str(secret)),
        }, sorted(found)  # fmt: skip
        assert not {name for name, _ in found} & {"worker-silent", "lane-without-router"}

        beating.cancel()
        await router.stop()
        await ctx.cancel_tasks()
        monkeypatch.delenv("KVLANE_API_KEYS_FILE")
        monkeypatch.delenv("KVLANE_STREAM_SECRET_FILE")
        monkeypatch.setenv("KVLANE_TOPIC_PREFIX", f"not.{topic_prefix}")
        code, found = await doctor()
        assert (code, {name for name, _ in found}) == (1, {"topic-missing"})
        monkeypatch.setenv("KVLANE_SECURITY_PROTOCOL", "SSL")
        assert await doctor() == (1, {("broker-connection", kafka.bootstrap_servers)})
