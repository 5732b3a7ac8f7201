"""Tests of records with values that no process writes: one request gets an error, and collectors
go on."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from kvlane.streams.records import Chunk, LogProb, Result
from kvlane.streams.request import OutputOptions, ReplyAddress, Request, ResultOptions
from kvlane.streams.topics import REQUESTS, RESPONSES
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness


async def results_of(
    world: MemoryWorld, options: ResultOptions, request: dict[str, Any], chunk: dict[str, Any]
) -> dict[str, Result]:
    """The results of a request with such records, and of one after it."""
    results = ResultsHarness(world)
    await results.start("c1")
    odd = Request(id="odd", model="demo", token_ids=b"\1\0\0\0", result=options, **request)
    world.append(REQUESTS, 0, odd, key="odd")
    last: dict[str, Any] = {"text": "x", "token_ids": (1,), "finish_reason": "stop"} | chunk
    world.append(
        RESPONSES, 0, Chunk(id="odd", attempt=0, run="0", seq=0, index=0, **last), key="odd"
    )
    results.ask("good")
    results.answer("good", "x")
    found = {result.id: result for result in await results.wait_results(2)}
    await results.start("c2")  # and reads all of it again
    await world.sleep(10)
    assert [ctx.error for _, ctx, _ in results.running.values()] == [None, None]
    assert found["good"].status == "completed"
    return found


@pytest.mark.parametrize("deadline_s", [math.nan, math.inf, -math.inf, 1e308])
@partial(scenario_test, lanes=1)
async def test_impossible_deadline_leaves_the_result(world: MemoryWorld, deadline_s: float) -> None:
    found = await results_of(world, ResultOptions(), {"deadline_s": deadline_s}, {})
    assert found["odd"].status == "completed"


@pytest.mark.parametrize(
    ("options", "request_fields", "chunk"),
    [
        (ResultOptions(metadata=b"\xff"), {}, {}),
        (ResultOptions(metadata=b"[" * 100_000), {}, {}),
        (ResultOptions(metadata=b"[1]"), {}, {}),
        (
            ResultOptions(),
            {"output": OutputOptions(logprobs=1)},
            {"log_probs": ((LogProb(1, 0.0),), (LogProb(2, 0.0),))},
        ),
    ],
    ids=["bytes", "nesting", "list", "log-probs"],
)
@partial(scenario_test, lanes=1)
async def test_values_without_a_result_give_an_error(
    world: MemoryWorld,
    options: ResultOptions,
    request_fields: dict[str, Any],
    chunk: dict[str, Any],
) -> None:
    found = await results_of(world, options, request_fields, chunk)
    assert found["odd"].status == "failed"
    assert found["odd"].error is not None
    assert found["odd"].error.code == "internal"


@partial(scenario_test, lanes=1)
async def test_reply_to_a_negative_partition_is_left_out(world: MemoryWorld) -> None:
    world.broker.create_topic("replies", 3, 3_600_000)
    options = ResultOptions(reply=ReplyAddress(topic="replies", partition=-1))
    assert (await results_of(world, options, {}, {}))["odd"].status == "completed"
    assert world.all_records("replies") == []


@partial(scenario_test, lanes=2)
async def test_request_of_another_lane_is_not_awaited(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    await results.start()
    stray = Request(id="a", model="demo", token_ids=b"\1\0\0\0", result=ResultOptions())
    wrong = 1 - results.lane("a")
    world.append(REQUESTS, wrong, stray, key="a")
    committed = world.broker.group(REQUESTS, "collector").committed
    await world.wait_until(lambda: committed.get(wrong, 0) == 1)
    assert results.results() == []
