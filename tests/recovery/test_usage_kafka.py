"""Test of the usage of tenants on a real Kafka, while parts are killed: the sums of the log equal a
recount from the engines' own counters, to the token.

240 requests and one round of kills; with KVLANE_TEST_LONG=1 10 000 requests and ten rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from kvlane.app.collector import Collector
from kvlane.app.commands.kafka_client import connect_client
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import EngineOutput, GenerateContext
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client, ReplyResult
from kvlane.streams.clock import SystemClock
from kvlane.streams.prompt import Prompt
from kvlane.streams.request import Request
from tests.harness.kafka_processes import KafkaParts, kvlane, provisioned, set_environment

IS_LONG = bool(os.environ.get("KVLANE_TEST_LONG"))
REQUESTS, ROUNDS = (10_000, 10) if IS_LONG else (240, 1)
UNDER_WAY = 64
"""Requests at a time."""
TENANTS = ("acme", "globex", "initech")
PROMPT, TOKENS, STEP_S = [97, 98, 99, 258], 20, 0.05
WAIT_S = 120.0
MAX_S = 3600 if IS_LONG else 300
PARTS = {"router": Router, "preprocessor": Preprocessor, "collector": Collector}

pytestmark = pytest.mark.slow


class CountingEngine(EchoEngine):
    """Counts, for each request, the tokens of its answer up to the last one that it computed."""

    def __init__(self, counted: dict[str, int], **options: Any) -> None:
        super().__init__(SystemClock(), STEP_S, model="demo", **options)
        self._counted = counted

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncIterator[EngineOutput]:
        self._counted[request.id] = context.taken_tokens
        async for output in super().generate(request, context):
            self._counted[request.id] += len(output.token_ids)
            yield output


class Parts:
    """Parts of a deployment in this process, by name; each can be killed."""

    def __init__(self, settings: Settings) -> None:
        self.counted: dict[str, int] = {}
        self._parts = KafkaParts(settings)

    async def start(self, *names: str) -> None:
        for name in names:
            if name.startswith("w"):
                engine = CountingEngine(self.counted, max_num_seqs=16)
                await self._parts.start_worker(name, engine)
            else:
                await self._parts.start(name, PARTS[name.rstrip("0123456789")])

    async def kill(self, *names: str) -> None:
        await self._parts.kill(*(names or self._parts.names))


async def usage(by: str) -> list[dict[str, Any]]:
    found = await kvlane("usage", "--by", by, "--json", "-", "--since", "-1h")
    rows: list[dict[str, Any]] = json.loads(found)["usage"]
    return rows


@pytest.fixture
async def parts(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Parts]:
    set_environment(
        monkeypatch, kafka, topic_prefix, lanes=2, hash_secret="tests", worker_timeout_s=2,
        heartbeat_interval_s=0.5, session_timeout_ms=6000, max_num_seqs=16,
    )  # fmt: skip
    settings = Settings(status_port=None)
    async with provisioned(settings):
        parts = Parts(settings)
        try:
            yield parts
        finally:
            await parts.kill()


async def load(client: Client, prompts: Sequence[Prompt], replies: list[ReplyResult]) -> None:
    """Publish prompts and add their replies, with a bound on those under way."""
    places = asyncio.Semaphore(UNDER_WAY)

    async def ask(prompt: Prompt) -> None:
        async with places:
            await client.publish(prompt)
            replies.append(await client.result(prompt.id, WAIT_S))

    await asyncio.gather(*map(ask, prompts))


async def kill_in_between(parts: Parts, replies: list[ReplyResult]) -> None:
    """In each round kill the eldest worker, router and collector, and start others."""
    clock = SystemClock()
    for number in range(1, ROUNDS + 1):
        while len(replies) < number * REQUESTS // (ROUNDS + 1):
            await clock.sleep(0.1)
        await parts.kill(f"w{number}")
        await parts.start(f"w{number + 2}")
        await parts.kill(f"collector{number}", f"router{number}")
        await parts.start(f"collector{number + 1}", f"router{number + 2}")


@pytest.mark.timeout(MAX_S)
async def test_usage_of_each_tenant_is_the_recount_of_engines(parts: Parts) -> None:
    clock = SystemClock()
    await parts.start("w1", "w2", "router1", "router2", "preprocessor1", "collector1")
    body = {"token_ids": PROMPT, "max_tokens": TOKENS}
    replies: list[ReplyResult] = []
    async with connect_client(Settings()) as client:
        prompts = [
            Prompt(
                id=client.new_request_id(), kind="tokens", body=body,
                tenant=TENANTS[number % len(TENANTS)],
            )
            for number in range(REQUESTS)
        ]  # fmt: skip
        unknown = Prompt(id="unknown", kind="tokens", body=body | {"model": "none"}, tenant="acme")
        await client.publish(unknown)
        async with asyncio.TaskGroup() as group:
            group.create_task(load(client, prompts, replies))
            group.create_task(kill_in_between(parts, replies))
    assert {len(reply.tokens) for reply in replies} == {TOKENS}
    async with asyncio.timeout(WAIT_S):
        while sum(row["requests"] for row in await usage("model")) <= REQUESTS:
            await clock.sleep(0.5)
    rows = {row["tenant"]: row for row in await usage("tenant")}
    recount, share = Counter[str](), Counter(each.tenant for each in prompts)
    for each in prompts:
        recount[each.tenant] += parts.counted[each.id]
    sums = {
        name: {tenant: row[name] for tenant, row in rows.items()}
        for name in ("output_tokens", "prompt_tokens", "completed")
    }
    assert sums == {
        "output_tokens": recount,
        "prompt_tokens": {tenant: count * len(PROMPT) for tenant, count in share.items()},
        "completed": share,
    }
    attempts = sum(row["attempts"] for row in rows.values())
    assert attempts > REQUESTS  # of killed workers
    sys.stdout.write(
        f"{REQUESTS} requests, {ROUNDS} rounds of kills, {attempts} attempts: {sums}\n"
    )
    codes = {row["code"]: row["requests"] for row in await usage("code")}
    assert codes == {"length": REQUESTS, "model_not_found": 1}
    assert await usage("tenant") == list(rows.values())
