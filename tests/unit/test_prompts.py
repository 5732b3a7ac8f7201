"""What a client writes, as a router reads it, or a refusal that names the field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.preprocess.kafka_prompts import (
    FindModel,
    PromptRecord,
    UnreadablePrompt,
    read_prompt,
    to_request,
)
from app.preprocess.models.byte_model import ByteModel, Model
from app.preprocess.prompt_errors import BadModel
from app.preprocess.text.byte_level import ASSISTANT, USER, render_chat
from streams import ports
from streams.codecs import encode, unpack_tokens
from streams.records import Cancel, Refused
from streams.request import Request, SamplingOptions, StopConditions

CHAT = {"messages": [{"role": "user", "content": "hi"}]}

Answer = Request | Cancel | Refused | UnreadablePrompt


def served(context: int | None = None, name: str = "m") -> FindModel:
    """Whatever model is asked for is this one."""

    async def find(_: str) -> Model:
        return ByteModel(name, context)

    return find


def said(key: bytes | None, value: bytes | None, find: FindModel) -> Answer:
    question = read_prompt(key, value, 1234)
    if isinstance(question, PromptRecord):
        return asyncio.run(to_request(question, find, 60.0))
    return question


def ask(kind: str = "chat", body: Any = None, find: FindModel | None = None, **over: Any) -> Answer:
    fields = {"id": "a", "kind": kind, "body": CHAT if body is None else body} | over
    return said(b"a", json.dumps(fields).encode(), find or served())


def tokens_of(asked: object) -> list[int]:
    assert isinstance(asked, Request), asked
    return list(unpack_tokens(asked.token_ids))


def refusal_of(asked: object) -> str:
    if isinstance(asked, UnreadablePrompt):
        asked = asked.refusal
    assert isinstance(asked, Refused), asked
    assert (asked.id, asked.code) == ("a", "invalid")
    return asked.message


def test_a_chat_is_rendered_and_its_options_are_kept() -> None:
    body = CHAT | {
        "model": "m", "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9,
        "top_k": 3, "seed": 11, "ignore_eos": True, "stream": True, "user": "u", "n": 1,
    }  # fmt: skip
    asked = ask(body=body, tenant="t", deadline_s=5)
    assert asked == Request(
        id="a", model="m", token_ids=asked.token_ids, tenant="t", deadline_s=5, received_ms=1234,
        queued_ms=1234,
        stop=StopConditions(max_tokens=7, min_tokens=2, ignore_eos=True),
        sampling=SamplingOptions(temperature=0.5, top_p=0.9, top_k=3, seed=11),
    )  # fmt: skip
    assert tokens_of(asked) == [USER, *b"hi", ASSISTANT]


def test_a_prompt_without_a_deadline_gets_the_default() -> None:
    asked = ask()
    assert isinstance(asked, Request)
    assert asked.deadline_s == 60.0


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = ask(body={"messages": [{"role": "user", "content": parts}]})
    assert tokens_of(asked) == render_chat([("user", "a\nb")])


def test_the_newer_name_of_the_limit_wins() -> None:
    asked = ask(body=CHAT | {"max_tokens": 5, "max_completion_tokens": 9})
    assert isinstance(asked, Request)
    assert asked.stop.max_tokens == 9


def test_a_completion_is_its_text_and_the_marker() -> None:
    assert tokens_of(ask("completion", {"prompt": "hé"})) == [*"hé".encode(), ASSISTANT]
    assert tokens_of(ask("completion", {"prompt": [5, 6]})) == [5, 6, ASSISTANT]


def test_tokens_are_taken_as_they_are() -> None:
    assert tokens_of(ask("tokens", {"token_ids": [5, 2**32 - 1]})) == [5, 2**32 - 1]


def test_a_cancel_needs_no_body() -> None:
    assert isinstance(ask("cancel", {}), Cancel)


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        ("chat", {"messages": []}, "body.messages: "),
        ("chat", {}, "body.messages: "),
        ("chat", {"messages": "hi"}, "body.messages: "),
        ("chat", {"messages": [{"role": "user"}]}, "body.messages.0.content: "),
        ("chat", {"messages": [{"role": 5, "content": "x"}]}, "body.messages.0.role: "),
        ("chat", {"messages": [{"role": "user", "content": ""}]}, "body.messages: "),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "body.messages.0.content"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "body.messages.0.content",
        ),
        ("chat", CHAT | {"max_tokens": "5"}, "body.max_tokens: "),
        ("chat", CHAT | {"max_tokens": 0}, "body.max_tokens: "),
        ("chat", CHAT | {"max_tokens": 10**30}, "body.max_tokens: "),
        ("chat", CHAT | {"seed": 10**30}, "body.seed: "),
        ("chat", CHAT | {"temperature": 3}, "body.temperature: "),
        ("chat", CHAT | {"model": 5}, "body.model: "),
        ("chat", CHAT | {"n": 2}, "body.n: "),
        ("chat", CHAT | {"stop": 5}, "body.stop"),
        ("chat", CHAT | {"stream_options": {}}, "body.stream_options: "),
        ("completion", {"prompt": ""}, "body.prompt"),
        ("completion", {"prompt": ["a", "b"]}, "body.prompt: "),
        ("tokens", {"token_ids": []}, "body.token_ids: "),
        ("tokens", {"token_ids": [-1]}, "body.token_ids.0: "),
        ("tokens", {"token_ids": [2**32]}, "body.token_ids.0: "),
        ("tokens", {"token_ids": "abc"}, "body.token_ids: "),
        ("sing", {}, "kind: "),
        ("chat", [], "body: "),
    ],
)
def test_a_wrong_field_is_named(kind: str, body: Any, named: str) -> None:
    assert refusal_of(ask(kind, body)).startswith(named)


def test_a_refusal_does_not_repeat_what_was_given() -> None:
    message = refusal_of(ask(body={"messages": [{"role": ["secret-role"], "content": "secret"}]}))
    assert "secret" not in message


def test_many_problems_are_counted_not_listed() -> None:
    names = ("stop", "top_p", "top_k", "min_p", "seed")
    message = refusal_of(ask("tokens", {"token_ids": [1]} | dict.fromkeys(names, True)))
    assert sum(name in message for name in names) == 3
    assert message.endswith("and 2 more")


def test_a_deadline_beyond_the_longest_is_refused() -> None:
    assert refusal_of(ask(deadline_s=1e6)).startswith("deadline_s: ")


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers() -> None:
    message = refusal_of(ask("tokens", {"token_ids": [1] * 9}, served(9)))
    assert message.startswith("body.token_ids: ")
    assert "context length is 9 tokens; the prompt has 9 " in message


def test_an_answer_beyond_the_context_is_refused() -> None:
    message = refusal_of(ask("tokens", {"token_ids": [1] * 5, "max_tokens": 5}, served(9)))
    assert message.startswith("body.max_tokens: This model's maximum context ")
    assert message.endswith("the prompt has 5 and the answer may have 5")
    assert tokens_of(ask("tokens", {"token_ids": [1] * 5, "max_tokens": 4}, served(9)))


def test_a_request_names_its_model_though_the_prompt_did_not() -> None:
    asked = ask(find=served(name="only"))
    assert isinstance(asked, Request)
    assert asked.model == "only"


def test_stop_strings_are_kept() -> None:
    asked = ask(body=CHAT | {"stop": "\n"})
    assert isinstance(asked, Request)
    assert asked.stop.stop == ("\n",)


@pytest.mark.parametrize("error", [BadModel("no tokenizer"), TimeoutError()])
def test_a_model_that_cannot_be_used_is_no_fault_of_the_prompt(error: Exception) -> None:
    async def find(_: str) -> Model:
        raise error

    asked = ask(find=find)
    assert isinstance(asked, Refused)
    assert asked.code == "internal"
    assert asked.message.startswith("body.model: ")


@pytest.mark.parametrize(
    "value", [b"", None, b"{", b"hello", b"\xff\xfe", b'{"id":"\xff"}', b"[]", b"5", b"[" * 10**4]
)
def test_what_is_no_json_object_is_answered_to_the_key_and_put_aside(value: bytes | None) -> None:
    asked = said(b"key", value, served())
    assert isinstance(asked, UnreadablePrompt)
    assert asked.refusal == Refused(id="key", code="invalid", message=asked.reason)


def test_what_the_log_could_not_hand_out_is_answered_with_the_reason() -> None:
    asked = said(b"key", ports.Unreadable(b"too large"), served())
    assert asked == UnreadablePrompt(
        "too large", Refused(id="key", code="invalid", message="too large")
    )


@pytest.mark.parametrize("key", [None, b"", b"\xff", b"x" * 201])
def test_without_any_id_it_is_unreadable(key: bytes | None) -> None:
    assert isinstance(said(key, b"{}", served()), UnreadablePrompt)
    assert isinstance(said(key, b'{"id": 5}', served()), UnreadablePrompt)


def test_the_id_in_the_prompt_is_answered_before_the_key() -> None:
    asked = said(b"key", b'{"id":"mine","kind":5}', served())
    assert isinstance(asked, Refused)
    assert asked.id == "mine"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON | st.just("a"),
        "kind": JSON | st.sampled_from(["chat", "completion", "tokens", "cancel"]),
        "body": JSON
        | st.fixed_dictionaries(
            {},
            optional={
                "messages": JSON | st.just(CHAT["messages"]),
                "prompt": JSON,
                "token_ids": JSON | st.lists(st.integers(0, 2**32), max_size=3),
                "max_tokens": JSON,
                "seed": JSON,
                "stop": JSON,
            },
        ),
        "tenant": JSON,
        "deadline_s": JSON,
    },
)


@given(value=st.binary(max_size=60) | FIELDS.map(lambda f: json.dumps(f).encode()))
def test_whatever_comes_is_answered_and_can_be_sent(value: bytes) -> None:
    asked = said(b"key", value, served(50))
    if isinstance(asked, UnreadablePrompt):
        assert asked.refusal is not None
        asked = asked.refusal
    encode(asked, asked.id)


def ask_as_is(kind: str, body: Any) -> Answer:
    value = json.dumps({"id": "a", "kind": kind, "body": body}).encode()
    question = read_prompt(b"a", value, 1234, lambda _: True)
    if isinstance(question, PromptRecord):
        return asyncio.run(to_request(question, served(), 60.0))
    return question


def test_what_would_become_more_than_is_taken_at_a_time_is_refused_as_too_large() -> None:
    asked = ask_as_is("completion", {"prompt": ["a", "b"] * 64, "suffix": "c" * (1 << 20)})
    assert isinstance(asked, Refused)
    assert asked.code == "too_large"


@pytest.mark.parametrize("field", ["theirs", "nvext"])
def test_what_is_nested_too_deep_to_be_written_again_is_refused(field: str) -> None:
    """How deep that is depends on the stack, so all depths are tried."""
    told = set()
    for depth in range(700, 1000):
        deep = "[" * depth + "]" * depth
        value = deep if field == "theirs" else f'{{"agent_context":{{"a":{deep}}}}}'
        body = f'{{"messages":[{{"role":"user","content":"hi"}}],"{field}":{value}}}'
        question = read_prompt(
            b"a", f'{{"id":"a","kind":"chat","body":{body}}}'.encode(), 1, lambda _: True
        )
        if isinstance(question, PromptRecord):
            asked = asyncio.run(to_request(question, served(), 60.0))
            told.add(refusal_of(asked) if isinstance(asked, Refused) else "")
        else:
            told.add(refusal_of(question))
    assert "body: is nested too deep" in told
