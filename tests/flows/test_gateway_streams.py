"""Streams of the gateway: cut off, gone on with, cancelled, told to the end. In virtual time."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from app.http.openai.gateway_deps import DEADLINE_MARGIN_S
from app.http.openai.merged_replies import FIRST_CHUNK_TIMEOUT_S
from app.http.openai.response_writer import KEEP_ALIVE_S
from app.http.openai.stream_resume import UNDATED_START_S
from app.testing.virtual_time import VirtualClock
from streams.errors import AccessDenied
from streams.ids import new_request_id
from streams.memory.broker_faults import AppendFate
from streams.records import Chunk, Fence
from streams.topics import REQUESTS, RESPONSES, lane_of
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker

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


# --- going on with a stream -----------------------------------------------------------------------


@scenario_test
async def test_broken_stream_resumes_where_it_broke_at_any_gateway(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    other = await GatewayHarness.open(world, "g2")
    await harness.start_backend()
    answer = harness.chat("hello, world", {"x-kvlane-detach": "true"}, stream=True)
    await world.wait_until(lambda: len(answer.text) >= 5)
    answer.disconnect()
    await answer.task
    position, stream_id = answer.positions[-1], answer.headers["x-kvlane-id"]
    rest = await other.send("GET", f"/v1/streams/{stream_id}?from={position}").wait_done()
    assert rest.status == 200
    assert answer.text + rest.text == "hello, world"
    assert rest.events[-1] == "[DONE]"
    assert rest.events[0]["id"] == stream_id
    assert rest.events[0]["created"] == answer.events[0]["created"]
    assert "role" not in rest.events[0]["choices"][0]["delta"]


@scenario_test
async def test_last_event_id_precedes_the_url(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hello", stream=True).wait_done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?from=1"
    rest = await harness.send("GET", url, headers={"Last-Event-ID": "3"}).wait_done()
    assert rest.text == "lo"
    assert rest.positions == [4, 5]


@scenario_test
async def test_finished_stream_is_sent_from_its_beginning(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.complete("hello", stream=True).wait_done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?form=completion&include_usage=true"
    again = await harness.send("GET", url).wait_done()
    got, usage = again.events[:-2], again.events[-2]["usage"]
    assert "".join(event["choices"][0]["text"] for event in got) == "hello"
    assert usage["completion_tokens"] == 5
    assert usage["prompt_tokens"] == len(harness.requests()[0].token_ids) // 4


@scenario_test
async def test_stream_can_be_requested_whole(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hello").wait_done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?stream=false"
    again = await harness.send("GET", url).wait_done()
    assert again.json["choices"] == answer.json["choices"]
    assert again.json["usage"] == answer.json["usage"]


async def check_attaching_while_waiting(first: GatewayHarness, other: GatewayHarness) -> None:
    """A request of one gateway waits for a minute; another gateway attaches and has all of it."""
    first.chat("hello", stream=True)
    (request,) = await first.published()
    attached = other.send("GET", f"/v1/streams/{request.id}")
    await first.world.sleep(60)
    assert attached.status == 200
    Worker(first.world, request.id).write("hello", "stop")
    await attached.wait_done()
    assert attached.text == "hello"


@scenario_test
async def test_stream_that_still_waits_can_be_attached_to(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    await check_attaching_while_waiting(harness, harness)


@scenario_test
async def test_disconnect_of_an_attached_client_does_not_cancel_the_request(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_card(world)
    harness.chat("hello", stream=True)
    (request,) = await harness.published()
    attached = harness.send("GET", f"/v1/streams/{request.id}")
    await world.sleep(1)
    attached.disconnect()
    await world.sleep(5)
    assert attached.task.done()
    assert harness.cancels() == []


@scenario_test
async def test_unknown_stream_is_not_found(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    old = new_request_id(world.clock, random.Random(1))
    await world.sleep(harness.gateway.parts.settings.max_lifetime_s + DEADLINE_MARGIN_S + 1)
    for unknown, within_s in ((old, 0.0), ("job-17", UNDATED_START_S), ("a/b c", UNDATED_START_S)):
        began = world.clock.now()
        answer = await harness.send("GET", f"/v1/streams/{unknown}").wait_done()
        assert (answer.status, answer.error["code"]) == (404, "stream_not_found")
        assert within_s <= world.clock.now() - began <= within_s + 1


@scenario_test
async def test_stream_whose_beginning_is_gone_is_not_found(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    lane = lane_of("job-17", world.lanes)
    for seq in range(3):
        chunk = Chunk(id="job-17", attempt=0, run="1", seq=seq, index=seq, token_ids=(7,), text="x")
        world.append(RESPONSES, lane, chunk, key="job-17")
    world.broker.delete_records(RESPONSES, lane, 2)
    answer = await harness.send("GET", "/v1/streams/job-17").wait_done()
    assert (answer.status, answer.error["code"]) == (404, "stream_not_found")


@scenario_test
async def test_resumed_stream_without_records_is_not_found(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hello", stream=True).wait_done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}"
    for lane in range(world.lanes):
        world.broker.delete_records(RESPONSES, lane, len(world.records(RESPONSES, lane)))
    again = await harness.send("GET", url, headers={"last-event-id": "2"}).wait_done()
    assert (again.status, again.error["code"]) == (404, "stream_not_found")


@scenario_test
async def test_temporarily_unreadable_stream_is_not_lost(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hello", stream=True).wait_done()
    await harness.ctx.cancel_tasks()
    other = await GatewayHarness.open(world, "g2")
    world.faults.slow["poll"] = 2 * FIRST_CHUNK_TIMEOUT_S
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?from=2"
    again = await other.send("GET", url).wait_done()
    assert (again.status, again.text) == (200, "llo")


@scenario_test
async def test_stream_as_old_as_its_retention_is_found_however_long_that_takes(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hello", stream=True).wait_done()
    stream_id = answer.headers["x-kvlane-id"]
    await harness.ctx.cancel_tasks()
    await world.sleep(3500)
    other = await GatewayHarness.open(world, "g2")
    world.faults.slow["poll"] = 2 * FIRST_CHUNK_TIMEOUT_S
    again = await other.send("GET", f"/v1/streams/{stream_id}").wait_done()
    assert (again.status, again.text) == (200, "hello")


@pytest.mark.parametrize(("asked_ms", "attached_ms"), [(0, 660_000), (0, -660_000), (-660_000, 0)])
@scenario_test
async def test_stream_that_waits_is_found_whatever_the_clocks_of_gateways(
    world: MemoryWorld, asked_ms: int, attached_ms: int
) -> None:
    harness = await GatewayHarness.open(
        world, clock=VirtualClock(world.clock._loop, ahead_ms=asked_ms)
    )
    other = await GatewayHarness.open(
        world, "g2", VirtualClock(world.clock._loop, ahead_ms=attached_ms)
    )
    await harness.register_and_wait()
    harness.end_request("job-17", "stop")  # both see the time of the broker
    await world.sleep(1)
    await check_attaching_while_waiting(harness, other)


@scenario_test
async def test_first_id_of_a_gateway_is_not_older_than_the_registry(world: MemoryWorld) -> None:
    other = await GatewayHarness.with_card(world)
    await world.sleep(5)
    slow_clock = VirtualClock(world.clock._loop, ahead_ms=-3_500_000)
    harness = await GatewayHarness.open(world, "g2", slow_clock)
    harness.chat("hello", stream=True)
    (request,) = await harness.published()
    attached = other.send("GET", f"/v1/streams/{request.id}")
    await world.sleep(1)
    Worker(world, request.id).write("hello", "stop")
    await attached.wait_done()
    assert (attached.status, attached.text) == (200, "hello")


@scenario_test
async def test_gateway_that_has_just_started_with_a_fast_clock_finds_a_stream_that_waits(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_card(world)
    harness.chat("hello", stream=True)
    (request,) = await harness.published()
    await world.sleep(20)
    fast_clock = VirtualClock(world.clock._loop, ahead_ms=3_500_000)
    other = await GatewayHarness.open(world, "g2", fast_clock)
    attached = other.send("GET", f"/v1/streams/{request.id}")
    await world.sleep(1)
    Worker(world, request.id).write("hello", "stop")
    await attached.wait_done()
    assert (attached.status, attached.text) == (200, "hello")


@pytest.mark.parametrize("query", ["?from=99999", "?from=6&stream=false"])
@scenario_test
async def test_position_beyond_the_end_of_a_stream_is_refused(
    world: MemoryWorld, query: str
) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hello", stream=True).wait_done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}"
    again = await harness.send("GET", url + query).wait_done()
    assert (again.status, again.error["code"]) == (400, "invalid_value")
    assert "ended at position 5" in again.error["message"]
    end = await harness.send("GET", url + "?from=5").wait_done()
    assert (end.status, end.text) == (200, "")


@pytest.mark.parametrize("position", [0, 3])
@scenario_test
async def test_stream_that_is_attached_to_names_its_model(
    world: MemoryWorld, position: int
) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hello", stream=True).wait_done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?include_usage=true"
    again = await harness.send("GET", f"{url}&from={position}").wait_done()
    assert {event["model"] for event in again.events[:-1]} == {"demo"}
    whole = await harness.send("GET", f"{url}&stream=false").wait_done()
    assert whole.json["model"] == "demo"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("from=-1", "from"),
        ("from=x", "from"),
        ("from=" + "9" * 99, "from"),
        ("form=poem", "form"),
        ("stream=maybe", "stream"),
        ("include_usage=2", "include_usage"),
    ],
)
@scenario_test
async def test_wrong_parameter_is_named(world: MemoryWorld, query: str, param: str) -> None:
    harness = await GatewayHarness.open(world)
    answer = await harness.send("GET", f"/v1/streams/a?{query}").wait_done()
    assert (answer.status, answer.error["param"]) == (400, param)


@scenario_test
async def test_id_is_escaped_in_headers_as_in_urls(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    harness.end_request("a, é\t", "stop")
    url = "/v1/streams/a%2C%20%C3%A9%09"
    answer = await harness.send("GET", url).wait_done()
    assert answer.status == 200
    assert answer.headers["x-kvlane-id"] == url.rsplit("/", 1)[1]
    forged = await harness.send("GET", "/v1/streams/a%0D%0Aset-cookie:%20b=c").wait_done()
    assert "set-cookie" not in forged.headers


@scenario_test
async def test_stream_of_another_tenant_is_not_found_and_not_ended(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = harness.chat("hello", stream=True, max_tokens=400)
    await world.wait_until(lambda: len(answer.text) > 3)
    mine = answer.headers["x-kvlane-id"]
    theirs = harness.gateway.parts.settings.tenant_tag().tagged(mine[:36], "another tenant")
    for method in ("GET", "DELETE"):
        refused = await harness.send(method, f"/v1/streams/{theirs}").wait_done()
        assert (refused.status, refused.error["code"]) == (404, "stream_not_found")
    answer.disconnect()
    assert await harness.cancelled() == [mine]


@scenario_test
async def test_with_a_secret_only_streams_of_gateways_are_served(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world, stream_secret="s3cret")
    other = await GatewayHarness.open(
        world, "g2", stream_secret="s3cret", http_host="0.0.0.0", http_allow_anonymous=True
    )
    await harness.start_backend()
    answer = await harness.chat("hello", stream=True).wait_done()
    harness.end_request("job-17", "stop")
    mine = await other.send("GET", f"/v1/streams/{answer.headers['x-kvlane-id']}").wait_done()
    assert mine.text == "hello"
    bare = new_request_id(world.clock, random.Random(1))
    for unknown in ("job-17", bare):
        refused = await other.send("GET", f"/v1/streams/{unknown}").wait_done()
        assert (refused.status, refused.error["code"]) == (404, "stream_not_found")


@scenario_test
async def test_id_that_is_too_long_is_no_id(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    assert (await harness.send("GET", "/v1/streams/" + "x" * 300).wait_done()).status == 400


@scenario_test
async def test_stream_is_cancelled_by_its_id(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = harness.chat("hello", stream=True, max_tokens=400)
    await world.wait_until(lambda: len(answer.text) > 3)
    stream_id = answer.headers["x-kvlane-id"]
    deleted = await harness.send("DELETE", f"/v1/streams/{stream_id}").wait_done()
    assert deleted.status == 202
    assert deleted.json == {"id": stream_id, "object": "stream", "status": "cancelling"}
    await answer.wait_done()
    assert answer.events[-2]["error"]["code"] == "cancelled"
    assert [cancel.id for cancel in harness.cancels()] == [stream_id]


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
