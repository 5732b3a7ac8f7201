"""Tests of a worker whose answers have tool calls: its metrics, and parts that readers have."""

from __future__ import annotations

from kvlane.app.text.byte_level import ASSISTANT
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.request import AnswerParsing, Request
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import WorkerHarness

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXT = CALL + CALL + "<tool_call>no call"


def agent_request(text: str = TEXT) -> Request:
    return Request(
        id="a",
        token_ids=pack_tokens([*text.encode(), ASSISTANT]),
        parsing=AnswerParsing(tools="hermes"),
    )


def counted(page: bytes, name: str) -> float:
    start = f"kvlane_worker_{name}_total"
    (line,) = [line for line in page.decode().splitlines() if line.startswith(start)]
    assert 'parser="hermes"' in line
    return float(line.split()[-1])


@scenario_test
async def test_calls_are_counted_where_they_end(world: MemoryWorld) -> None:
    harness = WorkerHarness(world)
    await harness.start()
    taken = pack_tokens([*CALL.encode()])
    harness.assign(request=agent_request(), attempt=1, taken=taken, taken_data=1)
    assert (await harness.wait_finished()).code == "stop"
    page = await harness.worker._metrics.page()
    assert counted(page, "tool_calls") == 1
    assert counted(page, "malformed_tool_calls") == 1
    assert counted(page, "unfit_replays") == 0


@scenario_test
async def test_tokens_that_give_other_parts_than_readers_have_are_counted(
    world: MemoryWorld,
) -> None:
    harness = WorkerHarness(world)
    await harness.start()
    taken = pack_tokens([*CALL.encode()])
    harness.assign(request=agent_request(), attempt=1, taken=taken, taken_data_chars=77)
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("error", True)
    assert "versions of its workers differ" in finished.message
    page = await harness.worker._metrics.page()
    assert counted(page, "unfit_replays") == 1
