"""HTTP on one side, the log on the other: the gateway in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from app.http.front import BODY_S
from app.http.parts import MARGIN_S
from app.http.streams import PUBLISH_S
from streams.codecs import pack_tokens
from streams.memory.broker import Fate
from streams.ports import Entry
from streams.records import EngineConfig, ModelCard, Tombstone, WorkerCard
from streams.topics import REGISTRY, REQUESTS, lane_of
from tests.exchange import Exchange
from tests.gateways import CONTEXT, House
from tests.listening import Worker
from tests.worlds import World, in_world, play

# --- answers --------------------------------------------------------------------------------------


@in_world
async def test_a_chat_is_answered_whole(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat("hello").done()
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    assert body["id"] == answer.headers["x-kvlane-id"] == house.requests()[0].id
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo"
    assert body["created"] == world.clock.wall_ms() // 1000
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 5


@in_world
async def test_a_chat_is_answered_while_it_is_made(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = house.chat("hello", stream=True)
    await world.until(lambda: answer.text == "he")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-kvlane-id"] == house.requests()[0].id
    await answer.done()
    assert answer.text == "hello"
    assert answer.events[-1] == "[DONE]"
    assert answer.events[-2]["choices"][0]["finish_reason"] == "stop"
    assert answer.positions == [1, 2, 3, 4, 5]
    assert all("usage" not in event for event in answer.events[:-1])


@in_world
async def test_usage_is_told_when_it_is_asked_for(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat("hey", stream=True, stream_options={"include_usage": True}).done()
    *chunks, total, done = answer.events
    assert done == "[DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert total["choices"] == []
    assert total["usage"]["completion_tokens"] == 3


@in_world
async def test_a_text_is_completed(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.complete("abc", max_tokens=7).done()
    assert answer.json["object"] == "text_completion"
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcabca", "length")
    stream = await house.complete("abc", max_tokens=7, stream=True).done()
    assert stream.text == "abcabca"
    assert stream.events[-1] == "[DONE]"


@in_world
async def test_an_echo_stands_before_the_answer(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.complete("abc ", echo=True, max_tokens=2).done()
    assert answer.json["choices"][0]["text"] == "abc ab"
    stream = await house.complete("abc ", echo=True, max_tokens=2, stream=True).done()
    assert stream.text == "abc ab"
    assert answer.json["usage"]["completion_tokens"] == 2


@in_world
async def test_several_prompts_are_answered_in_their_order(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.complete(["ab", "cd"], n=2, max_tokens=3).done()
    assert [c["text"] for c in answer.json["choices"]] == ["aba", "aba", "cdc", "cdc"]
    assert [c["index"] for c in answer.json["choices"]] == [0, 1, 2, 3]
    prompts = [len(r.token_ids) // 4 for r in house.requests()]
    assert answer.json["usage"]["prompt_tokens"] == sum(prompts) // 2


@in_world
async def test_hints_in_headers_are_passed_on(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    house.chat("hey", {"X-Worker-Instance-Id": "w1"})
    (request,) = await house.published()
    assert request.hints.backend_instance_id == "w1"


@in_world
async def test_several_answers_are_several_requests(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat("hey", n=3).done()
    ids = [request.id for request in house.requests()]
    assert sorted(answer.headers["x-kvlane-id"].split(",")) == sorted(ids)
    assert len(set(ids)) == 3
    assert [c["index"] for c in answer.json["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in answer.json["choices"]] == ["hey"] * 3
    assert answer.json["usage"]["completion_tokens"] == 9


@in_world
async def test_several_answers_are_streamed_together(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat("hey", n=2, stream=True).done()
    texts = {0: "", 1: ""}
    for event in answer.events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "hey", 1: "hey"}
    assert answer.positions == [], "a position in several answers names nothing"


@in_world
async def test_each_of_several_answers_draws_for_itself(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    house.chat("hey", n=3, seed=7)
    seeds = [request.sampling.seed for request in await house.published(3)]
    assert len(set(seeds)) == 3


@in_world
async def test_the_request_on_the_log_has_what_was_asked(world: World) -> None:
    house = await House.open(world, deadline_s=50)
    await house.listed()
    asked_ms = world.clock.wall_ms()
    house.chat("hey", max_tokens=9, temperature=0.5, seed=3)
    (request,) = await house.published()
    (record,) = world.records(REQUESTS, lane_of(request.id, world.lanes))
    assert record.key == request.id.encode()
    assert request.model == "demo"
    assert request.deadline_s == 50
    assert request.received_ms == asked_ms
    assert (request.stop.max_tokens, request.sampling.temperature) == (9, 0.5)
    assert request.token_ids


@in_world
async def test_the_id_that_a_client_gives_its_request_comes_back(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    answer = await house.chat("hey", {"X-Request-Id": "mine-17"}).done()
    assert answer.headers["x-request-id"] == "mine-17"
    failed = await house.chat("hey", {"x-request-id": "mine-18"}, messages=[]).done()
    assert failed.headers["x-request-id"] == "mine-18"


def test_ids_fall_into_the_lanes_of_the_gateway() -> None:
    async def scenario(world: World) -> None:
        house = await House.open(world, gateways=3, gateway_number=1)
        await house.listed()
        for _ in range(20):
            house.chat("hey")
        lanes = {lane_of(request.id, 8) % 3 for request in await house.published(20)}
        assert lanes == {1}
        assert sorted(house.gateway.parts.streams._replies._live.lanes) == [1, 4, 7]

    play(scenario, lanes=8)


# --- what is wrong with a request -----------------------------------------------------------------

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "demo", "prompt": "hi"}


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": CHAT["messages"]}, "model"),
        ("chat/completions", CHAT | {"messages": []}, "messages"),
        ("chat/completions", {"model": "demo"}, "messages"),
        ("chat/completions", CHAT | {"messages": "hi"}, "messages"),
        ("chat/completions", CHAT | {"messages": [{"content": "hi"}]}, "messages.0.role"),
        ("chat/completions", CHAT | {"max_tokens": "7"}, "max_tokens"),
        ("chat/completions", CHAT | {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", CHAT | {"temperature": "hot"}, "temperature"),
        ("chat/completions", CHAT | {"temperature": 3}, "temperature"),
        ("chat/completions", CHAT | {"n": 0}, "n"),
        ("chat/completions", CHAT | {"n": 1000}, "n"),
        ("chat/completions", CHAT | {"stream": "yes"}, "stream"),
        ("chat/completions", CHAT | {"stream_options": 1}, "stream_options"),
        ("chat/completions", CHAT | {"model": 7}, "model"),
        ("chat/completions", CHAT | {"model": ""}, "model"),
        ("completions", TEXT | {"prompt": ""}, "prompt"),
        ("completions", TEXT | {"prompt": []}, "prompt"),
        ("completions", {"model": "demo"}, "prompt"),
        ("completions", TEXT | {"prompt": [-1]}, "prompt"),
        ("completions", TEXT | {"prompt": {}}, "prompt"),
    ],
)
def test_a_wrong_field_is_named(endpoint: str, body: dict[str, Any], param: str) -> None:
    async def scenario(world: World) -> None:
        house = await House.open(world)
        await house.listed()
        answer = await house.ask("POST", f"/v1/{endpoint}", body).done()
        assert answer.status == 400, answer.content
        assert answer.error["param"] == param
        assert answer.error["type"] == "invalid_request_error"
        assert house.requests() == []

    play(scenario)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"hi"', b"\xff\xfe", b"[" * 100_000, b'{"a":"\xff"}']
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    async def scenario(world: World) -> None:
        house = await House.open(world)
        await house.listed()
        answer = await house.ask("POST", "/v1/chat/completions", body).done()
        assert answer.status == 400
        assert "body" in answer.error["message"]

    play(scenario)


@in_world
async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = await house.complete("x" * 2000).done()
    assert answer.status == 400
    assert str(CONTEXT) in answer.error["message"]
    assert "200" in answer.error["message"]
    assert house.requests() == []


@in_world
async def test_nothing_of_a_prompt_is_in_an_error(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = await house.chat(messages=[{"role": "user", "content": {"secret": "secret"}}]).done()
    assert answer.status == 400
    assert b"secret" not in answer.content


@in_world
async def test_a_body_above_the_limit_is_refused_with_both_numbers(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    body = b'{"model":"demo","prompt":"%b"}' % (b"x" * 9_000_000)
    answer = await house.ask("POST", "/v1/completions", body).done()
    assert answer.status == 413
    assert str(len(body)) in answer.error["message"]
    assert str(8 * 1024 * 1024) in answer.error["message"]


@in_world
async def test_a_body_of_unknown_size_is_refused_at_the_limit(world: World) -> None:
    house = await House.open(world, http_body_bytes=10_000)
    answer = Exchange(house.gateway.http, "POST", "/v1/completions", upload=False)
    for _ in range(11):
        answer.upload(b"x" * 1000, more=True)
    answer.upload(b"")
    await answer.done()
    assert answer.status == 413


@in_world
async def test_a_client_that_awaits_permission_is_not_let_to_send_too_much(world: World) -> None:
    house = await House.open(world)
    headers = {"content-length": str(9_000_000), "expect": "100-continue"}
    answer = Exchange(house.gateway.http, "POST", "/v1/completions", b"", headers, upload=False)
    await answer.done()
    assert answer.status == 413


@in_world
async def test_a_request_that_does_not_fit_into_a_record_is_refused(world: World) -> None:
    house = await House.open(world)
    await house.listed(config=EngineConfig(model="demo"))
    answer = await house.complete("x" * 3_000_000).done()
    assert answer.status == 413
    assert answer.error["code"] == "too_large"
    await world.sleep(5)
    assert house.gateway.parts.streams.open == 0


@in_world
async def test_a_body_that_does_not_come_is_not_waited_for(world: World) -> None:
    house = await House.open(world)
    began = world.clock.now()
    answer = Exchange(house.gateway.http, "POST", "/v1/completions", upload=False)
    answer.upload(b"{", more=True)
    await answer.done()
    assert answer.status == 408
    assert world.clock.now() - began == pytest.approx(BODY_S)


@in_world
async def test_bodies_are_taken_up_to_a_bound_together(world: World) -> None:
    house = await House.open(world, http_body_bytes=10_000)
    await house.listed()
    slow = []
    for _ in range(32):
        slow.append(Exchange(house.gateway.http, "POST", "/v1/completions", upload=False))
        slow[-1].upload(b"x" * 10_000, more=True)
    await world.sleep(1)
    refused = await house.chat().done()
    assert refused.status == 529
    assert refused.headers["retry-after"]
    for exchange in slow:
        exchange.leave()
    await world.sleep(1)
    house.chat()
    await house.published()


@in_world
async def test_an_unknown_url_and_a_wrong_method_are_errors_in_openai_form(world: World) -> None:
    house = await House.open(world)
    unknown = await house.ask("GET", "/v1/nonsense").done()
    assert (unknown.status, unknown.error["type"]) == (404, "invalid_request_error")
    wrong = await house.ask("GET", "/v1/chat/completions").done()
    assert (wrong.status, wrong.error["type"]) == (405, "invalid_request_error")


# --- models ---------------------------------------------------------------------------------------


@in_world
async def test_only_models_with_a_live_worker_are_listed(world: World) -> None:
    house = await House.open(world)
    world.append(REGISTRY, 0, ModelCard(name="card only"), key="model/card only")
    epoch = house.card("b/model", "w1")
    house.card("a", "w2", role="prefill")
    await house.listed("c", name="w3")
    listed = (await house.ask("GET", "/v1/models").done()).json
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["b/model", "c"]
    one = await house.ask("GET", "/v1/models/b/model").done()
    assert one.json == listed["data"][0]
    assert one.json["max_model_len"] == CONTEXT
    tombstone = Tombstone(key="worker/w1", epoch=epoch)
    world.append(REGISTRY, 0, tombstone, key="worker/w1")
    await world.until(lambda: house.models() == ["c"])
    assert (await house.ask("GET", "/v1/models/b/model").done()).status == 503


@in_world
async def test_a_card_without_epoch_serves_nothing_yet(world: World) -> None:
    house = await House.open(world)
    first = WorkerCard(id="w1", slot=0, model="early", config=EngineConfig(model="early"))
    world.append(REGISTRY, 0, first, key="worker/w1")
    await house.listed(name="w2")
    assert house.models() == ["demo"]
    world.append(REGISTRY, 0, replace(first, epoch=0), key="worker/w1")
    await world.until(lambda: house.models() == ["demo", "early"])


@in_world
async def test_an_unknown_model_is_not_found(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = await house.chat(model="nonsense").done()
    assert answer.status == 404
    assert (answer.error["param"], answer.error["code"]) == ("model", "model_not_found")
    assert (await house.ask("GET", "/v1/models/nonsense").done()).status == 404


@in_world
async def test_without_any_worker_no_model_is_unknown(world: World) -> None:
    house = await House.open(world)
    answer = await house.chat().done()
    assert (answer.status, answer.error["code"]) == (503, "no_workers")
    assert answer.headers["retry-after"]


@in_world
async def test_a_model_whose_workers_left_is_unavailable(world: World) -> None:
    house = await House.open(world)
    epoch = house.card("gone", "w1")
    await house.listed("demo", name="w2")
    world.append(REGISTRY, 0, Tombstone(key="worker/w1", epoch=epoch), key="worker/w1")
    await world.until(lambda: house.models() == ["demo"])
    assert (await house.chat(model="gone").done()).status == 503


# --- what goes wrong behind -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("deadline", 408, False),
        ("no_workers", 503, True),
        ("queue_full", 529, True),
        ("invalid", 400, False),
        ("too_large", 413, False),
        ("attempts", 500, False),
        ("cancelled", 499, False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_end_before_the_first_token_is_the_status(
    code: str, status: int, retry: bool, stream: bool
) -> None:
    async def scenario(world: World) -> None:
        house = await House.open(world)
        await house.listed()
        answer = house.chat(stream=stream)
        (request,) = await house.published()
        house.end(request.id, code, message="why")
        await answer.done()
        assert answer.status == status
        assert (answer.error["code"], answer.error["message"]) == (code, "why")
        assert ("retry-after" in answer.headers) == retry
        assert answer.headers["x-kvlane-id"] == request.id
        await world.sleep(5)
        assert house.cancels() == []
        assert house.gateway.parts.streams.open == 0

    play(scenario)


@in_world
async def test_a_request_that_nobody_ends_is_given_up_and_cancelled(world: World) -> None:
    house = await House.open(world, deadline_s=40)
    await house.listed()
    began = world.clock.now()
    answer = await house.chat().done()
    assert answer.status == 408
    assert world.clock.now() - began == pytest.approx(40 + MARGIN_S)
    assert await house.cancelled() == [house.requests()[0].id]


@in_world
async def test_a_worker_that_fails_for_good_is_an_error(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = house.chat()
    (request,) = await house.published()
    Worker(world, request.id).write("", "error")
    assert (await answer.done()).status == 500


@in_world
async def test_one_failure_of_several_answers_fails_all_and_cancels_the_rest(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = house.chat(n=3)
    first, second, third = await house.published(3)
    Worker(world, first.id).write("hello", "stop")
    house.end(second.id, "queue_full")
    assert (await answer.done()).status == 529
    assert await house.cancelled() == [third.id]


@in_world
async def test_a_log_that_takes_nothing_is_unavailable(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    world.faults.next_fates(REQUESTS, *[Fate.LOST] * 1000)
    began = world.clock.now()
    answer = await house.chat().done()
    assert (answer.status, answer.error["code"]) == (503, "log_unavailable")
    assert answer.headers["retry-after"]
    assert world.clock.now() - began < PUBLISH_S + 2
    assert house.gateway.parts.streams.open == 0


@in_world
async def test_an_unacknowledged_request_is_published_again_and_answered_once(world: World) -> None:
    house = await House.open(world)
    await house.staff()
    world.faults.next_fates(REQUESTS, Fate.LOST, Fate.UNREPORTED)
    answer = await house.chat("hello").done()
    assert answer.json["choices"][0]["message"]["content"] == "hello"
    assert len({request.id for request in house.requests()}) == 1


@in_world
async def test_a_request_that_may_have_got_to_the_log_is_cancelled(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    world.faults.next_fates(REQUESTS, Fate.UNREPORTED, *[Fate.LOST] * 40)
    assert (await house.chat().done()).status == 503
    assert await house.cancelled() == [house.requests()[0].id]


@in_world
async def test_beyond_its_bound_the_gateway_refuses(world: World) -> None:
    house = await House.open(world, http_streams=3)
    await house.listed()
    answers = [house.chat(), house.chat(n=2)]
    await house.published(3)
    refused = await house.chat().done()
    assert (refused.status, refused.error["code"]) == (529, "overloaded")
    assert refused.headers["retry-after"]
    for request in house.requests():
        house.end(request.id, "stop")
    assert [(await answer.done()).status for answer in answers] == [200, 200]
    house.chat()
    await house.published(4)


@in_world
async def test_a_broken_record_of_a_reply_is_left_out(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    answer = house.chat()
    (request,) = await house.published()
    lane = lane_of(request.id, world.lanes)
    world.append_raw("responses", lane, Entry(request.id.encode(), b"{", (("t", b"Chunk"),)))
    Worker(world, request.id).write("hello", "stop")
    assert (await answer.done()).json["choices"][0]["message"]["content"] == "hello"


@in_world
async def test_the_tokens_on_the_log_are_those_of_the_prompt(world: World) -> None:
    house = await House.open(world)
    await house.listed()
    house.complete([104, 105])
    (request,) = await house.published()
    assert request.token_ids[:8] == pack_tokens([104, 105])


# --- the description of it all --------------------------------------------------------------------


def references(value: Any) -> list[str]:
    """Every reference in a JSON value."""
    if isinstance(value, list):
        return [found for item in value for found in references(item)]
    if not isinstance(value, dict):
        return []
    here = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return here + [found for item in value.values() for found in references(item)]


@in_world
async def test_the_surface_describes_itself(world: World) -> None:
    house = await House.open(world)
    described = (await house.ask("GET", "/openapi.json").done()).json
    schemas = described["components"]["schemas"]
    for reference in references(described):
        assert reference.rsplit("/", 1)[1] in schemas
    chat = described["paths"]["/v1/chat/completions"]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    assert "messages" in schemas["ChatBody"]["required"]
    for operations in described["paths"].values():
        for operation in operations.values():
            assert "default" in operation["responses"]
            assert "422" not in operation["responses"]
