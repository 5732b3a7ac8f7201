"""Test of an evacuation by the commands, on a real Kafka: every answer has exactly its tokens."""

from __future__ import annotations

import asyncio

import pytest

from kvlane.app import settings as app_settings
from kvlane.app.commands import worker_commands
from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.prompt import Prompt
from tests.harness.kafka_processes import provisioned

LANES, RUNS, TOKENS, STEP_S = 4, 50, 80, 0.1
PROMPT = [97, 98, 99, 258]
WAIT_S = 120.0

pytestmark = pytest.mark.slow


async def test_50_answers_leave_their_worker_whole_and_in_order(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {"bootstrap_servers": kafka.bootstrap_servers, "topic_prefix": topic_prefix}
    settings = Settings(
        **servers, lanes=LANES, router_id="r", status_port=None, max_num_seqs=64,
        hash_secret="tests",  # the broker may be remote
    )  # fmt: skip
    monkeypatch.setattr(app_settings, "settings_for_writing", lambda: settings)
    running: list[tuple[KafkaLog, ProcessContext, Worker | Router | Preprocessor]] = []
    engines: dict[str, EchoEngine] = {}
    clock = SystemClock()

    async def start(name: str) -> None:
        own = KafkaLog(settings.kafka_connection(name), prefix=topic_prefix)
        ctx = ProcessContext(name)
        await own.start()
        part: Worker | Router | Preprocessor
        if name.startswith("w"):
            engines[name] = EchoEngine(ctx.clock, STEP_S, model="demo", max_num_seqs=64)
            part = Worker(own, settings, ctx, engines[name], worker_id=name)
        else:
            part = (Router if name == "router" else Preprocessor)(own, settings, ctx)
        await part.start()
        running.append((own, ctx, part))

    async with provisioned(settings) as log, Client(log, clock) as client:
        for name in ("w1", "router", "preprocessor"):
            await start(name)
        body = {"token_ids": PROMPT, "max_tokens": TOKENS}
        prompts = [
            Prompt(id=client.new_request_id(), kind="tokens", body=body) for _ in range(RUNS)
        ]
        await asyncio.gather(*(client.publish(prompt) for prompt in prompts))
        async with asyncio.timeout(WAIT_S):
            while engines["w1"].running_count < RUNS:
                await clock.sleep(0.05)
        await start("w2")
        await worker_commands._empty("w1", WAIT_S, evacuates=True)
        moved = engines["w2"].running_count
        replies = await asyncio.gather(*(client.result(p.id, WAIT_S) for p in prompts))
        assert {tuple(reply.tokens) for reply in replies} == {tuple(echo_answer(PROMPT, TOKENS))}
        assert engines["w1"].running_count == 0
        assert moved > 0
        assert await worker_commands._uncordon("w1")
        for own, ctx, part in reversed(running):
            assert ctx.error is None
            if not isinstance(part, Worker):
                await part.stop()
            await ctx.cancel_tasks()
            await own.close()
