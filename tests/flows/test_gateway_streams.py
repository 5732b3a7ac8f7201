"""Tests of streams of the gateway: failures, cancels, stops, health, in virtual time."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from itertools import product
from pathlib import Path

import pytest

from kvlane.app.http.openai.gateway_deps import DEADLINE_MARGIN_S
from kvlane.app.http.openai.response_writer import KEEP_ALIVE_S
from kvlane.streams.errors import AccessDenied
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.records import Fence
from kvlane.streams.topics import REQUESTS, RESPONSES
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker

ROOT = Path(__file__).resolve().parents[2]
HTTP_PAGE = ROOT / "docs" / "http.md"

# --- failures under way ---------------------------------------------------------------------------


@scenario_test
async def test_failure_after_the_first_token_is_an_event_and_the_last_one(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat(stream=True)
    (request,) = await harness.published()
    Worker(world, request.id).write("he")
    await world.wait_until(lambda: answer.text == "he")
    harness.end_request(request.id, "attempts", message="failed on 3 workers")
    await answer.wait_done()
    assert answer.status == 200
    error, done = answer.events[-2:]
    assert error["error"]["message"] == "failed on 3 workers"
    assert error["error"]["code"] == "attempts"
    assert done == "[DONE]"
    await world.sleep(5)
    assert harness.cancels() == []


@scenario_test
async def test_outage_delays_the_start_and_does_not_end_it(world: MemoryWorld) -> None:
    world.faults.unanswered = {"offsets"}
    opening = world.spawn(GatewayHarness.open(world))
    await world.sleep(30.0)
    assert not opening.done()
    world.faults.unanswered = set()
    await opening


@scenario_test
async def test_keep_alives_open_and_fill_a_silent_stream(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat(stream=True)
    (request,) = await harness.published()
    await world.sleep(KEEP_ALIVE_S - 1)
    assert answer.status == 0
    await world.sleep(2 * KEEP_ALIVE_S)
    assert answer.status == 200
    assert answer.content == b": keep-alive\n" * 2
    harness.end_request(request.id, "deadline")
    await answer.wait_done()
    assert [answer.events[0]["error"]["code"], answer.events[1]] == ["deadline", "[DONE]"]


@scenario_test
async def test_stream_without_an_end_gets_an_error_event(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world, deadline_s=40)
    answer = harness.chat(stream=True)
    (request,) = await harness.published()
    Worker(world, request.id).write("he")
    await answer.wait_done()
    assert world.clock.now() == pytest.approx(40 + DEADLINE_MARGIN_S, abs=1)
    assert answer.events[-2]["error"]["code"] == "deadline"
    assert await harness.cancelled() == [request.id]


@scenario_test
async def test_zombie_text_is_not_sent_twice(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat(stream=True)
    (request,) = await harness.published()
    lost = Worker(world, request.id)
    lost.write("he")
    lost.append(Fence(id=request.id, attempt=1))
    lost.write("zombie")
    Worker(world, request.id, attempt=1, index=2).write("llo", "stop")
    lost.write("zombie")
    await answer.wait_done()
    assert answer.text == "hello"
    page = (await harness.send("GET", "/metrics").wait_done()).content.decode()
    assert "\nkvlane_gateway_stream_gaps_total 0.0\n" in page
    assert "\nkvlane_gateway_skipped_chunks_total 1.0\n" in page


@scenario_test
async def test_slow_client_gets_its_whole_answer_without_delay_for_others(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_card(world)
    slow, quick = harness.chat("one", stream=True), harness.chat("two", stream=True)
    slow.reading.clear()
    writers = [Worker(world, request.id) for request in await harness.published(2)]
    for _ in range(1000):
        for writer in writers:
            writer.write("x")
        await world.sleep(0.001)
    for writer in writers:
        writer.write("y", "stop")
    await quick.wait_done()
    assert not slow.complete
    slow.reading.set()
    await slow.wait_done()
    assert slow.text == quick.text == "x" * 1000 + "y"
    assert len(slow.events) < len(quick.events)


@scenario_test
async def test_client_that_reads_nothing_is_disconnected(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world, deadline_s=40)
    answer = harness.chat(stream=True)
    answer.reading.clear()
    (request,) = await harness.published()
    Worker(world, request.id).write("hello")
    await world.sleep(40 + DEADLINE_MARGIN_S + KEEP_ALIVE_S + 1)
    assert answer.task.done()
    assert harness.gateway.parts.streams.open_streams == 0
    assert await harness.cancelled() == [request.id]


@scenario_test
async def test_death_of_a_worker_is_invisible_to_its_client(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    await harness.start_backend(worker_timeout_s=3)
    text = "".join(chr(33 + n % 90) for n in range(200))
    answers = [harness.chat(text, stream=True) for _ in range(4)]
    await world.wait_until(lambda: all(len(answer.text) > 20 for answer in answers))
    await harness.kill("w1")
    await harness.start_worker("w2")
    for answer in answers:
        await answer.wait_done()
        assert answer.text == text
        assert answer.events[-1] == "[DONE]"
    page = (await harness.send("GET", "/metrics").wait_done()).content.decode()
    assert "\nkvlane_gateway_stream_gaps_total 0.0\n" in page


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@scenario_test
async def test_client_that_leaves_cancels_its_request(
    world: MemoryWorld, stream: bool, begun: bool
) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat(stream=stream)
    (request,) = await harness.published()
    if begun:
        Worker(world, request.id).write("he")
        await world.sleep(1)
    answer.disconnect()
    assert await harness.cancelled() == [request.id]
    assert answer.task.done()
    assert harness.gateway.parts.streams.open_streams == 0


@scenario_test
async def test_cancelled_request_stops_at_its_worker(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    worker = await harness.start_backend()
    answer = harness.chat("hello", stream=True, max_tokens=400)
    await world.wait_until(lambda: len(answer.text) > 3)
    answer.disconnect()
    await harness.cancelled()
    assert worker._runs is not None
    runs = worker._runs
    await world.wait_until(lambda: not runs.progress())
    last = world.records(RESPONSES, key=harness.requests()[0].id)[-1]
    assert b'"cancelled"' in (last.value or b"")


@scenario_test
async def test_client_that_leaves_after_the_end_cancels_nothing(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat(stream=True).wait_done()
    answer.disconnect()
    await world.sleep(5)
    assert harness.cancels() == []


@pytest.mark.parametrize("stream", [False, True])
@scenario_test
async def test_detached_request_continues(world: MemoryWorld, stream: bool) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = harness.chat("hello", {"X-Kvlane-Detach": "true"}, stream=stream)
    (request,) = await harness.published()
    await world.sleep(0.05)
    answer.disconnect()
    await world.sleep(5)
    assert harness.cancels() == []
    again = await harness.send("GET", f"/v1/streams/{request.id}").wait_done()
    assert again.text == "hello"


@scenario_test
async def test_only_the_unfinished_of_several_answers_are_cancelled(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat(n=3, stream=True)
    first, second, third = await harness.published(3)
    Worker(world, second.id).write("hello", "stop")
    await world.wait_until(lambda: answer.text == "hello")
    answer.disconnect()
    assert sorted(await harness.cancelled(2)) == sorted([first.id, third.id])


@scenario_test
async def test_client_that_leaves_while_its_request_is_published_cancels_it(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_card(world)
    world.faults.slow["append"] = 2.0
    answer = harness.chat()
    await world.sleep(1.0)
    answer.disconnect()
    await world.wait_until(answer.task.done)
    (request,) = await harness.published()
    assert await harness.cancelled() == [request.id]


@scenario_test
async def test_cancel_outlasts_a_short_outage(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat(stream=True)
    (request,) = await harness.published()
    world.faults.next_fates(REQUESTS, *[AppendFate.LOST] * 8)
    answer.disconnect()
    assert await harness.cancelled() == [request.id]


# --- stopping -------------------------------------------------------------------------------------


@scenario_test
async def test_stopping_gateway_rejects_new_requests_and_finishes_its_streams(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = harness.chat("hello", stream=True)
    await world.wait_until(lambda: answer.text == "he")
    stopping = world.spawn(harness.gateway.stop())
    await world.sleep(0)
    refused = await harness.chat().wait_done()
    assert (refused.status, refused.error["code"]) == (503, "stopping")
    assert (await harness.send("GET", "/readyz").wait_done()).status == 503
    await stopping
    await answer.wait_done()
    assert answer.text == "hello"
    assert answer.events[-1] == "[DONE]"


@scenario_test
async def test_stream_that_outlasts_the_grace_continues_at_another_gateway(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.open(world, drain_grace_s=1)
    other = await GatewayHarness.open(world, "g2")
    await harness.start_backend()
    text = "x" * 200
    answer = harness.chat(text, stream=True)
    await world.wait_until(lambda: len(answer.text) > 3)
    await harness.gateway.stop()
    await answer.wait_done()
    error, done = answer.events[-2:]
    assert (error["error"]["code"], done) == ("stopping", "[DONE]")
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?from={answer.positions[-1]}"
    assert url in error["error"]["message"]
    rest = await other.send("GET", url).wait_done()
    got = "".join(e["choices"][0]["delta"].get("content", "") for e in answer.events[:-2])
    assert got + rest.text == text
    assert harness.cancels() == []


@scenario_test
async def test_plain_answer_that_outlasts_the_grace_is_cancelled(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world, drain_grace_s=1)
    answer = harness.chat()
    (request,) = await harness.published()
    await harness.gateway.stop()
    await answer.wait_done()
    assert (answer.status, answer.error["code"]) == (503, "stopping")
    assert await harness.cancelled() == [request.id]


@scenario_test
async def test_stopped_gateway_leaves_no_tasks(world: MemoryWorld) -> None:
    before = asyncio.all_tasks()
    harness = await GatewayHarness.with_card(world)
    answers = [harness.chat(n=2, stream=True), harness.chat()]
    await harness.published(3)
    for answer in answers:
        answer.disconnect()
    await harness.cancelled(3)
    await harness.gateway.stop()
    await harness.ctx.cancel_tasks()
    await world.sleep(0)
    assert asyncio.all_tasks() - before == set()


# --- health ---------------------------------------------------------------------------------------


@scenario_test
async def test_gateway_is_ready_when_it_is_open(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    ready = await harness.send("GET", "/readyz").wait_done()
    assert (ready.status, ready.json["ready"]) == (200, True)
    assert (await harness.send("GET", "/livez").wait_done()).status == 200


@scenario_test
async def test_gateway_is_not_ready_without_the_log_and_ready_again_with_it(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.open(world)
    world.faults.unanswered.add("offsets")
    await world.sleep(3)
    assert (await harness.send("GET", "/readyz").wait_done()).status == 200
    await world.sleep(2)
    assert (await harness.send("GET", "/readyz").wait_done()).status == 503
    await world.sleep(55)
    unready = await harness.send("GET", "/readyz").wait_done()
    assert (unready.status, unready.json["log_answers"]) == (503, False)
    page = (await harness.send("GET", "/metrics").wait_done()).content.decode()
    (silent,) = re.findall(
        r"^kvlane_gateway_broker_last_response_age_seconds (\S+)$", page, re.MULTILINE
    )
    assert float(silent) > 50
    assert (await harness.send("GET", "/livez").wait_done()).status == 200
    world.faults.unanswered.clear()
    await world.sleep(10)
    assert (await harness.send("GET", "/readyz").wait_done()).status == 200


@scenario_test
async def test_request_is_refused_soon_after_the_log_became_unresponsive_and_at_once_later(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_card(world)
    world.broker.available = False
    begun_at = world.clock.now()
    first = harness.chat()
    await first.wait_done()
    assert (first.status, first.error["code"]) == (503, "log_unavailable")
    assert world.clock.now() - begun_at <= 5.5
    begun_at = world.clock.now()
    second = harness.chat()
    await second.wait_done()
    assert (second.status, second.error["code"]) == (503, "log_unavailable")
    assert world.clock.now() - begun_at <= 0.1
    world.broker.available = True
    await world.sleep(5)
    third = harness.chat()
    assert len(await harness.published()) == 1
    third.disconnect()


@scenario_test
async def test_gateway_whose_reader_fails_fails_as_a_whole(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    await harness.gateway.parts.streams._replies._readers[0].close()
    await world.wait_until(lambda: harness.ctx.error is not None)
    assert (await harness.send("GET", "/livez").wait_done()).status == 503


@scenario_test
async def test_gateway_denied_by_the_log_ends(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)

    async def refuse(*_: object) -> dict[int, int]:
        raise AccessDenied("no right to describe responses")

    harness.gateway._log.end_offsets = refuse
    await world.wait_until(lambda: harness.ctx.error is not None)
    assert isinstance(harness.ctx.error, AccessDenied)
    assert (await harness.send("GET", "/livez").wait_done()).status == 503


@scenario_test
async def test_metrics_are_there_before_the_first_request(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    answer = await harness.send("GET", "/metrics").wait_done()
    assert answer.headers["content-type"].startswith("text/plain")
    page = answer.content.decode()
    for line in (
        'kvlane_gateway_http_responses_total{endpoint="chat",status="529"} 0.0',
        'kvlane_gateway_completions_total{outcome="stop"} 0.0',
        "kvlane_gateway_completions_in_flight 0.0",
        "kvlane_gateway_time_to_first_token_seconds_count 0.0",
        "kvlane_gateway_stream_gaps_total 0.0",
    ):
        assert f"\n{line}\n" in page


@scenario_test
async def test_responses_of_each_endpoint_and_status_are_counted_from_zero(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.open(world)
    page = (await harness.send("GET", "/metrics").wait_done()).content.decode()
    found = set(re.findall(r'http_responses_total{endpoint="(\w+)",status="(\d+)"} 0.0\n', page))
    documented = re.findall(r"^\| (\d{3}) \|", HTTP_PAGE.read_text(), re.MULTILINE)
    raised = {
        str(HTTPStatus[name].value)
        for file in (ROOT / "app" / "http").rglob("*.py")
        for name in re.findall(r"HTTPStatus\.([A-Z_]+)", file.read_text())
    }
    endpoints = (
        "chat", "completion", "embedding", "message", "response", "responses", "streams", "files",
        "batches", "other",
    )  # fmt: skip
    assert {*documented, *raised} >= {"200", "401", "403", "429", "529"}
    assert found == set(product(endpoints, {*documented, *raised}))


@scenario_test
async def test_metrics_count_answers(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    await harness.chat("hello", stream=True).wait_done()
    left = harness.chat("hello", stream=True, max_tokens=400)
    await world.wait_until(lambda: len(left.text) > 3)
    left.disconnect()
    await left.task
    page = (await harness.send("GET", "/metrics").wait_done()).content.decode()
    for line in (
        'kvlane_gateway_http_responses_total{endpoint="chat",status="200"} 2.0',
        'kvlane_gateway_completions_total{outcome="stop"} 1.0',
        'kvlane_gateway_completions_total{outcome="left"} 1.0',
        "kvlane_gateway_time_to_first_token_seconds_count 2.0",
        "kvlane_gateway_inter_token_latency_seconds_count 2.0",
        'kvlane_gateway_inter_token_latency_seconds_bucket{le="0.02"} 2.0',
        "kvlane_gateway_output_tokens_count 2.0",
        "kvlane_gateway_prompt_tokens_count 2.0",
    ):
        assert f"\n{line}\n" in page, line
