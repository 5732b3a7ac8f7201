"""The programs of `examples/`, run as a newcomer would: beside a deployment on a real Kafka."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from app.runtime.process import ProcessContext
from app.settings import Settings
from app.standalone import StandaloneProcess
from streams.brokers.broker_factory import Broker, java_tool
from tests.harness.kafka_processes import provisioned

ROOT = Path(__file__).resolve().parents[2]
LANES = 4
WAIT_S = 60.0
TOOLS = {
    "kafka-console-producer.sh": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-console-consumer.sh": "org.apache.kafka.tools.consumer.ConsoleConsumer",
}

pytestmark = pytest.mark.timeout(180)


class Deployment(NamedTuple):
    """A running deployment, as its clients see it."""

    servers: str
    prefix: str
    url: str


@pytest.fixture
async def deployment(kafka: Broker, topic_prefix: str, tmp_path: Path) -> AsyncIterator[Deployment]:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        worker_id="w", router_id="r", cache_dir=tmp_path, http_port=0, indexer_port=0,
        engine_speedup=20,
    )  # fmt: skip
    life = ProcessContext("standalone", rng=random.Random(1))
    async with provisioned(settings) as log:
        everything = StandaloneProcess(log, settings, life)
        await everything.start()
        yield Deployment(kafka.bootstrap_servers, topic_prefix, everything.gateway.url)
        await everything.stop()
        assert life.error is None
        await life.cancel_tasks()


async def start(*command: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def output_of(*command: str, **environment: str) -> str:
    process = await start(*command, **environment)
    out, errors = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def test_the_index_is_used_alone() -> None:
    lines = (await output_of(sys.executable, "examples/index_alone.py")).splitlines()
    assert sorted(lines) == [
        "worker-1 holds 96 of 100 tokens",
        "worker-1 holds 96 of 100 tokens",
        "worker-2 holds 16 of 100 tokens",
        "worker-2 holds 32 of 100 tokens",
    ]


@pytest.mark.kafka
async def test_the_openai_package_streams_a_chat(deployment: Deployment) -> None:
    shown = await output_of(sys.executable, "examples/openai_client.py", deployment.url)
    text, counted = shown.rstrip().rsplit("\n", 1)
    assert text
    assert counted.endswith(" tokens")


@pytest.mark.kafka
async def test_a_prompt_is_published_and_followed(deployment: Deployment) -> None:
    shown = await output_of(
        sys.executable, "examples/publish_and_follow.py", deployment.servers, deployment.prefix
    )
    text, counted = shown.rstrip().rsplit("\n", 1)
    assert text
    assert counted.endswith(" tokens")


@pytest.mark.kafka
async def test_console_tools_publish_and_read(deployment: Deployment, tmp_path: Path) -> None:
    for name, main in TOOLS.items():
        wrapper = tmp_path / name
        command = " ".join(f"'{part}'" for part in java_tool(main))
        wrapper.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        wrapper.chmod(0o755)
    shown = await output_of(
        "bash", "examples/console_clients.sh", deployment.servers, deployment.prefix,
        KAFKA_BIN=str(tmp_path),
    )  # fmt: skip
    assert '"t":"Chunk"' in shown
    assert '"finish_reason":"length"' in shown


@pytest.mark.kafka
async def test_an_engine_of_ones_own_serves_a_model(deployment: Deployment) -> None:
    worker = await start(
        sys.executable, "-m", "faststream", "run", "examples.custom_engine:app",
        KVLANE_BOOTSTRAP_SERVERS=deployment.servers, KVLANE_TOPIC_PREFIX=deployment.prefix,
        KVLANE_LANES=str(LANES), KVLANE_WORKER_ID="shouter", KVLANE_VALIDATE_ENGINE="true",
    )  # fmt: skip
    try:
        body = {"model": "shout", "prompt": "hello", "max_tokens": 5}
        async with httpx.AsyncClient(base_url=deployment.url, timeout=WAIT_S) as http:
            async with asyncio.timeout(WAIT_S):
                while (answer := await http.post("/v1/completions", json=body)).is_error:
                    assert worker.returncode is None
                    await asyncio.sleep(0.2)
        assert answer.json()["choices"][0]["text"] == "HELLO"
    finally:
        worker.terminate()
        await asyncio.wait_for(worker.communicate(), WAIT_S)
    assert worker.returncode == 0
