"""Tests of results: one record per finished request, while collectors die, on the log in memory."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from kvlane.app.preprocessor import Preprocessor
from kvlane.app.results import lane_collector
from kvlane.app.results.unanswered_requests import LedgerFindings
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.records import (
    Assigned,
    Chunk,
    End,
    Ended,
    LogProb,
    ModelCard,
    RequestOffset,
    ResultUsage,
)
from kvlane.streams.request import OutputOptions, Request, ResultOptions
from kvlane.streams.topics import LEDGER, REGISTRY, REQUESTS, RESPONSES, RESULTS
from tests.harness.gateway_harness import GatewayHarness, memory_settings
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness

# --- the whole path -------------------------------------------------------------------------------


async def whole_path(world: MemoryWorld) -> tuple[GatewayHarness, ResultsHarness]:
    """A gateway, a preprocessor, a router, a worker and a collector."""
    house = await GatewayHarness.with_backend(world)
    ctx = ProcessContext("p1", world.clock, random.Random("p1"))
    await Preprocessor(await world.connect("p1"), memory_settings(), ctx).start()
    results = ResultsHarness(world)
    await results.start()
    return house, results


def without_names(body: dict[str, Any] | None) -> dict[str, Any]:
    """A response object without what differs between two requests."""
    assert body is not None
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "né →"}]}),
        ("completion", "/v1/completions", {"prompt": "grüße", "max_tokens": 5}),
        ("completion", "/v1/completions", {"prompt": "stop here", "stop": [" he"], "echo": True}),
    ],
)
@scenario_test
async def test_result_has_the_body_that_http_answers(
    world: MemoryWorld, kind: str, path: str, body: dict[str, Any]
) -> None:
    house, results = await whole_path(world)
    asked = {"model": "demo"} | body
    over_http = (await house.send("POST", path, asked).wait_done()).json
    results.publish("a", kind=kind, body=asked, metadata={"x": [1]}, custom_id="line-1")
    result = await results.only()
    assert without_names(result.body) == without_names(over_http)
    assert result.body is not None
    assert result.body["id"] == "a"
    assert (result.status, result.status_code, result.error) == ("completed", 200, None)
    assert (result.kind, result.model, result.attempts) == (kind, "demo", 1)
    assert (result.metadata, result.custom_id) == ({"x": [1]}, "line-1")
    assert result.usage is not None
    assert result.usage.total_tokens == over_http["usage"]["total_tokens"]
    times = result.timings
    assert times.ttft_ms is not None
    assert 0 <= times.queued_ms <= times.ttft_ms <= times.total_ms


@scenario_test
async def test_prompt_in_tokens_gets_tokens(world: MemoryWorld) -> None:
    _, results = await whole_path(world)
    results.publish("a", kind="tokens", body={"token_ids": [97, 98, 258], "max_tokens": 2})
    body = (await results.only()).body
    assert body is not None
    assert body["choices"][0]["token_ids"] == [97, 98]
    assert body["choices"][0]["text"] == "ab"


@scenario_test
async def test_refused_prompt_has_an_error_as_its_result(world: MemoryWorld) -> None:
    _, results = await whole_path(world)
    results.publish("a", body={"messages": []}, batch_id="batch_1", custom_id="line-1")
    result = await results.only()
    assert (result.status, result.status_code, result.body) == ("failed", 400, None)
    assert result.error is not None
    assert result.error.code == "invalid"
    assert "messages" in result.error.message
    assert (result.batch_id, result.custom_id, result.attempts) == ("batch_1", "line-1", 0)


@scenario_test
async def test_refused_prompt_is_finished_like_any_other(world: MemoryWorld) -> None:
    """Its id is not run when it is published again: another id is."""
    _, results = await whole_path(world)
    good = {"messages": [{"role": "user", "content": "x"}]}
    results.publish("a", body=good | {"model": "unknown"})
    refused = await results.only()
    assert refused.status == "failed"
    results.publish("a", body=good)
    results.publish("b", body=good)
    found = await results.wait_results(2)
    assert {(r.id, r.status) for r in found} == {("a", "failed"), ("b", "completed")}
    of_a = [r for r in world.records(RESPONSES, results.lane("a")) if r.key == b"a"]
    assert len(of_a) == 1


@scenario_test
async def test_others_get_no_result(world: MemoryWorld) -> None:
    house, results = await whole_path(world)
    await house.chat().wait_done()
    results.publish("b", result=False, body={"messages": [{"role": "user", "content": "x"}]})
    results.publish("a", body={"messages": [{"role": "user", "content": "x"}]})
    await results.only()


@scenario_test
async def test_all_requests_get_a_result_where_that_is_set(world: MemoryWorld) -> None:
    house = await GatewayHarness.with_backend(world, results="all")
    results = ResultsHarness(world)
    await results.start()
    over_http = (await house.complete("ab", echo=True, n=2, max_tokens=2).wait_done()).json
    found = await results.wait_results(2)
    for result in found:
        assert result.body is not None
        assert result.kind == "completion"
        assert result.body["choices"][0]["text"] == over_http["choices"][0]["text"]


@scenario_test
async def test_log_probabilities_are_spelled_by_the_model(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    world.append(REGISTRY, 0, ModelCard(name="demo"), key="model/demo")
    await results.start()
    for name, model, alias in (("a", "demo", ""), ("b", "gone", ""), ("c", "demo", "chat")):
        request = Request(
            id=name, model=model, alias=alias, token_ids=b"\1\0\0\0",
            output=OutputOptions(logprobs=1), result=ResultOptions(kind="completion"),
        )  # fmt: skip
        world.append(REQUESTS, results.lane(name), request, key=name)
        chunk = Chunk(
            id=name, attempt=0, run="1", seq=0, index=0, token_ids=(97,), text="a",
            finish_reason="stop", log_probs=((LogProb(97, -0.5), LogProb(98, -1.5)),),
        )  # fmt: skip
        world.append(RESPONSES, results.lane(name), chunk, key=name)
    by_id = {result.id: result for result in await results.wait_results(3)}
    spelled = [by_id[name].body["choices"][0]["logprobs"] for name in "abc"]  # type: ignore[index]
    assert spelled[0]["tokens"] == spelled[2]["tokens"] == ["a"]
    assert by_id["c"].model == "chat"
    assert spelled[0]["top_logprobs"] == [{"a": -0.5, "b": -1.5}]
    assert spelled[1]["tokens"] == ["token_id:97"]


# --- replies --------------------------------------------------------------------------------------


async def collector(world: MemoryWorld, **settings: Any) -> ResultsHarness:
    results = ResultsHarness(world, **settings)
    await results.start()
    return results


@scenario_test
async def test_fenced_attempt_continues_in_the_same_result(world: MemoryWorld) -> None:
    results = await collector(world)
    results.ask("a")
    results.answer("a", "to", "ken", end=None)
    results.fence("a", 1)
    results.answer("a", "zombie", end="stop")
    results.answer("a", "s", attempt=1, index=2, end="length")
    result = await results.only()
    assert result.body is not None
    assert result.body["choices"][0]["text"] == "tokens"
    assert result.body["choices"][0]["finish_reason"] == "length"
    assert result.attempts == 2


@pytest.mark.parametrize(
    ("code", "status", "status_code"),
    [
        ("deadline", "failed", 408),
        ("cancelled", "cancelled", 499),
        ("attempts", "failed", 500),
        ("of a newer version", "failed", 500),
    ],
)
@scenario_test
async def test_end_by_a_router_is_an_error(
    world: MemoryWorld, code: str, status: str, status_code: int
) -> None:
    results = await collector(world)
    results.ask("a")
    results.answer("a", "some", end=None)
    world.append(RESPONSES, results.lane("a"), End(id="a", code=code, message="why"), key="a")
    result = await results.only()
    assert (result.status, result.status_code, result.body) == (status, status_code, None)
    assert result.error is not None
    assert (result.error.message, result.error.code) == ("why", code)
    assert result.usage == ResultUsage(prompt_tokens=1, completion_tokens=1, total_tokens=2)


@scenario_test
async def test_request_that_continues_has_no_result(world: MemoryWorld) -> None:
    results = await collector(world)
    results.ask("a")
    results.answer("a", "x", "y", end=None)
    await world.sleep(1000)
    assert results.results() == []


@scenario_test
async def test_id_that_is_published_again_gets_one_result(world: MemoryWorld) -> None:
    results = await collector(world)
    results.ask("a")
    results.ask("a")
    results.answer("a", "x")
    await results.wait_results()
    results.ask("a")
    await world.sleep(60)
    assert len(results.results()) == 1
    assert committed(world, results.lane("a")) == 3


@pytest.mark.parametrize("is_fenced", [False, True])
@scenario_test
async def test_unanswered_repetition_blocks_nothing(world: MemoryWorld, is_fenced: bool) -> None:
    """Its first one asked for no result, so no result says that it is over."""
    results = await collector(world)
    lane = results.lane("a")
    origin = RequestOffset(topic=REQUESTS, partition=lane, offset=0)
    world.append(
        LEDGER, lane,
        Assigned(
            id="a", attempt=0, phase="aggregated", worker="w1", epoch=1, origin=origin,
            responses_from=0, deadline_ms=0,
        ),
        Ended(id="a", code="stop"), key="a",
    )  # fmt: skip
    world.append_raw(REQUESTS, lane, *world.records(REQUESTS, lane))
    world.append(REQUESTS, lane, Request(id="a"), key="a")
    results.ask("a")
    if is_fenced:
        results.fence("a", 7)
    results.ask("late")
    await world.wait_until(lambda: committed(world, lane) >= 2, within_s=120)
    assert results.results() == []


@pytest.mark.parametrize("run_of", [0, 1])
@scenario_test
async def test_request_that_a_router_appended_again_gets_its_result(
    world: MemoryWorld, run_of: int
) -> None:
    results = await collector(world)
    lane = results.lane("a")
    results.ask("a")
    await world.sleep(200)
    results.ask("a", is_renewed=True)
    await world.wait_until(lambda: committed(world, lane) == 1, within_s=60)
    origin = RequestOffset(topic=REQUESTS, partition=lane, offset=run_of)
    run = Assigned(
        id="a", attempt=0, phase="aggregated", worker="w1", epoch=1, origin=origin,
        responses_from=0, deadline_ms=0,
    )  # fmt: skip
    world.append(LEDGER, lane, run, key="a")
    await world.sleep(200)
    results.answer("a", "x")
    await results.only()
    await world.wait_until(lambda: committed(world, lane) == 2, within_s=60)


@pytest.mark.parametrize("is_late", [False, True])
@partial(scenario_test, lanes=1)
async def test_collector_goes_on_from_a_renewal_unless_its_attempt_had_begun(
    world: MemoryWorld, is_late: bool
) -> None:
    """A late one is of a router that was stopped before its append, and has lost the lane."""
    results = await collector(world)
    results.ask("a")
    results.answer("a", "x", "y", end=None)
    results.fence("a", 1)
    await world.sleep(100)
    if is_late:
        results.answer("a", "z", attempt=1, index=2, end=None)
        await world.sleep(60)
    shown = Chunk(id="a", attempt=1, run="", seq=0, index=0, token_ids=(0, 1), text="xy", chars=2)
    renewed = results.ask("a", is_renewed=True, shown=shown)
    results.fence("a", 1, origin=renewed)
    await world.sleep(5)
    assert committed(world, 0) == (0 if is_late else renewed)
    await results.kill()
    await results.start("c2")
    await world.sleep(5)
    if not is_late:
        results.answer("a", "z", attempt=1, index=2, end=None)
    results.answer("a", ".", attempt=1, index=3, seq=1)
    result = await results.only()
    assert result.body is not None
    assert result.body["choices"][0]["text"] == "xyz."
    assert result.attempts == 2
    await world.wait_until(lambda: committed(world, 0) == renewed + 1, within_s=60)


@scenario_test
async def test_request_unread_by_its_router_is_awaited(world: MemoryWorld) -> None:
    results = await collector(world)
    results.ask("a")
    await world.sleep(200)
    results.answer("a", "x")
    await results.only()


@pytest.mark.parametrize("late_s", [2.0, 20.0])
@scenario_test
async def test_reply_waits_for_its_request_to_be_read(world: MemoryWorld, late_s: float) -> None:
    results = ResultsHarness(world)
    process = await results.start()
    claim = process._lanes[results.lane("a")].claim
    process._requests.pause(claim)
    results.ask("a")
    results.answer("a", "x")
    await world.sleep(late_s)
    process._requests.resume(claim)
    await results.only()


@scenario_test
async def test_lane_with_unread_requests_blocks_no_other(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    process = await results.start()
    names = [f"r{number}" for number in range(100)]
    stuck = names[0]
    others = [name for name in names if results.lane(name) != results.lane(stuck)][:10]
    claim = process._lanes[results.lane(stuck)].claim
    process._requests.pause(claim)
    results.ask(stuck)
    results.answer(stuck, "x")
    for count, name in enumerate(others, 1):
        results.ask(name)
        results.answer(name, "y")
        results.answer(stuck, "z", seq=count)  # of a request that is over
        await world.sleep(1.5)
        assert {result.id for result in results.results()} == set(others[:count])
    process._requests.resume(claim)
    await results.wait_results(len(others) + 1)


# --- exactly once ---------------------------------------------------------------------------------


def committed(world: MemoryWorld, lane: int) -> int:
    return world.broker.group(REQUESTS, "collector").committed.get(lane, 0)


@scenario_test
async def test_killed_collector_is_followed_by_one_that_reads_the_reply_again(
    world: MemoryWorld,
) -> None:
    results = await collector(world)
    results.ask("a")
    results.answer("a", "on", end=None)
    await world.sleep(5)
    await results.kill()
    await results.start("c2")
    await world.sleep(30)
    results.answer("a", "ce", seq=1, index=1)
    result = await results.only()
    assert result.body is not None
    assert result.body["choices"][0]["text"] == "once"


@scenario_test
async def test_result_above_the_committed_position_is_not_written_again(world: MemoryWorld) -> None:
    results = await collector(world)
    names = ids_of_lane(results, 3)
    for name in names:
        results.ask(name)
    results.answer(names[1], "x")
    results.answer(names[2], "y")
    await results.wait_results(2)
    assert committed(world, 0) == 0
    await results.kill()
    await results.start("c2")
    await world.sleep(30)
    results.answer(names[0], "z")
    found = await results.wait_results(3)
    assert sorted(result.id for result in found) == sorted(names)
    await world.wait_until(lambda: committed(world, 0) == 3)


def ids_of_lane(results: ResultsHarness, count: int, lane: int = 0) -> list[str]:
    names = (f"r{number}" for number in range(1000))
    found = [name for name in names if results.lane(name) == lane]
    return found[:count]


@pytest.mark.parametrize("fate", [AppendFate.LOST, AppendFate.UNREPORTED, AppendFate.LATE])
@scenario_test
async def test_transaction_of_unknown_outcome_is_looked_up(
    world: MemoryWorld, fate: AppendFate
) -> None:
    results = await collector(world)
    world.faults.late = 20.0
    world.faults.next_fates(RESULTS, fate)
    results.ask("a")
    results.answer("a", "x")
    await results.only()
    await world.sleep(60)
    await results.only()
    await world.wait_until(lambda: committed(world, results.lane("a")) == 1)


@scenario_test
async def test_two_owners_of_a_lane_write_one_result(world: MemoryWorld) -> None:
    results = await collector(world)
    results.ask("a")
    await world.sleep(5)
    first, _, _ = results.running["c1"]
    first.suspend()
    world.faults.slow["heartbeat"] = 20.0  # it learns late that its lanes have moved
    await results.start("c2")
    results.answer("a", "x")
    await results.wait_results()
    first.resume()
    await world.sleep(120)
    assert len(results.results()) == 1


@scenario_test
async def test_lanes_move_to_a_second_collector(world: MemoryWorld) -> None:
    results = await collector(world)
    names = [f"r{number}" for number in range(20)]
    for name in names:
        results.ask(name)
        results.answer(name, "on", end=None)
    await world.sleep(1)
    await results.start("c2")
    for name in names:
        results.answer(name, "ce", seq=1, index=1)
    found = await results.wait_results(20)
    texts = {(r.body or {})["choices"][0]["text"] for r in found}
    assert texts == {"once"}
    assert {r.id for r in found} == set(names)


@scenario_test
async def test_stopped_collector_leaves_its_position(world: MemoryWorld) -> None:
    results = await collector(world)
    results.ask("a")
    results.answer("a", "x")
    await results.only()
    await results.stop()
    assert committed(world, results.lane("a")) == 1


# --- bounds ---------------------------------------------------------------------------------------


@scenario_test
async def test_result_too_large_for_a_record_is_an_error(world: MemoryWorld) -> None:
    results = await collector(world)
    results.ask("a", echo="x" * 9_000_000)
    results.answer("a", "x")
    result = await results.only()
    assert (result.status, result.status_code) == ("failed", 500)
    assert result.error is not None
    assert result.error.code == "too_large"


@scenario_test
async def test_searches_of_a_long_ledger_take_a_tenth_of_the_time(world: MemoryWorld) -> None:
    results = await collector(world)
    searches = 0

    async def search(*_: object) -> LedgerFindings:
        nonlocal searches
        searches += 1
        await world.sleep(4.0)
        return LedgerFindings([], [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_collector, "search_ledger", search)
        results.ask("a")
        await world.sleep(2000)
    assert 30 <= searches <= 50
