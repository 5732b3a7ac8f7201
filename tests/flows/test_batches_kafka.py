"""Tests of batches on a real broker, with OpenAI's own client, while gateway and collector are
killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.ports import Log
from tests.harness.batch_harness import chat_line, jsonl
from tests.harness.kafka_processes import app_process, provisioned, wait_answered

LINES = int(os.environ.get("KVLANE_TEST_BATCH_LINES", "300"))
KILLS = 4
"""Rounds of kills, as far as the batch lasts: the first comes before any worker can be done."""
WITHIN_S = 120.0

pytestmark = pytest.mark.slow


@pytest.fixture
async def settings(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Settings]:
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KVLANE_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("KVLANE_LANES", "4")
    monkeypatch.setenv("KVLANE_HASH_SECRET", "tests")  # the broker may be remote
    monkeypatch.setenv("KVLANE_HTTP_PORT", str(free_ports(1)[0]))
    settings = Settings()
    async with provisioned(settings):
        yield settings


@pytest.fixture
async def fleet(settings: Settings) -> AsyncIterator[None]:
    """A router, a worker and a preprocessor in this process, each on its own connection."""
    running: list[tuple[Log, ProcessContext, Router | Worker | Preprocessor]] = []
    for name in ("worker", "router", "preprocessor"):
        log = open_log(settings, name)
        ctx = ProcessContext(name)
        await log.start()
        part: Router | Worker | Preprocessor
        if name == "router":
            part = Router(log, settings, ctx)
        elif name == "preprocessor":
            part = Preprocessor(log, settings, ctx)
        else:
            engine = EchoEngine(ctx.clock, 0.1, model="demo", context_length=2000)
            part = Worker(log, settings, ctx, engine)
        await part.start()
        running.append((log, ctx, part))
    yield
    for log, ctx, part in reversed(running):
        assert ctx.error is None
        if not isinstance(part, Worker):
            await part.stop()
        await ctx.cancel_tasks()
        await log.close()


class Processes:
    """A gateway and a collector, which can be killed and started again."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0
        self.url = f"http://127.0.0.1:{settings.http_port}"

    def start(self, kind: str) -> None:
        self._starts += 1
        output = self._folder / f"{kind}-{self._starts}.log"
        self._running[kind] = self._stack.enter_context(app_process(kind, output))

    async def restart(self, kind: str) -> None:
        """Kill a process and start another one."""
        self._running[kind].kill()
        await asyncio.to_thread(self._running[kind].wait)
        self.start(kind)

    async def wait_gateway(self) -> None:
        async with httpx.AsyncClient(base_url=self.url) as http:
            await wait_answered(
                self._running["gateway"], http, "/v1/models", lambda answer: answer.json()["data"]
            )

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
async def processes(settings: Settings, fleet: None, tmp_path: Path) -> AsyncIterator[Processes]:
    processes = Processes(settings, tmp_path)
    processes.start("gateway")
    processes.start("collector")
    try:
        await processes.wait_gateway()
        yield processes
    finally:
        processes.close()


def lines_of(names: list[str]) -> bytes:
    lines = [chat_line(name) for name in names]
    for line in lines:
        line["body"]["max_tokens"] = 5
    return jsonl(*lines)


async def test_batch_survives_killed_gateways_and_collectors(processes: Processes) -> None:
    names = [f"line-{n}" for n in range(LINES)]
    clock = SystemClock()
    async with openai.AsyncOpenAI(
        base_url=f"{processes.url}/v1", api_key="none", max_retries=10, timeout=20
    ) as client:
        content = lines_of(names)
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert file.bytes == len(content)
        assert (await client.files.content(file.id)).content == content
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        counts = []
        kills = 0
        deadline = clock.now() + WITHIN_S
        while batch.status in ("validating", "in_progress", "finalizing"):
            assert clock.now() < deadline, batch
            await asyncio.sleep(0.5)
            if kills < KILLS:
                kills += 1
                await asyncio.gather(*map(processes.restart, ("gateway", "collector")))
                await processes.wait_gateway()
            batch = await client.batches.retrieve(batch.id)
            assert batch.request_counts
            counts.append(batch.request_counts.completed)
        assert batch.status == "completed", batch
        assert kills
        assert batch.request_counts
        assert batch.request_counts.to_dict() == {"total": LINES, "completed": LINES, "failed": 0}
        assert batch.output_file_id
        text = (await client.files.content(batch.output_file_id)).text
        done = [json.loads(line) for line in text.splitlines()]
        assert sorted(line["custom_id"] for line in done) == sorted(names)
        assert all(line["response"]["status_code"] == 200 for line in done)
        assert all(line["response"]["body"]["usage"]["completion_tokens"] == 5 for line in done)
        assert [b.id async for b in client.batches.list(limit=1)] == [batch.id]


async def test_command_line_runs_a_batch(processes: Processes, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(lines_of(["a", "b"]))

    async def kvlane(*arguments: str) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, app, ["batch", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    (batch_id,) = (await kvlane("submit", str(path), "--wait")).split()
    assert batch_id in await kvlane("list")
    assert json.loads(await kvlane("show", batch_id))["status"] == "completed"
    told = [json.loads(line) for line in (await kvlane("results", batch_id)).splitlines()]
    assert sorted(line["custom_id"] for line in told) == ["a", "b"]
    await kvlane("results", batch_id, "-o", str(tmp_path / "out.jsonl"))
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    result = await asyncio.to_thread(CliRunner().invoke, app, ["batch", "cancel", batch_id])
    assert result.exit_code == 1
    assert "409" in result.output
