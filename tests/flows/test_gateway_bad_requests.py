"""Tests of invalid requests to the gateway, and their errors, in virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvlane.app.http.server.middleware import BODY_TIMEOUT_S
from kvlane.streams.records import EngineConfig
from tests.harness.gateway_harness import CONTEXT, GatewayHarness
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, run_scenario, scenario_test

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
@scenario_test
async def test_wrong_field_is_named(
    world: MemoryWorld, endpoint: str, body: dict[str, Any], param: str
) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = await harness.send("POST", f"/v1/{endpoint}", body).wait_done()
    assert answer.status == 400, answer.content
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert harness.requests() == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"hi"', b"\xff\xfe", b"[" * 10_000, b'{"a":"\xff"}']
)
@scenario_test
async def test_body_that_is_no_object_is_refused(world: MemoryWorld, body: bytes) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = await harness.send("POST", "/v1/chat/completions", body).wait_done()
    assert answer.status == 400
    assert "body" in answer.error["message"]


@scenario_test
async def test_features_that_the_engine_lacks_are_refused_by_their_field(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_backend(world)
    for field, value in (("logprobs", True), ("response_format", {"type": "json_object"})):
        answer = await harness.chat(**{field: value}).wait_done()
        assert (answer.status, answer.error["param"]) == (400, field)
        assert answer.error["type"] == "invalid_request_error"
    assert harness.requests() == []
    await harness.register_and_wait("able", name="w2")  # its worker's engine lacks nothing
    harness.chat(model="able", logprobs=True)
    assert (await harness.published())[0].output.logprobs == 0


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", ""])
@scenario_test
async def test_body_that_is_not_sent_as_json_is_refused(
    world: MemoryWorld, kind: str | None
) -> None:
    harness = await GatewayHarness.with_card(world)
    headers = {} if kind is None else {"content-type": kind}
    body = json.dumps({"model": "demo", "prompt": "hi"}).encode()
    send_request = HttpExchange(
        harness.gateway.http, "POST", "/v1/completions", body, headers, sends_json=False
    )
    answer = await send_request.wait_done()
    assert (answer.status, answer.error["code"]) == (415, "unsupported_content_type")
    assert "content-type: application/json" in answer.error["message"]
    assert harness.requests() == []


@scenario_test
async def test_json_may_name_its_charset(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await harness.chat(headers=kind, messages=[]).wait_done()).status == 400


@pytest.mark.parametrize(
    ("given", "repeated"),
    [
        ("a", True), ("x" * 128, True), ("two words", True), ("~!", True),
        ("x" * 129, False), ("x" * 10_000, False), ("a\tb", False), ("é", False), ("", False),
        (" a", False),
    ],
)  # fmt: skip
def test_id_that_cannot_be_repeated_is_replaced(given: str, repeated: bool) -> None:
    async def scenario(world: MemoryWorld) -> None:
        harness = await GatewayHarness.open(world)
        answer = await harness.send("GET", "/livez", headers={"x-request-id": given}).wait_done()
        assert (answer.headers["x-request-id"] == given) is repeated
        assert answer.headers["x-request-id"].startswith("req-") is not repeated

    run_scenario(scenario)


@scenario_test
async def test_answer_without_an_id_of_its_client_has_that_of_its_stream(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.chat(n=2).wait_done()
    assert answer.headers["x-kvlane-id"].split(",")[0] == answer.headers["x-request-id"]
    refused = await harness.chat(messages=[]).wait_done()
    other = await harness.chat(messages=[]).wait_done()
    assert refused.headers["x-request-id"] != other.headers["x-request-id"]


@scenario_test
async def test_error_of_the_gateway_has_an_id_and_is_counted(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)

    def broken(_: object) -> None:
        raise RuntimeError("a mistake")

    harness.gateway.parts.served_models.models = broken  # type: ignore[method-assign, assignment]
    answer = harness.send("GET", "/v1/models")
    with pytest.raises(TypeError):
        await answer.task
    assert (answer.status, answer.error["code"]) == (500, "internal")
    assert answer.headers["x-request-id"].startswith("req-")
    page = (await harness.send("GET", "/metrics").wait_done()).content.decode()
    assert '{endpoint="other",status="500"} 1.0' in page


@scenario_test
async def test_prompt_longer_than_the_context_is_refused_with_both_numbers(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = await harness.complete("x" * 2000).wait_done()
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert (
        f"maximum context length is {CONTEXT} tokens; the prompt has 2001"
        in answer.error["message"]
    )
    assert harness.requests() == []


@scenario_test
async def test_errors_contain_no_prompt_text(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = await harness.chat(
        messages=[{"role": "user", "content": {"secret": "secret"}}]
    ).wait_done()
    assert answer.status == 400
    assert b"secret" not in answer.content


@scenario_test
async def test_body_above_the_limit_is_refused_with_both_numbers(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    body = b'{"model":"demo","prompt":"%b"}' % (b"x" * 9_000_000)
    answer = await harness.send("POST", "/v1/completions", body).wait_done()
    assert answer.status == 413
    assert str(len(body)) in answer.error["message"]
    assert str(8 * 1024 * 1024) in answer.error["message"]


@scenario_test
async def test_body_of_unknown_size_is_refused_at_the_limit(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world, http_max_body_bytes=10_000)
    answer = HttpExchange(harness.gateway.http, "POST", "/v1/completions", upload=False)
    for _ in range(11):
        answer.upload(b"x" * 1000, more=True)
    answer.upload(b"")
    await answer.wait_done()
    assert answer.status == 413


@scenario_test
async def test_client_that_expects_100_continue_cannot_send_too_much(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    headers = {"content-length": str(9_000_000), "expect": "100-continue"}
    answer = HttpExchange(
        harness.gateway.http, "POST", "/v1/completions", b"", headers, upload=False
    )
    await answer.wait_done()
    assert answer.status == 413


@scenario_test
async def test_request_that_does_not_fit_into_a_record_is_refused(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    await harness.register_and_wait(config=EngineConfig(model="demo"))
    answer = await harness.complete("x" * 3_000_000).wait_done()
    assert answer.status == 413
    assert answer.error["code"] == "too_large"
    await world.sleep(5)
    assert harness.gateway.parts.streams.open_streams == 0


@scenario_test
async def test_missing_body_is_not_awaited(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    began = world.clock.now()
    answer = HttpExchange(harness.gateway.http, "POST", "/v1/completions", upload=False)
    answer.upload(b"{", more=True)
    await answer.wait_done()
    assert answer.status == 408
    assert world.clock.now() - began == pytest.approx(BODY_TIMEOUT_S)


@scenario_test
async def test_bodies_are_bounded_in_total(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world, http_max_body_bytes=10_000)
    slow = []
    for _ in range(32):
        slow.append(HttpExchange(harness.gateway.http, "POST", "/v1/completions", upload=False))
        slow[-1].upload(b"x" * 10_000, more=True)
    await world.sleep(1)
    refused = await harness.chat().wait_done()
    assert refused.status == 529
    assert refused.headers["retry-after"]
    for exchange in slow:
        exchange.disconnect()
    await world.sleep(1)
    harness.chat()
    await harness.published()


@scenario_test
async def test_unknown_url_and_a_wrong_method_are_errors_in_openai_form(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    unknown = await harness.send("GET", "/v1/nonsense").wait_done()
    assert (unknown.status, unknown.error["type"]) == (404, "invalid_request_error")
    wrong = await harness.send("GET", "/v1/chat/completions").wait_done()
    assert (wrong.status, wrong.error["type"]) == (405, "invalid_request_error")
