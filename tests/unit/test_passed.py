"""What is read of bodies that go to their engine as they came, and what becomes of them."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import msgspec
import pytest

from app.preprocess import passed
from app.preprocess.byte_model import ByteModel
from app.preprocess.errors import InvalidPrompt, TooLarge
from app.preprocess.openai import Asked, one_of_n
from app.preprocess.passed import MEDIUM_TOKENS, MOST_BYTES, guessed_tokens
from streams.records import Request

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def requests(kind: Any, fields: dict[str, Any], **headers: str) -> tuple[Request, ...]:
    asked = passed.read(kind, fields, headers, as_is=True)
    return asyncio.run(passed.prepare(asked, ByteModel("m"))).requests


def said(request: Request) -> Any:
    assert request.body is not None
    return msgspec.json.decode(request.body.json)


def test_a_body_stays_as_it_came_but_for_what_others_do() -> None:
    theirs = CHAT | {"model": "m", "tools": [{"odd": 1}], "temperature": 9, "seed": 4, "top_k": "?"}
    ours = {"n": 2, "stream": True, "nvext": {"lora_name": "ada"}, "request_id": "r", "rid": "r"}
    ours |= {"priority": -9}
    (request,) = requests("chat", theirs | ours)
    assert said(request) == theirs
    assert (request.kind, request.token_ids, request.model) == ("chat", b"", "m")
    assert request.hints.lora_name == "ada"
    assert request.sampling.seed == 4
    assert [one_of_n(request, number).sampling.seed for number in range(2)] == [4, 5]


def test_headers_and_limits_are_for_routers_as_well() -> None:
    fields = {"prompt": "a", "max_tokens": 7, "cache_salt": "s"}
    (request,) = requests("completion", fields, **{"x-worker-instance-id": "w1"})
    assert request.hints.backend_instance_id == "w1"
    assert (request.stop.max_tokens, request.cache_salt) == (7, "s")
    (request,) = requests("completion", fields | {"max_tokens": 0})
    assert request.stop.max_tokens is None, "what that means is the engine's to say"


@pytest.mark.parametrize(
    ("prompt", "each"),
    [
        ("a", ["a"]), ([1, 2], [[1, 2]]), (["a"], [["a"]]), (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]), ([], [[]]), (None, [None]),
    ],
)  # fmt: skip
def test_each_of_several_prompts_gets_a_body_of_its_own(prompt: Any, each: list[Any]) -> None:
    made = requests("completion", {"prompt": prompt})
    assert [said(request)["prompt"] for request in made] == each


def test_what_only_engines_in_tokens_do_is_refused_with_its_name() -> None:
    for name, value in (
        ("greed_sampling", True), ("use_raw_prompt", True), ("token_data", [1]),
        ("max_thinking_tokens", 5), ("extra_args", {"a": 1}),
        ("mm_routing_info", {"routing_token_ids": [1]}),
    ):  # fmt: skip
        with pytest.raises(InvalidPrompt, match=rf"nvext\.{name}: is for models that are asked"):
            requests("chat", CHAT | {"nvext": {name: value}})


@pytest.mark.parametrize("name", ["kv_transfer_params", "bootstrap_host", "bootstrap_room"])
def test_no_client_says_what_servers_say_to_each_other(name: str) -> None:
    with pytest.raises(InvalidPrompt, match=f"{name}: is between servers only"):
        requests("chat", CHAT | {name: {"remote_host": "10.0.0.1"}})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": 3}, "model"), ({"n": 129}, "n"), ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"), ({"max_tokens": -1}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_is_read_is_checked(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPrompt) as refused:
        requests("completion", fields)
    assert refused.value.field == field


def test_models_in_tokens_are_asked_as_before() -> None:
    assert isinstance(passed.read("chat", CHAT, as_is=False), Asked)
    tokens = passed.read("tokens", {"token_ids": [1]}, as_is=True)
    assert isinstance(tokens, Asked), "there is no such body"


def test_a_prompt_is_guessed_by_its_size_and_an_image_is_not_text() -> None:
    text = json.dumps(CHAT | {"words": "word " * 400}).encode()
    assert guessed_tokens(text) == len(text) // 4
    image = base64.b64encode(bytes(range(256)) * 400).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    both = json.dumps({"parts": [part, part]}).encode()
    assert 2 * MEDIUM_TOKENS <= guessed_tokens(both) < 2 * MEDIUM_TOKENS + 60


def test_guessing_takes_time_in_proportion_to_a_body_whatever_is_in_it() -> None:
    """With the square of it, this one would take more than a minute."""
    stretches = 40 * 1024
    assert guessed_tokens((b"a" * 1023 + b" ") * stretches) == stretches * 1024 // 4


@pytest.mark.parametrize(
    "over",
    [
        {"prompt": "a" * (MOST_BYTES // 8), "n": 9},
        {"prompt": ["a", "b"] * 5, "suffix": "c" * (MOST_BYTES // 10)},
    ],
)
def test_a_body_that_would_become_more_than_is_taken_at_a_time_is_refused(over: Any) -> None:
    with pytest.raises(TooLarge, match="fewer at a time"):
        requests("completion", over)


def test_many_long_prompts_are_taken_as_long_as_each_goes_out_once() -> None:
    assert len(requests("completion", {"prompt": ["a" * (MOST_BYTES // 64)] * 32})) == 32
