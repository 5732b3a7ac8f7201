"""OpenAI's and Anthropic's packages for Node on a real Kafka, beside a worker and a gateway that
are killed in the middle: `make test-node` installs and runs them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from kvlane.streams.brokers.broker_factory import Broker
from tests.harness.agent_deployment import CALLS, SCRIPT, WEATHER, agent_deployment
from tests.harness.kafka_processes import WAIT_S

MODULES = Path(__file__).resolve().parents[2] / "build" / "node"


async def test_clients_for_node_get_each_part_once(
    kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    async with agent_deployment(kafka, topic_prefix, tmp_path) as parts:
        process = await asyncio.create_subprocess_exec(
            "node", str(MODULES / "clients.mjs"), parts.key, parts.limited_key, parts.killed_url,
            parts.url, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(WAIT_S):
                assert await process.stdout.readline() == b"begun\n"
                await parts.kill()
                found = json.loads(await process.stdout.read())
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        assert await parts.has_continued()
    calls = [(call["name"], call["arguments"]) for call in map(json.loads, CALLS)]
    reasons = {"chat": "tool_calls", "message": "tool_use", "response": "completed"}
    unavailable = dict.fromkeys(reasons, "InternalServerError")
    unavailable["message"] = "ServiceUnavailableError"
    for form, reason in reasons.items():
        free, none, required, named = found["chosen"][form]
        for answer in (found["streamed"][form], free, required, named):
            assert (answer["reasoning"], answer["reason"]) == ("Both of them.", reason)
            assert [(name, json.loads(text)) for _, name, text in answer["calls"]] == calls
            assert len({call_id for call_id, *_ in answer["calls"]}) == len(calls)
        assert (none["content"], none["calls"]) == (SCRIPT["two"], [])
        formed = found["structured"][form]
        assert (formed["content"], formed["calls"]) == (WEATHER, [])
        assert found["refusals"][form] == [
            "AuthenticationError 401", "RateLimitError 429", "NotFoundError 404",
            "BadRequestError 400", f"{unavailable[form]} 503",
        ]  # fmt: skip
