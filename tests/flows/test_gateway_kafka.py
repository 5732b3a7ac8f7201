"""Tests of the gateway as `faststream run` starts it, on a real broker, with OpenAI's own
client."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings
from kvlane.app.text.byte_level import render_chat
from kvlane.app.worker import Worker
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.broker_factory import Broker
from tests.harness.decoded import decode_bytes
from tests.harness.kafka_processes import WAIT_S, app_process, provisioned, wait_answered

LANES = 4
CONTEXT = 2000
STEP_S = 0.01

pytestmark = pytest.mark.slow


@pytest.fixture
async def settings(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Settings]:
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KVLANE_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("KVLANE_LANES", str(LANES))
    monkeypatch.setenv("KVLANE_HTTP_PORT", str(free_ports(1)[0]))
    settings = Settings()
    async with provisioned(settings):
        yield settings


@pytest.fixture
async def staff(settings: Settings) -> AsyncIterator[None]:
    """A router and a worker in this process, each on its own connection."""
    logs, contexts, parts = [], [], []
    for name in ("worker", "router"):
        log = open_log(settings, name)
        ctx = ProcessContext(name)
        await log.start()
        if name == "router":
            part: Router | Worker = Router(log, settings, ctx)
        else:
            engine = EchoEngine(ctx.clock, STEP_S, model="demo", context_length=CONTEXT)
            part = Worker(log, settings, ctx, engine)
        await part.start()
        logs.append(log)
        contexts.append(ctx)
        parts.append(part)
    yield
    for log, ctx, part in zip(logs, contexts, parts, strict=True):
        assert ctx.error is None
        if isinstance(part, Router):
            await part.stop()
        await ctx.cancel_tasks()
        await log.close()


@pytest.fixture
def gateway(settings: Settings, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with app_process("gateway", tmp_path / "gateway.log") as process:
        yield process


async def ready(settings: Settings, process: subprocess.Popen[bytes]) -> None:
    """Wait until a model is served."""
    async with httpx.AsyncClient(base_url=url_of(settings)) as http:
        await wait_answered(process, http, "/v1/models", lambda answer: answer.json()["data"])
        assert (await http.get("/readyz")).json()["ready"]


def url_of(settings: Settings) -> str:
    return f"http://127.0.0.1:{settings.http_port}"


async def chat(client: openai.AsyncOpenAI, text: str, max_tokens: int) -> str:
    stream = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        stream=True,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def answer(text: str, max_tokens: int) -> str:
    return decode_bytes(echo_answer(render_chat([("user", text)]), max_tokens))


async def test_streams_are_answered_over_kafka_and_a_stopping_gateway_ends_them(
    settings: Settings, staff: None, gateway: subprocess.Popen[bytes]
) -> None:
    await ready(settings, gateway)
    async with openai.AsyncOpenAI(
        base_url=f"{url_of(settings)}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    ) as client:
        texts = [f"stream {n}: grüße " for n in range(20)]
        got = await asyncio.gather(*(chat(client, text, 30) for text in texts))
        assert got == [answer(text, 30) for text in texts]
        plain = await client.completions.create(model="demo", prompt=[104, 105], max_tokens=5)
        assert plain.choices[0].text == "hihih"
        last = asyncio.create_task(chat(client, "good bye ", 150))
        await asyncio.sleep(0.5)
        gateway.send_signal(signal.SIGTERM)
        assert await last == answer("good bye ", 150)
    assert await asyncio.to_thread(gateway.wait, WAIT_S) == 0


async def test_gateway_that_cannot_listen_ends_with_an_error(
    settings: Settings, gateway: subprocess.Popen[bytes], staff: None, tmp_path: Path
) -> None:
    await ready(settings, gateway)
    second = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "faststream", "run", "kvlane.app.gateway:app"],
        capture_output=True, timeout=WAIT_S, check=False, env=os.environ,
    )  # fmt: skip
    assert second.returncode != 0
    assert b"in use" in second.stdout + second.stderr
