"""OpenAI's and Anthropic's packages for Node, beside a worker that fails in each answer:
`make test-node` installs and runs them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvlane.testing import memory_deployment
from tests.flows.test_agents import SCRIPT, Breaking

MODULES = Path(__file__).resolve().parents[2] / "build" / "node"


@pytest.mark.parametrize("breaks", [[], [999, 5, 70] * 6])
async def test_clients_for_node_get_each_part_once(breaks: list[int]) -> None:
    async with memory_deployment(Breaking(breaks), Breaking(breaks)) as deployment:
        process = await asyncio.create_subprocess_exec(
            "node", str(MODULES / "clients.mjs"), deployment.url, "two",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await process.communicate()
    found = json.loads(out)
    assert not breaks
    call = ["weather", {"city": "Köln"}]
    reasons = {"chat": "tool_calls", "message": "tool_use", "response": "completed"}
    for form, reason in reasons.items():
        for answer in (found[form], found[f"streamed{form.title()}"]):
            assert answer["reasoning"] == "\nboth\n"
            calls = [[name, json.loads(arguments)] for name, arguments in answer["calls"]]
            assert (calls, answer["reason"]) == ([call, call], reason)
        numbers = [len(answer["calls"]) for answer in found["chosen"][form]]
        assert numbers == [2, 0, 2, 2], "one call would need a grammar"
    assert found["formed"] == [SCRIPT["json"]] * 4
    assert found["refusedChat"] == found["refusedMessage"] == "NotFoundError 404"
    assert found["refusedResponse"] == "BadRequestError 400"
