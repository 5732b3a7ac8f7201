"""Tests of limits of a body: counted before it is parsed, and of its requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from kvlane.app.preprocess import json_limits
from kvlane.app.preprocess.json_limits import (
    MAX_PARTS,
    MAX_REQUESTS_BYTES,
    MAX_VALUES,
    ParsedJson,
    json_error,
    parse_json,
)
from kvlane.app.preprocess.kafka_prompts import PromptRecord, UnreadablePrompt, read_prompt
from kvlane.app.preprocess.models.byte_model import ByteModel
from kvlane.app.preprocess.prompt_errors import InvalidPrompt, TooLarge
from kvlane.app.preprocess.request_reader import prepare, read_request
from kvlane.app.preprocess.requests.passthrough import (
    BYTES_PER_TOKEN,
    MEDIA_ITEM_TOKENS,
    estimate_tokens,
)
from kvlane.app.preprocess.requests.request_models import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    PassthroughBody,
    TokensBody,
)
from kvlane.app.preprocess.thread_pool import run_now
from kvlane.streams.records import Refused
from tests.harness.body_shapes import BODY_BYTES, SHAPE_NAMES, body_shape

ACCEPTED = {name for name in SHAPE_NAMES if name[0].isdigit()} - {
    "8 192 wrong biases", "128 answers", "128 answers with an echo", "500 000 wrong tokens",
}  # fmt: skip


def text_of(value: Any) -> bytes:
    return b'{"a":' + json.dumps(value).encode() + b"}"


def read_at_once(text: bytes) -> ParsedJson:
    return run_now(parse_json(text))


# --- byte order mark ------------------------------------------------------------------------------

MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("padding", [0, 70_000])
def test_byte_order_mark_before_a_text_is_accepted(padding: int) -> None:
    text = json.dumps({"a": [1, "é" * padding]}).encode()
    assert read_at_once(MARK + text) == read_at_once(text)


@pytest.mark.parametrize("wrong", [b'{"a":nope}', b'{"a":"\xff"}', rb'{"a":"\ud800"}', MARK, b"["])
def test_position_of_an_error_counts_the_mark(wrong: bytes) -> None:
    def why(text: bytes) -> str:
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as failed:
            read_at_once(text)
        return json_error(text, failed.value)

    assert why(MARK + wrong) == why(b"   " + wrong)


def test_prompt_on_kafka_may_begin_with_a_byte_order_mark() -> None:
    prompt = b'{"id": "a", "body": {"messages": [{"role": "user", "content": "hi"}]}}'
    sent = read_prompt(None, MARK + prompt, 0)
    assert isinstance(sent, PromptRecord)


# --- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item", [b"{}", b"[]", b'""', b'{"a":1}', b"[[[]]]", b"1", b"null", b"1.5", b'",{["']
)
def test_too_many_items_are_refused_before_any_is_made(
    item: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(_: bytes) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(msgspec.json, "decode", decode)
    text = b'{"a":[' + b",".join([item] * (MAX_VALUES + 1)) + b"]}"
    with pytest.raises(TooLarge, match=rf"({MAX_PARTS}|{MAX_VALUES}) are allowed"):
        read_at_once(text)


@pytest.mark.parametrize("nested", [b"[", b'{"a":'])
def test_deeply_nested_body_is_refused(nested: bytes) -> None:
    with pytest.raises(TooLarge):
        read_at_once(nested * (MAX_PARTS + 1))


@pytest.mark.parametrize("number", [b"9" * 101, b"0." + b"1" * 200, b"-" + b"7" * 9000])
def test_long_numbers_are_refused(number: bytes) -> None:
    text = b'{"a":"' + b"x" * json_limits.UNCHECKED_BYTES + b'","b":' + number + b"}"
    with pytest.raises(TooLarge, match="more than 100 digits"):
        read_at_once(text)


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "{",
        "[",
        '"',
        "\\",
        '\\"',
        '"\\',
        '",',
        '{"a":[1,2]}',
        "9" * 200,
        '\\\\"',
        "a\n",
        "\x01",
    ],
)
def test_text_may_have_any_characters(text: str) -> None:
    output = {"a": text * (2 * MAX_VALUES // len(text)), "b": [1, 2, 3]}
    body = json.dumps(output).encode()
    assert read_at_once(body).value == output


@given(
    st.recursive(
        st.integers() | st.text(alphabet='ab,{["\\9', max_size=6) | st.none() | st.floats(0, 1),
        lambda inner: (
            st.lists(inner, max_size=6)
            | st.dictionaries(st.text(alphabet='ab,{["\\', max_size=4), inner, max_size=4)
        ),
        max_leaves=30,
    )
)
@settings(max_examples=300, deadline=None)
def test_counts_are_those_of_the_value(value: Any) -> None:
    """With each limit at what there is, it passes; with one less of either, it does not."""
    text = json.dumps([value]).encode()
    parts, commas = counted([value])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "UNCHECKED_BYTES", 0)
        patch.setattr(json_limits, "MAX_PARTS", parts)
        patch.setattr(json_limits, "MAX_VALUES", commas + 1)
        patch.setattr(json_limits, "MAX_RENDERED_VALUES", 0)
        assert read_at_once(text) == ParsedJson([value], commas + 1)
        patch.setattr(json_limits, "MAX_PARTS", parts - 1)
        with pytest.raises(TooLarge):
            read_at_once(text)
        patch.setattr(json_limits, "MAX_PARTS", parts)
        patch.setattr(json_limits, "MAX_VALUES", commas)
        with pytest.raises(TooLarge):
            read_at_once(text)


def counted(value: Any) -> tuple[int, int]:
    """Objects, lists and strings of a value; and the commas that its JSON has."""
    if isinstance(value, str):
        return 1, 0
    if isinstance(value, dict):
        inner = [counted(item) for pair in value.items() for item in pair]
    elif isinstance(value, list):
        inner = [counted(item) for item in value]
    else:
        return 0, 0
    commas = max(0, len(value) - 1)
    return 1 + sum(parts for parts, _ in inner), commas + sum(more for _, more in inner)


def test_large_bodies_are_read_in_steps_and_small_ones_at_once() -> None:
    assert len(list(parse_json(b'{"a":1}'))) == 0
    assert len(list(parse_json(text_of("a" * json_limits.UNCHECKED_BYTES)))) >= 3


# --- the models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [ChatBody, CompletionBody, TokensBody, EmbeddingBody, PassthroughBody]
)
def test_every_list_and_object_of_a_body_is_bounded(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    assert list(_unbounded(schema, model.__name__)) == []


def _unbounded(schema: Any, path: str) -> Iterator[str]:
    if isinstance(schema, list):
        for inner in schema:
            yield from _unbounded(inner, path)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "array" and "maxItems" not in schema:
        yield path
    is_map = schema.get("type") == "object" and "properties" not in schema
    if is_map and "maxProperties" not in schema:
        yield path
    for name, inner in schema.items():
        yield from _unbounded(inner, f"{path}.{name}")


@pytest.mark.parametrize("name", sorted(SHAPE_NAMES))
def test_every_shape_is_accepted_or_refused_by_a_short_error(name: str) -> None:
    shape = body_shape(name, "demo")
    assert len(shape.body) <= BODY_BYTES
    value = b'{"id":"a","kind":"%s","body":%s}' % (shape.kind.encode(), shape.body)
    output = read_prompt(b"a", value, 0)
    assert not isinstance(output, UnreadablePrompt)
    if isinstance(output, Refused):
        assert len(output.message) < 1000
    assert isinstance(output, PromptRecord) or name not in ACCEPTED


def test_one_wrong_item_ends_the_validation_of_a_list() -> None:
    with pytest.raises(InvalidPrompt) as refused:
        read_request("chat", {"messages": [1] * 1000}, as_is=False)
    assert str(refused.value).count("messages") == 1


# --- what is repeated -----------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["logit_bias", "nvext.routing_constraints.preferred_taints"])
def test_long_client_name_is_truncated_and_escaped(field: str) -> None:
    fields: Any = {"\x1b[2J\n" + "S" * 100_000: "wrong"}
    for outer in reversed(field.split(".")):
        fields = {outer: fields}
    with pytest.raises(InvalidPrompt) as refused:
        read_request("completion", {"prompt": "a"} | fields, as_is=False)
    assert refused.value.field.startswith(f"{field}.\\x1b[2J\\nSSSS")
    assert len(str(refused.value)) < 200
    assert str(refused.value).isprintable()
    value = json.dumps({"id": "a", "kind": "completion", "body": {"prompt": "a"} | fields})
    output = read_prompt(b"a", value.encode(), 0)
    assert isinstance(output, Refused)
    assert len(output.message) < 200


# --- what a body becomes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": "AAAA" * 1_900_000},
        {"nvext": {"extra_args": {"a": "b" * 2**20}}},
        {"nvext": {"agent_context": {"a": "b" * 2**20}}},
        {"mm_processor_kwargs": {"a": "b" * 2**20}},
        {"guided_regex": "b" * 2**20},
        {"prompt": list(range(100_000))},
        {"prompt": "b" * 2**19},
    ],
)
async def test_size_of_one_decoded_body_is_bounded(fields: dict[str, Any]) -> None:
    fields = {"model": "m", "prompt": "a", "n": 128} | fields
    sent = read_request("completion", fields, as_is=False)
    with pytest.raises(TooLarge, match=str(MAX_REQUESTS_BYTES)):
        await prepare(sent, ByteModel("m"))
    sent = read_request("completion", fields | {"n": 1}, as_is=False)
    assert len((await prepare(sent, ByteModel("m"))).requests) == 1


async def test_shared_parts_count_for_each_prompt() -> None:
    fields = {"prompt": ["a"] * 128, "prompt_embeds": "AAAA" * 2**17}
    sent = read_request("completion", fields, as_is=False)
    with pytest.raises(TooLarge, match=str(MAX_REQUESTS_BYTES)):
        await prepare(sent, ByteModel("m"))


# --- guesses --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("a /\n.="), st.integers(1, 2100)), max_size=12))
def test_token_estimate_equals_that_of_the_pattern(runs: list[tuple[str, int]]) -> None:
    body = "".join(char * count for char, count in runs).encode()
    stretch = rb"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/=_-]{1024,}"
    text, media = re.subn(stretch, b"", body)
    assert estimate_tokens(body) == len(text) // BYTES_PER_TOKEN + media * MEDIA_ITEM_TOKENS
