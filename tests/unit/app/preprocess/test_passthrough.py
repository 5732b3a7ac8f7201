"""Tests of passthrough requests: the fields that are read, and the forwarded body."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import msgspec
import pytest

from kvlane.app.preprocess.json_limits import MAX_REQUESTS_BYTES
from kvlane.app.preprocess.models.byte_model import ByteModel
from kvlane.app.preprocess.prompt_errors import InvalidPrompt, TooLarge
from kvlane.app.preprocess.request_reader import prepare, read_request
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest, nth_request
from kvlane.app.preprocess.requests.passthrough import (
    MEDIA_ITEM_TOKENS,
    PassthroughRequest,
    estimate_tokens,
)
from kvlane.streams.records import ModelCard
from kvlane.streams.request import Request

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOKENS = {"token_ids": [1]}


def requests(kind: Any, fields: dict[str, Any], **headers: str) -> tuple[Request, ...]:
    sent = read_request(kind, fields, headers, as_is=True)
    return asyncio.run(prepare(sent, ByteModel("m"))).requests


def output(request: Request) -> Any:
    assert request.body is not None
    return msgspec.json.decode(request.body.json)


def test_body_is_unchanged_except_for_fields_of_kvlane() -> None:
    theirs = CHAT | {"model": "m", "tools": [{"odd": 1}], "temperature": 9, "seed": 4, "top_k": "?"}
    ours = {"n": 2, "stream": True, "nvext": {"lora_name": "ada"}, "request_id": "r", "rid": "r"}
    ours |= {"priority": -9}
    (request,) = requests("chat", theirs | ours)
    assert output(request) == theirs
    assert (request.kind, request.token_ids, request.model) == ("chat", b"", "m")
    assert request.hints.lora_name == "ada"
    assert request.sampling.seed == 4
    assert [nth_request(request, number).sampling.seed for number in range(2)] == [4, 5]


def test_headers_and_limits_are_for_routers_as_well() -> None:
    fields = {"prompt": "a", "max_tokens": 7, "cache_salt": "s"}
    (request,) = requests("completion", fields, **{"x-worker-instance-id": "w1"})
    assert request.hints.backend_instance_id == "w1"
    assert (request.stop.max_tokens, request.cache_salt) == (7, "s")
    (request,) = requests("completion", fields | {"max_tokens": 0})
    assert request.stop.max_tokens is None, "what that means is the engine's to say"


def test_embeddings_keep_their_model_checksum_and_annotations() -> None:
    fields = {"model": "m", "input": ["a"], "nvext": {"annotations": ["x", "k:v"]}}
    sent = read_request("embedding", fields, as_is=True)
    assert isinstance(sent, PassthroughRequest)
    (request,) = sent.requests(ModelCard(name="m", checksum="aa", kind="embedding"))
    assert (request.kind, request.model, request.mdc_sum) == ("embedding", "m", "aa")
    assert request.annotations == ("x", "k:v")
    assert output(request) == {"model": "m", "input": ["a"]}


@pytest.mark.parametrize(
    ("prompt", "each"),
    [
        ("a", ["a"]), ([1, 2], [[1, 2]]), (["a"], [["a"]]), (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]), ([], [[]]), (None, [None]),
    ],
)  # fmt: skip
def test_each_of_several_prompts_gets_a_body_of_its_own(prompt: Any, each: list[Any]) -> None:
    made = requests("completion", {"prompt": prompt})
    assert [output(request)["prompt"] for request in made] == each


def test_option_of_tokenized_models_is_refused_by_name() -> None:
    for name, value in (
        ("greed_sampling", True), ("use_raw_prompt", True), ("token_data", [1]),
        ("max_thinking_tokens", 5), ("extra_args", {"a": 1}),
        ("mm_routing_info", {"routing_token_ids": [1]}),
    ):  # fmt: skip
        with pytest.raises(InvalidPrompt, match=rf"nvext\.{name}: is for models that are asked"):
            requests("chat", CHAT | {"nvext": {name: value}})


@pytest.mark.parametrize("as_is", [False, True])
@pytest.mark.parametrize("name", ["kv_transfer_params", "bootstrap_host", "bootstrap_room"])
@pytest.mark.parametrize(
    "path",
    ["", "nvext.extra_args.", "extra_args.", "vllm_xargs.", "extra_body.",
     "extra_body.vllm_xargs.", "nvext.extra_args.extra_args."],
)  # fmt: skip
def test_no_client_sets_a_field_between_servers(path: str, name: str, *, as_is: bool) -> None:
    fields: dict[str, Any] = {name: {"remote_host": "10.0.0.1"}}
    for outer in reversed(path.split(".")[:-1]):
        fields = {outer: fields}
    for kind, body in (("chat", CHAT), ("completion", {"prompt": "a"}), ("tokens", TOKENS)):
        with pytest.raises(InvalidPrompt) as refused:
            read_request(kind, body | fields, as_is=as_is)  # type: ignore[arg-type]
        assert refused.value.field == path + name
        assert "is between servers only" in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": 3}, "model"), ({"n": 129}, "n"), ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"), ({"max_tokens": -1}, "max_tokens"),
    ],
)  # fmt: skip
def test_invalid_read_fields_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPrompt) as refused:
        requests("completion", fields)
    assert refused.value.field == field


def test_tokenized_models_get_tokenized_requests() -> None:
    assert isinstance(read_request("chat", CHAT, as_is=False), OpenAIRequest)
    tokens = read_request("tokens", {"token_ids": [1]}, as_is=True)
    assert isinstance(tokens, OpenAIRequest), "there is no such body"


def test_prompt_is_estimated_by_its_size_and_an_image_is_not_text() -> None:
    text = json.dumps(CHAT | {"words": "word " * 400}).encode()
    assert estimate_tokens(text) == len(text) // 4
    image = base64.b64encode(bytes(range(256)) * 400).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    both = json.dumps({"parts": [part, part]}).encode()
    assert 2 * MEDIA_ITEM_TOKENS <= estimate_tokens(both) < 2 * MEDIA_ITEM_TOKENS + 60


def test_estimate_takes_linear_time_for_any_body() -> None:
    """With the square of it, this one would take more than a minute."""
    stretches = 40 * 1024
    assert estimate_tokens((b"a" * 1023 + b" ") * stretches) == stretches * 1024 // 4


@pytest.mark.parametrize(
    "over",
    [
        {"prompt": "a" * (MAX_REQUESTS_BYTES // 8), "n": 9},
        {"prompt": ["a", "b"] * 5, "suffix": "c" * (MAX_REQUESTS_BYTES // 10)},
    ],
)
def test_body_that_expands_beyond_the_bound_is_refused(over: Any) -> None:
    with pytest.raises(TooLarge, match="fewer at a time"):
        requests("completion", over)


def test_many_long_prompts_are_accepted_while_each_is_sent_once() -> None:
    assert len(requests("completion", {"prompt": ["a" * (MAX_REQUESTS_BYTES // 64)] * 32})) == 32
