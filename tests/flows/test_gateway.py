"""Tests of the gateway in virtual time: HTTP on one side, the log on the other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.http.openai.active_streams import PUBLISH_TIMEOUT_S
from kvlane.app.http.openai.gateway_deps import DEADLINE_MARGIN_S
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.ports import Entry
from kvlane.streams.records import EngineConfig, ModelCard, Tombstone, WorkerCard
from kvlane.streams.topics import REGISTRY, REQUESTS, lane_of
from tests.harness.gateway_harness import CONTEXT, GatewayHarness
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker

ELECTION_S = 13.0
"""A dead leader's session of 9 s, an election, and the next try of a client."""

# --- answers --------------------------------------------------------------------------------------


@scenario_test
async def test_chat_is_answered_whole(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hello").wait_done()
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    assert body["id"] == answer.headers["x-kvlane-id"] == harness.requests()[0].id
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo"
    assert body["created"] == world.clock.wall_ms() // 1000
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 5


@scenario_test
async def test_chat_is_answered_while_it_is_made(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = harness.chat("hello", stream=True)
    await world.wait_until(lambda: answer.text == "he")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-kvlane-id"] == harness.requests()[0].id
    await answer.wait_done()
    assert answer.text == "hello"
    assert answer.events[-1] == "[DONE]"
    assert answer.events[-2]["choices"][0]["finish_reason"] == "stop"
    assert answer.positions == [1, 2, 3, 4, 5]
    assert all("usage" not in event for event in answer.events[:-1])


@scenario_test
async def test_usage_is_sent_on_request(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat(
        "hey", stream=True, stream_options={"include_usage": True}
    ).wait_done()
    *chunks, total, done = answer.events
    assert done == "[DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert total["choices"] == []
    assert total["usage"]["completion_tokens"] == 3


@scenario_test
async def test_text_is_completed(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.complete("abc", max_tokens=7).wait_done()
    assert answer.json["object"] == "text_completion"
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcabca", "length")
    stream = await harness.complete("abc", max_tokens=7, stream=True).wait_done()
    assert stream.text == "abcabca"
    assert stream.events[-1] == "[DONE]"


@scenario_test
async def test_echo_precedes_the_answer(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.complete("abc ", echo=True, max_tokens=2).wait_done()
    assert answer.json["choices"][0]["text"] == "abc ab"
    stream = await harness.complete("abc ", echo=True, max_tokens=2, stream=True).wait_done()
    assert stream.text == "abc ab"
    assert answer.json["usage"]["completion_tokens"] == 2


@scenario_test
async def test_several_prompts_are_answered_in_their_order(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.complete(["ab", "cd"], n=2, max_tokens=3).wait_done()
    assert [c["text"] for c in answer.json["choices"]] == ["aba", "aba", "cdc", "cdc"]
    assert [c["index"] for c in answer.json["choices"]] == [0, 1, 2, 3]
    prompts = [len(r.token_ids) // 4 for r in harness.requests()]
    assert answer.json["usage"]["prompt_tokens"] == sum(prompts) // 2


@scenario_test
async def test_hints_in_headers_are_passed_on(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    harness.chat("hey", {"X-Worker-Instance-Id": "w1"})
    (request,) = await harness.published()
    assert request.hints.backend_instance_id == "w1"


@scenario_test
async def test_several_answers_are_several_requests(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hey", n=3).wait_done()
    ids = [request.id for request in harness.requests()]
    assert sorted(answer.headers["x-kvlane-id"].split(",")) == sorted(ids)
    assert len(set(ids)) == 3
    assert [c["index"] for c in answer.json["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in answer.json["choices"]] == ["hey"] * 3
    assert answer.json["usage"]["completion_tokens"] == 9


@scenario_test
async def test_several_answers_are_streamed_together(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hey", n=2, stream=True).wait_done()
    texts = {0: "", 1: ""}
    for event in answer.events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "hey", 1: "hey"}
    last = answer.content.decode().rpartition("\nid: ")[2]
    assert last.startswith("3,3\n"), "a position for each answer"


@scenario_test
async def test_each_of_several_answers_has_its_own_seed(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    harness.chat("hey", n=3, seed=7)
    seeds = [request.sampling.seed for request in await harness.published(3)]
    assert len(set(seeds)) == 3


@scenario_test
async def test_published_request_has_the_options_of_the_body(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world, deadline_s=50)
    asked_ms = world.clock.wall_ms()
    harness.chat("hey", max_tokens=9, temperature=0.5, seed=3)
    (request,) = await harness.published()
    (record,) = world.records(REQUESTS, lane_of(request.id, world.lanes))
    assert record.key == request.id.encode()
    assert request.model == "demo"
    assert request.deadline_s == 50
    assert request.received_ms == asked_ms
    assert (request.stop.max_tokens, request.sampling.temperature) == (9, 0.5)
    assert request.token_ids


@scenario_test
async def test_id_that_a_client_gives_its_request_comes_back(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat("hey", {"X-Request-Id": "mine-17"}).wait_done()
    assert answer.headers["x-request-id"] == "mine-17"
    failed = await harness.chat("hey", {"x-request-id": "mine-18"}, messages=[]).wait_done()
    assert failed.headers["x-request-id"] == "mine-18"


@partial(scenario_test, lanes=8)
async def test_ids_belong_to_the_lanes_of_the_gateway(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world, gateway_count=3, gateway_index=1)
    for _ in range(20):
        harness.chat("hey")
    lanes = {lane_of(request.id, 8) % 3 for request in await harness.published(20)}
    assert lanes == {1}
    assert sorted(harness.gateway.parts.streams._replies._live.lanes) == [1, 4, 7]


# --- models ---------------------------------------------------------------------------------------


@scenario_test
async def test_only_models_with_a_live_worker_are_listed(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    world.append(REGISTRY, 0, ModelCard(name="card only"), key="model/card only")
    epoch = harness.register_worker("b/model", "w1")
    harness.register_worker("a", "w2", role="prefill")
    await harness.register_and_wait("c", name="w3")
    listed = (await harness.send("GET", "/v1/models").wait_done()).json
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["b/model", "c"]
    one = await harness.send("GET", "/v1/models/b/model").wait_done()
    assert one.json == listed["data"][0]
    assert one.json["max_model_len"] == CONTEXT
    tombstone = Tombstone(key="worker/w1", epoch=epoch)
    world.append(REGISTRY, 0, tombstone, key="worker/w1")
    await world.wait_until(lambda: harness.models() == ["c"])
    assert (await harness.send("GET", "/v1/models/b/model").wait_done()).status == 503


@scenario_test
async def test_card_without_epoch_serves_nothing_yet(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    first = WorkerCard(id="w1", slot=0, model="early", config=EngineConfig(model="early"))
    world.append(REGISTRY, 0, first, key="worker/w1")
    await harness.register_and_wait(name="w2")
    assert harness.models() == ["demo"]
    world.append(REGISTRY, 0, replace(first, epoch=0), key="worker/w1")
    await world.wait_until(lambda: harness.models() == ["demo", "early"])


@scenario_test
async def test_unknown_model_is_not_found(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = await harness.chat(model="nonsense").wait_done()
    assert answer.status == 404
    assert (answer.error["param"], answer.error["code"]) == ("model", "model_not_found")
    assert answer.error["message"] == "the model 'nonsense' does not exist; available: demo"
    assert (await harness.send("GET", "/v1/models/nonsense").wait_done()).status == 404


@scenario_test
async def test_answer_beyond_the_context_has_the_code_of_openai(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = await harness.chat("x" * 500, max_tokens=100).wait_done()
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["param"] == "max_tokens"
    assert answer.error["message"].endswith("the prompt has 502 and the answer may have 100")


@scenario_test
async def test_unsupported_openai_endpoints_name_a_supported_one(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    for path in ("/v1/conversations", "/v1/threads/t1", "/v1/audio/speech"):
        answer = await harness.send("POST", path, {"model": "demo", "input": "hi"}).wait_done()
        assert (answer.status, answer.error["code"]) == (404, "unknown_url")
        assert "is not offered; use /v1/chat/completions" in answer.error["message"]


@scenario_test
async def test_url_below_files_or_batches_names_those_that_there_are(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    for path, hint in (
        ("/v1/files/a/b", "/v1/files/FILE_ID/content"),
        ("/v1/files/a/content/b", "/v1/files/FILE_ID/content"),
        ("/v1/batches/a/results", "/v1/batches/BATCH_ID/cancel"),
    ):
        answer = await harness.send("GET", path).wait_done()
        assert (answer.status, answer.error["code"]) == (404, "unknown_url")
        assert hint in answer.error["message"]
        assert "not offered" not in answer.error["message"]


@scenario_test
async def test_path_with_another_prefix_is_corrected(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    for prefix in ("", "/v1/", "//v1", "/v1/v1", "/openai/v1", "/openai/deployments/demo"):
        path = f"{prefix}/chat/completions"
        answer = await harness.send("POST", path, {"model": "demo"}).wait_done()
        assert (answer.status, answer.error["code"]) == (404, "unknown_url")
        assert "use /v1/chat/completions" in answer.error["message"]


@scenario_test
async def test_without_any_worker_no_model_is_unknown(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    answer = await harness.chat().wait_done()
    assert (answer.status, answer.error["code"]) == (503, "no_workers")
    assert answer.headers["retry-after"]


@scenario_test
async def test_model_whose_workers_left_is_unavailable(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    epoch = harness.register_worker("gone", "w1")
    await harness.register_and_wait("demo", name="w2")
    world.append(REGISTRY, 0, Tombstone(key="worker/w1", epoch=epoch), key="worker/w1")
    await world.wait_until(lambda: harness.models() == ["demo"])
    assert (await harness.chat(model="gone").wait_done()).status == 503


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
@scenario_test
async def test_end_before_the_first_token_is_the_status(
    world: MemoryWorld, code: str, status: int, retry: bool, stream: bool
) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat(stream=stream)
    (request,) = await harness.published()
    harness.end_request(request.id, code, message="why")
    await answer.wait_done()
    assert answer.status == status
    assert (answer.error["code"], answer.error["message"]) == (code, "why")
    assert ("retry-after" in answer.headers) == retry
    assert answer.headers["x-kvlane-id"] == request.id
    await world.sleep(5)
    assert harness.cancels() == []
    assert harness.gateway.parts.streams.open_streams == 0


@scenario_test
async def test_request_without_an_end_is_cancelled_after_its_deadline(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world, deadline_s=40)
    began = world.clock.now()
    answer = await harness.chat().wait_done()
    assert answer.status == 408
    assert world.clock.now() - began == pytest.approx(40 + DEADLINE_MARGIN_S)
    assert await harness.cancelled() == [harness.requests()[0].id]


@scenario_test
async def test_worker_that_fails_for_good_is_an_error(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat()
    (request,) = await harness.published()
    Worker(world, request.id).write("", "error")
    assert (await answer.wait_done()).status == 500


@scenario_test
async def test_one_failure_of_several_answers_fails_all_and_cancels_the_rest(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat(n=3)
    first, second, third = await harness.published(3)
    Worker(world, first.id).write("hello", "stop")
    harness.end_request(second.id, "queue_full")
    assert (await answer.wait_done()).status == 529
    assert await harness.cancelled() == [third.id]


@scenario_test
async def test_log_that_accepts_nothing_is_unavailable(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    world.faults.next_fates(REQUESTS, *[AppendFate.LOST] * 1000)
    began = world.clock.now()
    answer = await harness.chat().wait_done()
    assert (answer.status, answer.error["code"]) == (503, "log_unavailable")
    assert answer.headers["retry-after"]
    assert world.clock.now() - began < PUBLISH_TIMEOUT_S + 2
    assert harness.gateway.parts.streams.open_streams == 0


@scenario_test
async def test_request_waits_until_a_new_leader_takes_the_place_of_a_dead_one(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_backend(world)
    world.faults.next_fates(REQUESTS, *[AppendFate.LOST] * 1000)
    answer = harness.chat("hello")
    await world.sleep(ELECTION_S)
    world.faults.fates.clear()
    assert (await answer.wait_done()).status == 200


@scenario_test
async def test_unacknowledged_request_is_published_again_and_answered_once(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_backend(world)
    world.faults.next_fates(REQUESTS, AppendFate.LOST, AppendFate.UNREPORTED)
    answer = await harness.chat("hello").wait_done()
    assert answer.json["choices"][0]["message"]["content"] == "hello"
    assert len({request.id for request in harness.requests()}) == 1


@scenario_test
async def test_possibly_appended_request_is_cancelled(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    world.faults.next_fates(REQUESTS, AppendFate.UNREPORTED, *[AppendFate.LOST] * 40)
    assert (await harness.chat().wait_done()).status == 503
    assert await harness.cancelled() == [harness.requests()[0].id]


@scenario_test
async def test_gateway_refuses_requests_beyond_its_bound(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world, http_max_streams=3)
    answers = [harness.chat(), harness.chat(n=2)]
    await harness.published(3)
    refused = await harness.chat().wait_done()
    assert (refused.status, refused.error["code"]) == (529, "overloaded")
    assert refused.headers["retry-after"]
    for request in harness.requests():
        harness.end_request(request.id, "stop")
    assert [(await answer.wait_done()).status for answer in answers] == [200, 200]
    harness.chat()
    await harness.published(4)


@scenario_test
async def test_broken_record_of_a_reply_is_skipped(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat()
    (request,) = await harness.published()
    lane = lane_of(request.id, world.lanes)
    world.append_raw("responses", lane, Entry(request.id.encode(), b"{", (("t", b"Chunk"),)))
    Worker(world, request.id).write("hello", "stop")
    assert (await answer.wait_done()).json["choices"][0]["message"]["content"] == "hello"


@scenario_test
async def test_tokens_on_the_log_are_those_of_the_prompt(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    harness.complete([104, 105])
    (request,) = await harness.published()
    assert request.token_ids[:8] == pack_tokens([104, 105])


# --- the description of it all --------------------------------------------------------------------


def references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in references(item)]
    if not isinstance(value, dict):
        return []
    here = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return here + [found for item in value.values() for found in references(item)]


@scenario_test
async def test_openapi_document_is_served(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    described = (await harness.send("GET", "/openapi.json").wait_done()).json
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
