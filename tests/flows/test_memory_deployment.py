"""Tests of `kvlane.testing`: a deployment in memory whose workers answer from a script."""

from __future__ import annotations

import aiohttp
import pytest

from kvlane import EngineConfig, EngineError, Prompt
from kvlane.testing import MemoryDeployment, ScriptedEngine, memory_deployment


async def asked(deployment: MemoryDeployment, text: str, **more: object) -> tuple[str, str | None]:
    """The text of an answer, and the reason for its end."""
    client = deployment.client
    body = {"messages": [{"role": "user", "content": text}]} | more
    request_id = await client.publish(Prompt(id=client.new_request_id(), body=body))
    reply = await client.result(request_id, timeout_s=20)
    return reply.text, reply.finish_reason or reply.code


async def test_answers_are_those_of_the_script_over_the_log_and_http() -> None:
    engine = ScriptedEngine({"ping": "pong", "größer?": "größer"}, model="tiny")
    async with memory_deployment(engine) as deployment:
        assert await asked(deployment, "ping") == ("pong", "stop")
        assert await asked(deployment, "größer?") == ("größer", "stop")
        assert await asked(deployment, "ping", max_tokens=2) == ("po", "length")
        assert (await asked(deployment, "other"))[1] == "error"
        client = deployment.client
        body = {"messages": [{"role": "user", "content": "other"}]}
        request_id = await client.publish(Prompt(id=client.new_request_id(), body=body))
        error = (await client.result(request_id, timeout_s=20)).error
        assert error == "error: the script has no answer to 'other'"
        body = {"model": "tiny", "messages": [{"role": "user", "content": "ping"}]}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{deployment.url}/v1/chat/completions", json=body) as response,
        ):
            assert (await response.json())["choices"][0]["message"]["content"] == "pong"


async def test_script_may_be_a_function_of_the_message() -> None:
    async with memory_deployment(ScriptedEngine(str.upper)) as deployment:
        assert await asked(deployment, "hello") == ("HELLO", "stop")


async def test_error_of_an_engine_ends_the_deployment() -> None:
    class Broken(ScriptedEngine):
        async def start(self, worker_id: str) -> EngineConfig:
            raise EngineError(f"{worker_id} has no model")

    with pytest.raises(EngineError, match="worker-1 has no model"):
        async with memory_deployment(Broken({})):
            pass
