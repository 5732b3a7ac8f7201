"""Streams of the gateway: cut off, gone on with, cancelled, told to the end. In virtual time."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from app.http.joined import FIND_S
from app.http.parts import MARGIN_S
from app.http.telling import KEEP_ALIVE_S
from streams.errors import Denied
from streams.ids import new_request_id
from streams.memory.broker import Fate
from streams.records import Chunk, Fence
from streams.topics import REQUESTS, RESPONSES, lane_of
from tests.gateways import House
from tests.listening import Worker
from tests.worlds import World, in_world, play

# --- failures under way ---------------------------------------------------------------------------


@in_world
async def test_a_failure_after_the_first_token_is_an_event_and_the_last_one(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = house.chat(stream=True)
    (request,) = await house.published()
    Worker(world, request.id).write("he")
    await world.until(lambda: answer.text == "he")
    house.end(request.id, "attempts", message="failed on 3 workers")
    await answer.done()
    assert answer.status == 200
    error, done = answer.events[-2:]
    assert error["error"]["message"] == "failed on 3 workers"
    assert error["error"]["code"] == "attempts"
    assert done == "[DONE]"
    await world.sleep(5)
    assert house.cancels() == []


@in_world
async def test_an_outage_delays_the_start_and_does_not_end_it(world: World) -> None:
    world.faults.unanswered = {"offsets"}
    opening = world.spawn(House.open(world))
    await world.sleep(30.0)
    assert not opening.done()
    world.faults.unanswered = set()
    await opening


@in_world
async def test_silence_is_filled_and_opens_the_stream(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = house.chat(stream=True)
    (request,) = await house.published()
    await world.sleep(KEEP_ALIVE_S - 1)
    assert answer.status == 0
    await world.sleep(2 * KEEP_ALIVE_S)
    assert answer.status == 200
    assert answer.content == b": keep-alive\n" * 2
    house.end(request.id, "deadline")
    await answer.done()
    assert [answer.events[0]["error"]["code"], answer.events[1]] == ["deadline", "[DONE]"]


@in_world
async def test_a_stream_that_nobody_ends_is_ended_with_an_event(world: World) -> None:
    house = await House.open(world, deadline_s=40)
    await house.listed()
    answer = house.chat(stream=True)
    (request,) = await house.published()
    Worker(world, request.id).write("he")
    await answer.done()
    assert world.clock.now() == pytest.approx(40 + MARGIN_S, abs=1)
    assert answer.events[-2]["error"]["code"] == "deadline"
    assert await house.cancelled() == [request.id]


@in_world
async def test_what_a_dead_worker_said_again_is_not_told_twice(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = house.chat(stream=True)
    (request,) = await house.published()
    lost = Worker(world, request.id)
    lost.write("he")
    lost.append(Fence(id=request.id, attempt=1))
    lost.write("zombie")
    Worker(world, request.id, attempt=1, index=2).write("llo", "stop")
    lost.write("zombie")
    await answer.done()
    assert answer.text == "hello"
    page = (await house.ask("GET", "/metrics").done()).content.decode()
    assert "\nkvlane_holes_total 0.0\n" in page
    assert "\nkvlane_chunks_skipped_total 1.0\n" in page


@in_world
async def test_a_slow_client_gets_all_of_it_and_delays_nobody(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    slow, quick = house.chat("one", stream=True), house.chat("two", stream=True)
    slow.reading.clear()
    writers = [Worker(world, request.id) for request in await house.published(2)]
    for _ in range(1000):
        for writer in writers:
            writer.write("x")
        await world.sleep(0.001)
    for writer in writers:
        writer.write("y", "stop")
    await quick.done()
    assert not slow.complete
    slow.reading.set()
    await slow.done()
    assert slow.text == quick.text == "x" * 1000 + "y"
    assert len(slow.events) < len(quick.events)


@in_world
async def test_a_client_that_reads_nothing_is_let_go_at_last(world: World) -> None:
    house = await House.open(world, deadline_s=40)
    await house.listed()
    answer = house.chat(stream=True)
    answer.reading.clear()
    (request,) = await house.published()
    Worker(world, request.id).write("hello")
    await world.sleep(40 + MARGIN_S + KEEP_ALIVE_S + 1)
    assert answer.task.done()
    assert house.gateway.parts.streams.open == 0
    assert await house.cancelled() == [request.id]


@in_world
async def test_a_worker_that_dies_is_not_noticed_by_its_client(world: World) -> None:
    house = await House.open(world)
    await house.staff(worker_timeout_s=3)
    text = "".join(chr(33 + n % 90) for n in range(200))
    answers = [house.chat(text, stream=True) for _ in range(4)]
    await world.until(lambda: all(len(answer.text) > 20 for answer in answers))
    await house.kill("w1")
    await house.hire("w2")
    for answer in answers:
        await answer.done()
        assert answer.text == text
        assert answer.events[-1] == "[DONE]"
    page = (await house.ask("GET", "/metrics").done()).content.decode()
    assert "\nkvlane_holes_total 0.0\n" in page


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_cancels_its_request(stream: bool, begun: bool) -> None:
    async def scenario(world: World) -> None:
        house = await House.open(world)
        await house.listed()
        answer = house.chat(stream=stream)
        (request,) = await house.published()
        if begun:
            Worker(world, request.id).write("he")
            await world.sleep(1)
        answer.leave()
        assert await house.cancelled() == [request.id]
        assert answer.task.done()
        assert house.gateway.parts.streams.open == 0

    play(scenario)


@in_world
async def test_a_cancelled_request_stops_at_its_worker(world: World) -> None:
    house = await House.open(world)
    worker = await house.staff()
    answer = house.chat("hello", stream=True, max_tokens=400)
    await world.until(lambda: len(answer.text) > 3)
    answer.leave()
    await house.cancelled()
    assert worker._runs is not None
    runs = worker._runs
    await world.until(lambda: not runs.progress())
    last = world.records(RESPONSES, key=house.requests()[0].id)[-1]
    assert b'"cancelled"' in (last.value or b"")


@in_world
async def test_a_client_that_leaves_after_the_end_cancels_nothing(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat(stream=True).done()
    answer.leave()
    await world.sleep(5)
    assert house.cancels() == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_detached_request_runs_on(stream: bool) -> None:
    async def scenario(world: World) -> None:
        house = await House.open(world)
        await house.staff()
        answer = house.chat("hello", {"X-Kvlane-Detach": "true"}, stream=stream)
        (request,) = await house.published()
        await world.sleep(0.05)
        answer.leave()
        await world.sleep(5)
        assert house.cancels() == []
        again = await house.ask("GET", f"/v1/streams/{request.id}").done()
        assert again.text == "hello"

    play(scenario)


@in_world
async def test_only_the_unfinished_of_several_answers_are_cancelled(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = house.chat(n=3, stream=True)
    first, second, third = await house.published(3)
    Worker(world, second.id).write("hello", "stop")
    await world.until(lambda: answer.text == "hello")
    answer.leave()
    assert sorted(await house.cancelled(2)) == sorted([first.id, third.id])


@in_world
async def test_a_client_that_leaves_while_its_request_is_published_cancels_it(
    world: World,
) -> None:
    house = await House.open(world)
    await house.listed()
    world.faults.slow["append"] = 2.0
    answer = house.chat()
    await world.sleep(1.0)
    answer.leave()
    await world.until(answer.task.done)
    (request,) = await house.published()
    assert await house.cancelled() == [request.id]


@in_world
async def test_a_cancel_outlasts_a_short_outage(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = house.chat(stream=True)
    (request,) = await house.published()
    world.faults.next_fates(REQUESTS, *[Fate.LOST] * 8)
    answer.leave()
    assert await house.cancelled() == [request.id]


# --- going on with a stream -----------------------------------------------------------------------


@in_world
async def test_a_broken_stream_goes_on_where_it_broke_at_any_gateway(world: World) -> None:
    house = await House.open(world)
    other = await House.open(world, "g2")
    await house.staff()
    answer = house.chat("hello, world", {"x-kvlane-detach": "true"}, stream=True)
    await world.until(lambda: len(answer.text) >= 5)
    answer.leave()
    await answer.task
    position, stream_id = answer.positions[-1], answer.headers["x-kvlane-id"]
    rest = await other.ask("GET", f"/v1/streams/{stream_id}?from={position}").done()
    assert rest.status == 200
    assert answer.text + rest.text == "hello, world"
    assert rest.events[-1] == "[DONE]"
    assert rest.events[0]["id"] == stream_id
    assert rest.events[0]["created"] == answer.events[0]["created"]
    assert "role" not in rest.events[0]["choices"][0]["delta"]


@in_world
async def test_the_last_event_that_was_seen_counts_more_than_the_url(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat("hello", stream=True).done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?from=1"
    rest = await house.ask("GET", url, headers={"Last-Event-ID": "3"}).done()
    assert rest.text == "lo"
    assert rest.positions == [4, 5]


@in_world
async def test_a_finished_stream_is_told_from_its_beginning(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.complete("hello", stream=True).done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?form=completion&include_usage=true"
    again = await house.ask("GET", url).done()
    told, usage = again.events[:-2], again.events[-2]["usage"]
    assert "".join(event["choices"][0]["text"] for event in told) == "hello"
    assert usage["completion_tokens"] == 5
    assert usage["prompt_tokens"] == len(house.requests()[0].token_ids) // 4


@in_world
async def test_a_stream_can_be_had_whole(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat("hello").done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?stream=false"
    again = await house.ask("GET", url).done()
    assert again.json["choices"] == answer.json["choices"]
    assert again.json["usage"] == answer.json["usage"]


@in_world
async def test_a_stream_that_still_waits_can_be_attached_to(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    house.chat("hello", stream=True)
    (request,) = await house.published()
    attached = house.ask("GET", f"/v1/streams/{request.id}")
    await world.sleep(60)
    assert attached.status == 200
    Worker(world, request.id).write("hello", "stop")
    await attached.done()
    assert attached.text == "hello"


@in_world
async def test_who_attaches_and_leaves_cancels_nothing(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    house.chat("hello", stream=True)
    (request,) = await house.published()
    attached = house.ask("GET", f"/v1/streams/{request.id}")
    await world.sleep(1)
    attached.leave()
    await world.sleep(5)
    assert attached.task.done()
    assert house.cancels() == []


@in_world
async def test_a_stream_that_never_was_is_not_found(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    old = new_request_id(world.clock, random.Random(1))
    await world.sleep(house.gateway.parts.settings.max_lifetime_s + MARGIN_S + 1)
    for unknown in (old, "job-17", "a/b c"):
        began = world.clock.now()
        answer = await house.ask("GET", f"/v1/streams/{unknown}").done()
        assert (answer.status, answer.error["code"]) == (404, "stream_not_found")
        assert world.clock.now() - began == pytest.approx(FIND_S)


@in_world
async def test_a_stream_whose_beginning_is_gone_is_not_found(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    lane = lane_of("job-17", world.lanes)
    for seq in range(3):
        chunk = Chunk(id="job-17", attempt=0, run="1", seq=seq, index=seq, token_ids=(7,), text="x")
        world.append(RESPONSES, lane, chunk, key="job-17")
    world.broker.delete_records(RESPONSES, lane, 2)
    answer = await house.ask("GET", "/v1/streams/job-17").done()
    assert (answer.status, answer.error["code"]) == (404, "stream_not_found")


@in_world
async def test_a_stream_of_which_nothing_is_left_is_not_found_by_who_has_some(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat("hello", stream=True).done()
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}"
    for lane in range(world.lanes):
        world.broker.delete_records(RESPONSES, lane, len(world.records(RESPONSES, lane)))
    again = await house.ask("GET", url, headers={"last-event-id": "2"}).done()
    assert (again.status, again.error["code"]) == (404, "stream_not_found")


@in_world
async def test_a_stream_that_cannot_be_read_for_a_while_is_not_lost(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat("hello", stream=True).done()
    await house.life.end()
    other = await House.open(world, "g2")
    world.faults.slow["poll"] = 2 * FIND_S
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?from=2"
    again = await other.ask("GET", url).done()
    assert (again.status, again.text) == (200, "llo")


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
def test_a_wrong_parameter_is_named(query: str, param: str) -> None:
    async def scenario(world: World) -> None:
        house = await House.open(world)
        answer = await house.ask("GET", f"/v1/streams/a?{query}").done()
        assert (answer.status, answer.error["param"]) == (400, param)

    play(scenario)


@in_world
async def test_an_id_stands_in_headers_as_in_urls(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    house.end("a, é\t", "stop")
    url = "/v1/streams/a%2C%20%C3%A9%09"
    answer = await house.ask("GET", url).done()
    assert answer.status == 200
    assert answer.headers["x-kvlane-id"] == url.rsplit("/", 1)[1]
    forged = await house.ask("GET", "/v1/streams/a%0D%0Aset-cookie:%20b=c").done()
    assert "set-cookie" not in forged.headers


@in_world
async def test_a_stream_of_another_tenant_is_not_found_and_not_ended(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = house.chat("hello", stream=True, max_tokens=400)
    await world.until(lambda: len(answer.text) > 3)
    mine = answer.headers["x-kvlane-id"]
    theirs = house.gateway.parts.settings.seal().sealed(mine[:36], "another tenant")
    for method in ("GET", "DELETE"):
        refused = await house.ask(method, f"/v1/streams/{theirs}").done()
        assert (refused.status, refused.error["code"]) == (404, "stream_not_found")
    answer.leave()
    assert await house.cancelled() == [mine]


@in_world
async def test_with_a_secret_only_streams_of_gateways_can_be_had(world: World) -> None:
    house = await House.open(world, stream_secret="s3cret")
    other = await House.open(world, "g2", stream_secret="s3cret", http_host="0.0.0.0")
    await house.staff()
    answer = await house.chat("hello", stream=True).done()
    house.end("job-17", "stop")
    mine = await other.ask("GET", f"/v1/streams/{answer.headers['x-kvlane-id']}").done()
    assert mine.text == "hello"
    bare = new_request_id(world.clock, random.Random(1))
    for unknown in ("job-17", bare):
        refused = await other.ask("GET", f"/v1/streams/{unknown}").done()
        assert (refused.status, refused.error["code"]) == (404, "stream_not_found")


@in_world
async def test_an_id_that_is_too_long_is_no_id(world: World) -> None:
    house = await House.open(world)
    assert (await house.ask("GET", "/v1/streams/" + "x" * 300).done()).status == 400


@in_world
async def test_a_stream_is_cancelled_by_its_id(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = house.chat("hello", stream=True, max_tokens=400)
    await world.until(lambda: len(answer.text) > 3)
    stream_id = answer.headers["x-kvlane-id"]
    deleted = await house.ask("DELETE", f"/v1/streams/{stream_id}").done()
    assert deleted.status == 202
    assert deleted.json == {"id": stream_id, "object": "stream", "status": "cancelling"}
    await answer.done()
    assert answer.events[-2]["error"]["code"] == "cancelled"
    assert [cancel.id for cancel in house.cancels()] == [stream_id]


# --- stopping -------------------------------------------------------------------------------------


@in_world
async def test_a_stopping_gateway_takes_nothing_new_and_ends_what_it_has(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = house.chat("hello", stream=True)
    await world.until(lambda: answer.text == "he")
    stopping = world.spawn(house.gateway.stop())
    await world.sleep(0)
    refused = await house.chat().done()
    assert (refused.status, refused.error["code"]) == (503, "stopping")
    assert (await house.ask("GET", "/readyz").done()).status == 503
    await stopping
    await answer.done()
    assert answer.text == "hello"
    assert answer.events[-1] == "[DONE]"


@in_world
async def test_a_stream_that_outlasts_the_grace_goes_on_at_another_gateway(world: World) -> None:
    house = await House.open(world, drain_grace_s=1)
    other = await House.open(world, "g2")
    await house.staff()
    text = "x" * 200
    answer = house.chat(text, stream=True)
    await world.until(lambda: len(answer.text) > 3)
    await house.gateway.stop()
    await answer.done()
    error, done = answer.events[-2:]
    assert (error["error"]["code"], done) == ("stopping", "[DONE]")
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}?from={answer.positions[-1]}"
    assert url in error["error"]["message"]
    rest = await other.ask("GET", url).done()
    told = "".join(e["choices"][0]["delta"].get("content", "") for e in answer.events[:-2])
    assert told + rest.text == text
    assert house.cancels() == []


@in_world
async def test_a_plain_answer_that_outlasts_the_grace_is_cancelled(world: World) -> None:
    house = await House.open(world, drain_grace_s=1)
    await house.listed()
    answer = house.chat()
    (request,) = await house.published()
    await house.gateway.stop()
    await answer.done()
    assert (answer.status, answer.error["code"]) == (503, "stopping")
    assert await house.cancelled() == [request.id]


@in_world
async def test_a_stopped_gateway_leaves_no_tasks(world: World) -> None:
    before = asyncio.all_tasks()
    house = await House.open(world)
    await house.listed()
    answers = [house.chat(n=2, stream=True), house.chat()]
    await house.published(3)
    for answer in answers:
        answer.leave()
    await house.cancelled(3)
    await house.gateway.stop()
    await house.life.end()
    await world.sleep(0)
    assert asyncio.all_tasks() - before == set()


# --- health ---------------------------------------------------------------------------------------


@in_world
async def test_a_gateway_is_ready_when_it_is_open(world: World) -> None:
    house = await House.open(world)
    ready = await house.ask("GET", "/readyz").done()
    assert (ready.status, ready.json["ready"]) == (200, True)
    assert (await house.ask("GET", "/livez").done()).status == 200


@in_world
async def test_a_gateway_is_not_ready_without_the_log_and_ready_again_with_it(
    world: World,
) -> None:
    house = await House.open(world)
    world.faults.unanswered.add("offsets")
    await world.sleep(60)
    unready = await house.ask("GET", "/readyz").done()
    assert (unready.status, unready.json["log_answers"]) == (503, False)
    page = (await house.ask("GET", "/metrics").done()).content.decode()
    (silent,) = re.findall(r"^kvlane_log_silent_seconds (\S+)$", page, re.MULTILINE)
    assert float(silent) > 50
    assert (await house.ask("GET", "/livez").done()).status == 200
    world.faults.unanswered.clear()
    await world.sleep(10)
    assert (await house.ask("GET", "/readyz").done()).status == 200


@in_world
async def test_a_gateway_whose_reader_fails_fails_as_a_whole(world: World) -> None:
    house = await House.open(world)
    await house.gateway.parts.streams._replies._readers[0].close()
    await world.until(lambda: house.life.failed is not None)
    assert (await house.ask("GET", "/livez").done()).status == 503


@in_world
async def test_a_gateway_that_the_log_refuses_ends(world: World) -> None:
    house = await House.open(world)

    async def refuse(*_: object) -> dict[int, int]:
        raise Denied("no right to describe responses")

    house.gateway.parts.health._log.end_offsets = refuse
    await world.until(lambda: house.life.failed is not None)
    assert isinstance(house.life.failed, Denied)
    assert (await house.ask("GET", "/livez").done()).status == 503


@in_world
async def test_metrics_are_there_before_the_first_request(world: World) -> None:
    house = await House.open(world)
    answer = await house.ask("GET", "/metrics").done()
    assert answer.headers["content-type"].startswith("text/plain")
    page = answer.content.decode()
    for line in (
        'kvlane_http_responses_total{endpoint="chat",status="529"} 0.0',
        'kvlane_answers_total{outcome="stop"} 0.0',
        "kvlane_answers_under_way 0.0",
        "kvlane_ttft_seconds_count 0.0",
        "kvlane_holes_total 0.0",
    ):
        assert f"\n{line}\n" in page


@in_world
async def test_metrics_tell_of_answers(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    await house.chat("hello", stream=True).done()
    left = house.chat("hello", stream=True, max_tokens=400)
    await world.until(lambda: len(left.text) > 3)
    left.leave()
    await left.task
    page = (await house.ask("GET", "/metrics").done()).content.decode()
    for line in (
        'kvlane_http_responses_total{endpoint="chat",status="200"} 2.0',
        'kvlane_answers_total{outcome="stop"} 1.0',
        'kvlane_answers_total{outcome="left"} 1.0',
        "kvlane_ttft_seconds_count 2.0",
        "kvlane_itl_seconds_count 2.0",
        'kvlane_itl_seconds_bucket{le="0.02"} 2.0',
        "kvlane_output_tokens_count 2.0",
        "kvlane_prompt_tokens_count 2.0",
    ):
        assert f"\n{line}\n" in page, line
