"""Whatever is sent: an answer in OpenAI's form, and never an error of the gateway's own."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateways import House
from tests.worlds import World, play

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
REFUSED = {400, 404, 413, 529}


async def _ask(world: World, method: str, url: str, body: Any) -> None:
    house = await House.open(world)
    await house.listed()
    answer = house.ask(method, url, body)
    await world.sleep(0.5)
    if answer.status == 0:  # it was taken: somebody ends it
        for request in house.requests():
            house.end(request.id, "stop")
    await answer.done()
    assert answer.status in REFUSED | {200, 202}, answer.content
    if answer.status in REFUSED:
        assert answer.error["message"]
    assert house.life.failed is None
    assert house.gateway.parts.streams.open == 0


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(endpoint=endpoints, base=right, fields=bodies)
def test_any_object_is_answered(
    endpoint: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    body = json.dumps(base | fields).encode()
    play(lambda world: _ask(world, "POST", endpoint, body))


@settings(max_examples=60)
@given(endpoint=endpoints, body=st.binary(max_size=200))
def test_any_bytes_are_answered(endpoint: str, body: bytes) -> None:
    play(lambda world: _ask(world, "POST", endpoint, body))


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
    play(lambda world: _found(world, url))


async def _found(world: World, url: str) -> None:
    house = await House.open(world)
    answer = await house.ask("GET", url).done()
    assert answer.status in {400, 404}
    assert answer.error["message"]
