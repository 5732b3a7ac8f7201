"""Tests of random requests to the gateway: an answer in OpenAI's form, and never an internal
error."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, run_scenario
from tests.harness.schema_values import values_of_schema

FIELDS = (
    "model", "messages", "prompt", "n", "stream", "stream_options", "max_tokens", "stop", "seed",
    "temperature", "logprobs", "top_logprobs", "logit_bias", "response_format", "tools",
    "tool_choice", "nvext", "echo", "suffix", "best_of", "user", "min_tokens", "stop_token_ids",
    "max_completion_tokens", "documents", "chat_template_kwargs", "cache_salt", "guided_json",
)  # fmt: skip
PARTS = ("role", "content", "type", "text", "user", "function", "name", "include_usage", "a")

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(("demo", "user", "auto", "required", "text", "json_object", ""))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(PARTS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=8)
right = st.sampled_from(
    (
        {},
        {"model": "demo"},
        {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
        {"model": "demo", "prompt": "hi"},
    )
)
endpoints = st.sampled_from(("/v1/chat/completions", "/v1/completions"))
UNPLACEABLE = {"pinned_gone", "none_eligible"}
REFUSED = {400, 404, 413, 529}


async def _ask(world: MemoryWorld, method: str, url: str, body: Any) -> None:
    harness = await GatewayHarness.with_card(world)
    answer = harness.send(method, url, body)
    await world.sleep(0.5)
    if answer.status == 0:  # it was taken: somebody ends it
        for request in harness.requests():
            harness.end_request(request.id, "stop")
    await answer.wait_done()
    assert answer.status in REFUSED | {200, 202}, answer.content
    if answer.status in REFUSED:
        assert answer.error["message"]
    assert harness.ctx.error is None
    assert harness.gateway.parts.streams.open_streams == 0


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(endpoint=endpoints, base=right, fields=bodies)
def test_any_object_is_answered(
    endpoint: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    body = json.dumps(base | fields).encode()
    run_scenario(lambda world: _ask(world, "POST", endpoint, body))


@settings(max_examples=60)
@given(endpoint=endpoints, body=st.binary(max_size=200))
def test_any_bytes_are_answered(endpoint: str, body: bytes) -> None:
    run_scenario(lambda world: _ask(world, "POST", endpoint, body))


@settings(max_examples=60)
@given(
    name=st.text(max_size=250),
    query=st.dictionaries(
        st.sampled_from(("from", "form", "stream", "include_usage")),
        st.sampled_from(("", "0", "1", "true", "-1", "x", "9" * 30, "completion", "²")),
    ),
)
def test_any_stream_is_answered(name: str, query: dict[str, str]) -> None:
    url = f"/v1/streams/{quote(name, safe='', errors='replace')}?{urlencode(query)}"
    run_scenario(lambda world: _found(world, url))


def _documented() -> tuple[dict[str, Any], dict[str, st.SearchStrategy[Any]]]:
    """The document, and by path the bodies that are right by it."""
    found: list[dict[str, Any]] = []

    async def scenario(world: MemoryWorld) -> None:
        harness = await GatewayHarness.open(world)
        found.append((await harness.send("GET", "/openapi.json").wait_done()).json)

    run_scenario(scenario)
    (document,) = found
    schemas = document["components"]["schemas"]
    names = {"/v1/chat/completions": "ChatBody", "/v1/completions": "CompletionBody"}
    return document, {
        path: values_of_schema(schemas[name], schemas) for path, name in names.items()
    }


DOCUMENT, BODIES = _documented()


async def _answered(world: MemoryWorld, url: str, body: Any) -> None:
    """The answer to a body, of a worker where it is taken, as the document describes it."""
    harness = await GatewayHarness.with_backend(world)
    answer = await harness.send("POST", url, body).wait_done()
    got = DOCUMENT["paths"][url]["post"]["responses"][str(answer.status)]
    kind = answer.headers["content-type"]
    schema = got["content"][kind]["schema"] | {"components": DOCUMENT["components"]}
    whole = answer.content.decode() if kind == "text/event-stream" else answer.json
    assert list(Draft202012Validator(schema).iter_errors(whole)) == [], answer.content
    # Pins on workers that are not there, and taints that none has, are told from what is broken.
    assert answer.status < 500 or answer.error["code"] in UNPLACEABLE, answer.content
    assert harness.ctx.error is None


@pytest.mark.parametrize("url", BODIES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_valid_requests_get_documented_responses(url: str, data: st.DataObject) -> None:
    body = data.draw(BODIES[url])
    served = st.sampled_from(("demo", "demo", "demo", body["model"]))
    body = body | {"model": data.draw(served)}
    run_scenario(lambda world: _answered(world, url, json.dumps(body).encode()))


async def _found(world: MemoryWorld, url: str) -> None:
    harness = await GatewayHarness.open(world)
    answer = await harness.send("GET", url).wait_done()
    assert answer.status in {400, 404}
    assert answer.error["message"]
