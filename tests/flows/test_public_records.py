"""Tests of records on the public topics: they match the published schema."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from kvlane.app.preprocessor import Preprocessor
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.client import Client
from kvlane.streams.prompt import Prompt
from kvlane.streams.topics import PROMPTS, RESPONSES
from tests.harness.gateway_harness import GatewayHarness, memory_settings
from tests.harness.memory_world import MemoryWorld, run_scenario

DOCUMENT = Path(__file__).parents[2] / "deploy/asyncapi.yaml"


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    got: dict[str, Any] = yaml.safe_load(DOCUMENT.read_text("utf-8"))["components"]["schemas"]
    return got


async def traffic(world: MemoryWorld, output: dict[str, list[Any]]) -> None:
    """Prompts of every kind, a worker that dies, an end by a router; `output` gets all records."""
    harness = await GatewayHarness.open(world)
    ctx = ProcessContext("p1", world.clock, random.Random("p1"))
    await Preprocessor(await world.connect("p1"), memory_settings(), ctx).start()
    await harness.start_backend(worker_timeout_s=3)
    async with Client(await world.connect("client"), world.clock, random.Random(1)) as client:
        messages = [{"role": "user", "content": "x" * 200}]
        ids = [
            await client.publish(Prompt(id=client.new_request_id(), **fields))
            for fields in (
                {"body": {"model": "demo", "messages": messages, "stop": ["é"]}, "tenant": "acme"},
                {"kind": "completion", "body": {"prompt": "grüße"}, "deadline_s": 60},
                {"kind": "tokens", "body": {"token_ids": [1, 2, 3], "max_tokens": 3}},
                {"body": {"messages": []}},
            )
        ]
        await world.wait_until(lambda: len(world.all_records(RESPONSES)) > 3)
        await client.cancel(ids[0])
        sent = harness.chat("y" * 100, stream=True)
        await world.wait_until(lambda: len(sent.text) > 5)
        await harness.kill("w1")
        await harness.start_worker("w2")
        await sent.wait_done()
        for request_id in ids:
            await client.result(request_id)
    for topic in (PROMPTS, RESPONSES):
        output[topic] = [json.loads(r.value or b"") for r in world.all_records(topic)]


def test_every_record_of_a_flow_matches_the_published_schema(schemas: dict[str, Any]) -> None:
    kinds = set()
    output: dict[str, list[Any]] = {}
    run_scenario(lambda world: traffic(world, output))
    for topic, name in ((PROMPTS, "Prompt"), (RESPONSES, "responses:Message:Payload")):
        schema = Draft202012Validator(schemas[name])
        for record in output[topic]:
            schema.validate(record)
            kinds.add(record.get("t") or record.get("kind", "chat"))
    assert kinds == {"chat", "completion", "tokens", "cancel", "Chunk", "Fence", "End"}
