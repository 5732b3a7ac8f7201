"""Tests of clients that attach to a stream of the gateway, or resume it, in virtual time."""

from __future__ import annotations

import random

import pytest

from kvlane.app.http.openai.gateway_deps import DEADLINE_MARGIN_S
from kvlane.app.http.openai.merged_replies import FIRST_CHUNK_TIMEOUT_S
from kvlane.app.http.openai.stream_resume import UNDATED_START_S
from kvlane.streams.ids import new_request_id
from kvlane.streams.records import Chunk
from kvlane.streams.topics import RESPONSES, lane_of
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker
from workbench.testing.virtual_time import VirtualClock

DAY_MS = 24 * 3600 * 1000


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
async def test_broken_stream_of_several_answers_resumes_each_where_it_broke(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.open(world)
    other = await GatewayHarness.open(world, "g2")
    await harness.start_backend()
    answer = harness.chat("hello, world", {"x-kvlane-detach": "true"}, stream=True, n=3)
    await world.wait_until(lambda: len(answer.text) >= 8)
    answer.disconnect()
    await answer.task
    ids, last = answer.headers["x-kvlane-id"], answer.content.decode().split("id: ")[-1]
    headers = {"Last-Event-ID": last.partition("\n")[0]}
    url = f"/v1/streams/{ids}"
    rest = await other.send("GET", f"{url}?include_usage=true", headers=headers).wait_done()
    texts = ["", "", ""]
    for event in (*answer.events, *rest.events[:-2]):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["hello, world"] * 3
    assert {event["id"] for event in rest.events[:-1]} == {answer.events[0]["id"]}
    whole = await other.send("GET", f"{url}?stream=false").wait_done()
    assert [choice["message"]["content"] for choice in whole.json["choices"]] == texts
    assert whole.json["usage"] == rest.events[-2]["usage"]
    assert whole.json["usage"]["prompt_tokens"] == len(harness.requests()[0].token_ids) // 4
    for path, headers in ((f"{url}?form=message", {}), (url, {"Last-Event-ID": "1,2"})):
        assert (await other.send("GET", path, headers=headers).wait_done()).status == 400


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
    drawn = new_request_id(world.clock, random.Random(1))
    old = harness.gateway.parts.streams.seal.tagged(drawn, "")
    await world.sleep(harness.gateway.parts.settings.max_lifetime_s + DEADLINE_MARGIN_S + 1)
    for unknown, within_s in ((old, 0.0), ("job-17", UNDATED_START_S), ("a/b c", UNDATED_START_S)):
        began = world.clock.now()
        answer = await harness.send("GET", f"/v1/streams/{unknown}").wait_done()
        assert (answer.status, answer.error["code"]) == (404, "stream_not_found")
        assert within_s <= world.clock.now() - began <= within_s + 1


@scenario_test
async def test_prompt_on_kafka_that_waits_longer_than_a_request_is_awaited(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_card(world)
    waiting, gone = (
        new_request_id(VirtualClock(world.clock._loop, ahead_ms=-days * DAY_MS), random.Random(1))
        for days in (6, 8)
    )
    reading = harness.send("GET", f"/v1/streams/{waiting}")
    await world.sleep(60)
    Worker(world, waiting).write("hello", "stop")
    answer = await reading.wait_done()
    assert (answer.status, answer.text) == (200, "hello")
    assert (await harness.send("GET", f"/v1/streams/{gone}").wait_done()).status == 404


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
