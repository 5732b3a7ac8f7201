"""Tests of dry runs: requests that get their placement and are not run."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.streams.codecs import unpack_tokens
from tests.harness.cluster_harness import (
    BLOCK,
    PROMPT,
    ClusterHarness,
    session_hint,
    slow_engine,
    two_caches,
)
from tests.harness.memory_world import MemoryWorld, scenario_test


@pytest.mark.parametrize("value", ["", "yes", "w2", "a:b"])
@scenario_test
async def test_dry_run_returns_the_worker_and_the_tokens_and_books_nothing(
    world: MemoryWorld, value: str
) -> None:
    cluster = await two_caches(world)
    before = len(cluster.decisions())
    answer = await cluster.complete_with(annotations=[f"query_instance_id:{value}"]).wait_done()
    assert answer.status == 200
    got = answer.json["nvext"]
    assert (got["worker_id"], got["dp_rank"]) == ("w1", 0)
    (sent,) = (r for r in cluster.requests() if r.id == answer.headers["x-kvlane-id"])
    assert got["token_ids"] == list(unpack_tokens(sent.token_ids))
    assert got["token_ids"][:-1] == PROMPT
    assert answer.json["choices"][0]["text"] == ""
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK
    assert len(cluster.decisions()) == before
    assert len(cluster.assigned()) == before
    await world.wait_until(lambda: answer.headers["x-kvlane-id"] in cluster.ended_codes())


@scenario_test
async def test_dry_run_is_also_answered_as_a_stream(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1",))
    send = {"annotations": ["query_instance_id:x"]}
    answer = await cluster.chat("hello", stream=True, nvext=send).wait_done()
    got = [event["nvext"] for event in answer.events[:-1] if "nvext" in event]
    assert [each["worker_id"] for each in got] == ["w1"]
    assert answer.events[-1] == "[DONE]"


@scenario_test
async def test_annotation_without_a_value_is_no_dry_run(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world)
    for annotation in ("query_instance_id", "my_query_instance_id:x"):
        await cluster.wait_decision(annotations=[annotation])
    assert len(cluster.assigned()) == 2


@scenario_test
async def test_dry_run_sees_pins_and_opens_no_session(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2"), policy="round_robin")
    send: dict[str, Any] = {"annotations": ["query_instance_id:x"]}
    for _ in range(3):
        answer = await cluster.complete_with(
            **send, **session_hint(), backend_instance_id="w2"
        ).wait_done()
        assert answer.json["nvext"]["worker_id"] == "w2"
    turns = [
        (await cluster.complete_with(**send).wait_done()).json["nvext"]["worker_id"]
        for _ in range(3)
    ]
    assert len(set(turns)) == 1, "its turn goes on with what is dispatched only"
    began = await cluster.wait_decision(**session_hint())
    assert began.session is not None
    assert began.session.bound_worker == ""


@scenario_test
async def test_dry_run_waits_for_no_busy_worker(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, (), policy="predictive")
    await cluster.start_worker("w1", engine=slow_engine(world))
    await cluster.occupy("w1")
    answer = await cluster.complete_with(annotations=["query_instance_id:x"]).wait_done()
    assert answer.json["nvext"]["worker_id"] == "w1"


@scenario_test
async def test_dry_run_is_about_one_answer(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world)
    answer = await cluster.complete_with(
        body={"n": 2}, annotations=["query_instance_id:x"]
    ).wait_done()
    assert (answer.status, answer.error["param"]) == (400, "nvext.annotations")
