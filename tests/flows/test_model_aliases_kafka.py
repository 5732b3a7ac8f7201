"""Test of aliases that change under load, on a real Kafka: over HTTP, and in prompts.

Clients name an alias of two models, and one of the models, which an alias of its name replaces."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import openai
import pytest

from kvlane.app.audit.timeline import explain_request
from kvlane.app.commands.model_commands import parse_alias
from kvlane.app.commands.worker_commands import append_order
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.gateway import Gateway
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.prompt import Prompt
from tests.harness.kafka_processes import WAIT_S, KafkaParts, kvlane, provisioned, set_environment

MODELS = ("llama-a", "llama-b")
SWITCHES, PAUSE_S, CLIENTS, STEP_S = 20, 0.1, 4, 0.005
SETTLE_S = 1.0

pytestmark = pytest.mark.slow


@pytest.fixture
async def settings(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Settings]:
    set_environment(monkeypatch, kafka, topic_prefix, lanes=2, hash_secret="tests", http_port=0)
    settings = Settings(status_port=None)
    async with provisioned(settings):
        yield settings


@pytest.fixture
async def http(settings: Settings) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a deployment with a worker for each model."""
    parts = KafkaParts(settings)
    for name in MODELS:
        engine = EchoEngine(SystemClock(), STEP_S, model=name, context_length=500)
        await parts.start_worker(name, engine)
    await parts.start("router", Router)
    await parts.start("preprocessor", Preprocessor)
    gateway = await parts.start("gateway", Gateway)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    ) as client:
        yield client
    await parts.stop()


async def ask(http: openai.AsyncOpenAI, name: str = "chat") -> str:
    """The model that answers."""
    raw = await http.chat.completions.with_raw_response.create(
        model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=2
    )
    assert raw.parse().model == name
    return raw.headers.get("x-kvlane-model", name)


async def ask_in_kafka(client: Client, name: str = "chat") -> str:
    """The id of an answered prompt."""
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    prompt = Prompt(id=client.new_request_id(), body=body)
    await client.publish(prompt)
    assert (await client.result(prompt.id, WAIT_S)).finish_reason == "length"
    return prompt.id


async def models_of(log: KafkaLog, request_id: str) -> tuple[str, str]:
    """Model and alias of a request in the log."""
    timeline = await explain_request(log, SystemClock(), request_id)
    fields = next(step.fields for step in timeline.steps if step.name == "Request")
    return fields["model"], fields.get("alias", "")


async def test_alias_switched_20_times_under_load_fails_no_request(
    settings: Settings, http: openai.AsyncOpenAI
) -> None:
    served, replaced = Counter[str](), Counter[str]()
    ids, is_over = list[str](), asyncio.Event()

    async def load(client: Client) -> None:
        while not is_over.is_set():
            served[await ask(http)] += 1
            replaced[await ask(http, "llama-a")] += 1
            ids.append(await ask_in_kafka(client))

    clock, log = SystemClock(), open_log(settings, "test")
    await log.start()
    async with Client(log, clock) as client:
        shown = await kvlane("models", "alias", "chat=llama-a:1,llama-b:1")
        assert "llama-a 50.0%, llama-b 50.0%" in shown
        await clock.sleep(SETTLE_S)
        loads = [asyncio.create_task(load(client)) for _ in range(CLIENTS)]
        for number in range(SWITCHES):
            alias = parse_alias(f"chat={MODELS[number % 2]}:1,{MODELS[1 - number % 2]}:0")
            await append_order(log, clock, "alias/chat", alias)
            own = parse_alias(f"llama-a={MODELS[number % 2]}")
            await append_order(log, clock, "alias/llama-a", own)
            await clock.sleep(PAUSE_S)
        is_over.set()
        await asyncio.gather(*loads)
        assert min(counts[model] for counts in (served, replaced) for model in MODELS) > 0
        assert {(await models_of(log, name))[1] for name in ids[-4:]} == {"chat"}
        await kvlane("models", "alias", "chat=llama-b")
        await clock.sleep(SETTLE_S)
        assert await ask(http) == "llama-b"
        assert await models_of(log, await ask_in_kafka(client)) == ("llama-b", "chat")
        assert await ask(http, "llama-a") == "llama-b"
        request_id = await ask_in_kafka(client, "llama-a")
        assert await models_of(log, request_id) == ("llama-b", "llama-a")
        await kvlane("models", "unalias", "llama-a")
        await clock.sleep(SETTLE_S)
        assert await ask(http, "llama-a") == "llama-a"
        request_id = await ask_in_kafka(client, "llama-a")
        assert await models_of(log, request_id) == ("llama-a", "")
    await log.close()
