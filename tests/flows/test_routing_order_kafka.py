"""Test of an order about routing under load, on a real Kafka, with two routers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from kvlane.app.audit.timeline import explain_request
from kvlane.app.engine.echo import EchoEngine
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

ROUTERS = ("r1", "r2")
CLIENTS, STEP_S, WARM_UP_S = 4, 0.005, 1.0

pytestmark = pytest.mark.slow


@pytest.fixture
async def settings(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Settings]:
    set_environment(
        monkeypatch, kafka, topic_prefix, lanes=2, hash_secret="tests", policy="least_loaded"
    )
    settings = Settings(status_port=None)
    async with provisioned(settings):
        yield settings


@pytest.fixture
async def deployment(settings: Settings) -> AsyncIterator[None]:
    """A worker that takes two runs, two routers and a preprocessor."""
    parts = KafkaParts(settings)
    engine = EchoEngine(SystemClock(), STEP_S, model="demo", context_length=500)
    await parts.start_worker("w1", engine)
    for name in ROUTERS:
        await parts.start(name, Router)
    await parts.start("preprocessor", Preprocessor)
    yield
    await parts.stop()


async def decision_of(log: KafkaLog, request_id: str) -> tuple[str, str, int | None]:
    """Router, policy and order of a decision."""
    timeline = await explain_request(log, SystemClock(), request_id)
    record = next(step.decision.record for step in timeline.steps if step.decision is not None)
    return record.router, record.policy, record.routing_order


async def test_policy_changed_under_load_holds_at_both_routers_and_fails_no_request(
    settings: Settings, deployment: None
) -> None:
    ids, is_over, clock = list[str](), asyncio.Event(), SystemClock()
    log = open_log(settings, "test")
    await log.start()

    async def load(client: Client) -> None:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        while not is_over.is_set():
            prompt = Prompt(id=client.new_request_id(), body=body)
            await client.publish(prompt)
            assert (await client.result(prompt.id, WAIT_S)).finish_reason == "length"
            ids.append(prompt.id)

    async with Client(log, clock) as client:
        loads = [asyncio.create_task(load(client)) for _ in range(CLIENTS)]
        await clock.sleep(WARM_UP_S)
        shadow = json.loads(await kvlane("shadow", "policy=dynamo", "--json", "-"))
        changed = json.loads(await kvlane("routing", "set", "policy=random", "--json", "-"))
        first_new = len(ids) + CLIENTS
        await clock.sleep(WARM_UP_S)
        is_over.set()
        await asyncio.gather(*loads)
    (row,) = shadow["rows"]
    assert (row["model"], row["policy"], row["others"]) == ("demo", "least_loaded", 0)
    assert row["decisions"] > 0
    offset = changed["order"]["offset"]
    shown = {row["router"]: row["settings"]["policy"] for row in changed["routers"]}
    assert shown == dict.fromkeys(ROUTERS, "random")
    assert (await decision_of(log, ids[0]))[1:] == ("least_loaded", None)
    assert len(ids) > first_new + 2 * CLIENTS
    after = [await decision_of(log, each) for each in ids[first_new:]]
    assert {decision[1:] for decision in after} == {("random", offset)}
    assert {router for router, _, _ in after} == {*ROUTERS}
    assert f"policy random by the order registry/0:{offset}" in await kvlane("explain", ids[-1])
    reset = json.loads(await kvlane("routing", "reset", "--json", "-"))
    assert reset["order"] is None
    assert {row["routing_of"] for row in reset["routers"]} == {"own"}
    await log.close()
