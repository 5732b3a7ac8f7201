"""Tests of prompts of clients: a router's request, or a refusal that names the field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.preprocess.kafka_prompts import (
    FindModel,
    PromptRecord,
    ResultRules,
    UnreadablePrompt,
    read_prompt,
    to_request,
)
from kvlane.app.preprocess.models.byte_model import ByteModel, Model
from kvlane.app.preprocess.prompt_errors import BadModel
from kvlane.app.text.byte_level import ASSISTANT, USER, render_chat
from kvlane.streams import ports
from kvlane.streams.codecs import encode, unpack_tokens
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Cancel, Refused
from kvlane.streams.request import (
    ReplyAddress,
    Request,
    ResultOptions,
    SamplingOptions,
    StopConditions,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}

Answer = Request | Cancel | Refused | UnreadablePrompt


def served(context: int | None = None, name: str = "m") -> FindModel:
    """Whatever model is asked for is this one."""

    async def find(_: str) -> Model:
        return ByteModel(name, context)

    return find


def output(key: bytes | None, value: bytes | None, find: FindModel) -> Answer:
    question = read_prompt(key, value, 1234)
    if isinstance(question, PromptRecord):
        return asyncio.run(to_request(question, find, 60.0))
    return question


def send(
    kind: str = "chat", body: Any = None, find: FindModel | None = None, **over: Any
) -> Answer:
    fields = {"id": "a", "kind": kind, "body": CHAT if body is None else body} | over
    return output(b"a", json.dumps(fields).encode(), find or served())


def tokens_of(sent: object) -> list[int]:
    assert isinstance(sent, Request), sent
    return list(unpack_tokens(sent.token_ids))


def refusal_of(sent: object) -> str:
    if isinstance(sent, UnreadablePrompt):
        sent = sent.refusal
    assert isinstance(sent, Refused), sent
    assert (sent.id, sent.code) == ("a", "invalid")
    return sent.message


def test_chat_is_rendered_and_its_options_are_kept() -> None:
    body = CHAT | {
        "model": "m", "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9,
        "top_k": 3, "seed": 11, "ignore_eos": True, "stream": True, "user": "u", "n": 1,
    }  # fmt: skip
    sent = send(body=body, tenant="t", key_id="5f", deadline_s=5)
    assert sent == Request(
        id="a", model="m", token_ids=sent.token_ids, tenant="t", deadline_s=5, received_ms=1234,
        queued_ms=1234, key_id="5f",
        stop=StopConditions(max_tokens=7, min_tokens=2, ignore_eos=True),
        sampling=SamplingOptions(temperature=0.5, top_p=0.9, top_k=3, seed=11),
    )  # fmt: skip
    assert tokens_of(sent) == [USER, *b"hi", ASSISTANT]


def test_prompt_without_a_deadline_gets_the_default() -> None:
    sent = send()
    assert isinstance(sent, Request)
    assert sent.deadline_s == 60.0


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = send(body={"messages": [{"role": "user", "content": parts}]})
    assert tokens_of(sent) == render_chat([("user", "a\nb")])


def test_newer_name_of_the_limit_takes_precedence() -> None:
    sent = send(body=CHAT | {"max_tokens": 5, "max_completion_tokens": 9})
    assert isinstance(sent, Request)
    assert sent.stop.max_tokens == 9


def test_completion_is_its_text_and_the_marker() -> None:
    assert tokens_of(send("completion", {"prompt": "hé"})) == [*"hé".encode(), ASSISTANT]
    assert tokens_of(send("completion", {"prompt": [5, 6]})) == [5, 6, ASSISTANT]


def test_tokens_are_taken_as_they_are() -> None:
    assert tokens_of(send("tokens", {"token_ids": [5, 2**32 - 1]})) == [5, 2**32 - 1]


def test_cancel_needs_no_body() -> None:
    assert isinstance(send("cancel", {}), Cancel)


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
def test_wrong_field_is_named(kind: str, body: Any, named: str) -> None:
    assert refusal_of(send(kind, body)).startswith(named)


def test_refusal_does_not_quote_the_input() -> None:
    message = refusal_of(send(body={"messages": [{"role": ["secret-role"], "content": "secret"}]}))
    assert "secret" not in message


def test_many_problems_are_counted_not_listed() -> None:
    names = ("stop", "top_p", "top_k", "min_p", "seed")
    message = refusal_of(send("tokens", {"token_ids": [1]} | dict.fromkeys(names, True)))
    assert sum(name in message for name in names) == 3
    assert message.endswith("and 2 more")


def test_deadline_beyond_the_longest_is_refused() -> None:
    assert refusal_of(send(deadline_s=1e6)).startswith("deadline_s: ")


def test_prompt_beyond_the_context_is_refused_with_the_numbers() -> None:
    message = refusal_of(send("tokens", {"token_ids": [1] * 9}, served(9)))
    assert message.startswith("body.token_ids: ")
    assert "context length is 9 tokens; the prompt has 9 " in message


def test_answer_beyond_the_context_is_refused() -> None:
    message = refusal_of(send("tokens", {"token_ids": [1] * 5, "max_tokens": 5}, served(9)))
    assert message.startswith("body.max_tokens: This model's maximum context ")
    assert message.endswith("the prompt has 5 and the answer may have 5")
    assert tokens_of(send("tokens", {"token_ids": [1] * 5, "max_tokens": 4}, served(9)))


def test_request_names_its_model_though_the_prompt_did_not() -> None:
    sent = send(find=served(name="only"))
    assert isinstance(sent, Request)
    assert sent.model == "only"


def test_stop_strings_are_kept() -> None:
    sent = send(body=CHAT | {"stop": "\n"})
    assert isinstance(sent, Request)
    assert sent.stop.stop == ("\n",)


@pytest.mark.parametrize("error", [BadModel("no tokenizer"), TimeoutError()])
def test_unusable_model_is_no_fault_of_the_prompt(error: Exception) -> None:
    async def find(_: str) -> Model:
        raise error

    sent = send(find=find)
    assert isinstance(sent, Refused)
    assert sent.code == "internal"
    assert sent.message.startswith("body.model: ")


@pytest.mark.parametrize(
    "value", [b"", None, b"{", b"hello", b"\xff\xfe", b'{"id":"\xff"}', b"[]", b"5", b"[" * 10**4]
)
def test_value_that_is_no_json_object_is_answered_by_key_and_dead_lettered(
    value: bytes | None,
) -> None:
    sent = output(b"key", value, served())
    assert isinstance(sent, UnreadablePrompt)
    assert sent.refusal == Refused(id="key", code="invalid", message=sent.reason)


def test_unreadable_record_is_answered_with_its_reason() -> None:
    sent = output(b"key", ports.Unreadable(b"too large"), served())
    assert sent == UnreadablePrompt(
        "too large", Refused(id="key", code="invalid", message="too large")
    )


@pytest.mark.parametrize("key", [None, b"", b"\xff", b"x" * 201])
def test_without_any_id_it_is_unreadable(key: bytes | None) -> None:
    assert isinstance(output(key, b"{}", served()), UnreadablePrompt)
    assert isinstance(output(key, b'{"id": 5}', served()), UnreadablePrompt)


def test_id_in_the_prompt_precedes_the_key() -> None:
    sent = output(b"key", b'{"id":"mine","kind":5}', served())
    assert isinstance(sent, Refused)
    assert sent.id == "mine"


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
def test_any_prompt_gets_an_answer_that_can_be_encoded(value: bytes) -> None:
    sent = output(b"key", value, served(50))
    if isinstance(sent, UnreadablePrompt):
        assert sent.refusal is not None
        sent = sent.refusal
    encode(sent, sent.id)


def ask_as_is(kind: str, body: Any) -> Answer:
    value = json.dumps({"id": "a", "kind": kind, "body": body}).encode()
    question = read_prompt(b"a", value, 1234, lambda _: True)
    if isinstance(question, PromptRecord):
        return asyncio.run(to_request(question, served(), 60.0))
    return question


def test_prompt_beyond_the_request_size_is_refused_as_too_large() -> None:
    sent = ask_as_is("completion", {"prompt": ["a", "b"] * 64, "suffix": "c" * (1 << 20)})
    assert isinstance(sent, Refused)
    assert sent.code == "too_large"


@pytest.mark.parametrize("field", ["theirs", "nvext"])
def test_prompt_nested_too_deeply_to_encode_is_refused(field: str) -> None:
    """How deep that is depends on the stack, so all depths are tried."""
    got = set()
    for depth in range(700, 1000):
        deep = "[" * depth + "]" * depth
        value = deep if field == "theirs" else f'{{"agent_context":{{"a":{deep}}}}}'
        body = f'{{"messages":[{{"role":"user","content":"hi"}}],"{field}":{value}}}'
        question = read_prompt(
            b"a", f'{{"id":"a","kind":"chat","body":{body}}}'.encode(), 1, lambda _: True
        )
        if isinstance(question, PromptRecord):
            sent = asyncio.run(to_request(question, served(), 60.0))
            got.add(refusal_of(sent) if isinstance(sent, Refused) else "")
        else:
            got.add(refusal_of(question))
    assert "body: is nested too deep" in got


# --- results --------------------------------------------------------------------------------------

REPLIES = ResultRules("requested", ("replies-", "out."), "kvlane.")


def asked_with(
    *headers: tuple[str, bytes | None], rules: ResultRules = REPLIES, **over: Any
) -> Request | Refused:
    fields = {"id": "a", "body": CHAT} | over
    parsed = read_prompt(b"a", json.dumps(fields).encode(), 1234, lambda _: False, headers, rules)
    if isinstance(parsed, PromptRecord):
        return asyncio.run(to_request(parsed, served(), 60.0))
    assert isinstance(parsed, Refused), parsed
    return parsed


def test_faststream_names_the_topic_of_the_reply_in_a_header() -> None:
    asked = asked_with(("reply_to", b"replies-1"), ("correlation_id", b"c-1"))
    assert isinstance(asked, Request)
    assert asked.result is not None
    assert asked.result.reply == ReplyAddress(
        topic="replies-1", headers=(("correlation_id", b"c-1"),)
    )


def test_spring_names_topic_and_partition_of_the_reply_in_headers() -> None:
    asked = asked_with(
        ("kafka_replyTopic", b"out.x"),
        ("kafka_replyPartition", b"\0\0\0\3"),
        ("kafka_correlationId", bytes(range(16))),
    )
    assert isinstance(asked, Request)
    assert asked.result is not None
    assert asked.result.reply == ReplyAddress(
        topic="out.x", headers=(("kafka_correlationId", bytes(range(16))),), partition=3
    )


@pytest.mark.parametrize(
    ("headers", "rules", "wrong"),
    [
        ([("reply_to", b"replies-1")], ResultRules(), "headers.reply_to: no replies are allowed"),
        ([("reply_to", b"other")], REPLIES, "headers.reply_to: the topic is not among"),
        ([("reply_to", b"kvlane.requests")], ResultRules(reply_prefixes=("k",)), "not among"),
        ([("reply_to", b"replies-\xff")], REPLIES, "is no name of a topic"),
        ([("reply_to", b"replies-/")], REPLIES, "is no name of a topic"),
        ([("kafka_replyTopic", b"..")], ResultRules(reply_prefixes=(".",)), "is no name"),
        (
            [("kafka_replyTopic", b"out.x"), ("kafka_replyPartition", b"\0")],
            REPLIES,
            "headers.kafka_replyPartition",
        ),
        (
            [("kafka_replyTopic", b"out.x"), ("kafka_replyPartition", b"\xff\0\0\0")],
            REPLIES,
            "headers.kafka_replyPartition",
        ),
        (
            [("reply_to", b"replies-1"), ("correlation_id", b"x" * 1025)],
            REPLIES,
            "headers.correlation_id: has more than 1024 bytes",
        ),
        ([("reply_to", b"replies-1")], REPLIES._replace(scope="batch"), "only batch jobs"),
    ],
)
def test_disallowed_address_refuses_the_prompt(
    headers: list[tuple[str, bytes]], rules: ResultRules, wrong: str
) -> None:
    asked = asked_with(*headers, rules=rules)
    assert isinstance(asked, Refused)
    assert asked.code == "invalid"
    assert wrong in asked.message


@pytest.mark.parametrize(
    ("scope", "over", "gets_one"),
    [
        ("requested", {}, False),
        ("requested", {"result": True}, True),
        ("requested", {"batch_id": "b"}, True),
        ("all", {}, True),
        ("batch", {}, False),
        ("batch", {"batch_id": "b"}, True),
    ],
)
def test_scope_decides_which_prompts_get_a_result(
    scope: Any, over: dict[str, Any], gets_one: bool
) -> None:
    asked = asked_with(rules=ResultRules(scope), **over)
    assert isinstance(asked, Request)
    assert (asked.result is not None) is gets_one


def test_result_outside_the_configured_scope_is_refused() -> None:
    asked = asked_with(rules=ResultRules("batch"), result=True)
    assert isinstance(asked, Refused)
    assert "KVLANE_RESULTS" in asked.message


def test_prompt_gets_no_result_unless_requested() -> None:
    sent = send(metadata={"a": 1}, custom_id="line-7")
    assert isinstance(sent, Request)
    assert sent.result is None


@pytest.mark.parametrize("over", [{"result": True}, {"batch_id": "batch_1"}])
def test_metadata_of_a_result_is_in_the_request(over: dict[str, Any]) -> None:
    sent = send("completion", {"prompt": "x"}, metadata={"a": [1, "é"]}, custom_id="line-7", **over)
    assert isinstance(sent, Request)
    assert sent.result == ResultOptions(
        kind="completion",
        metadata='{"a":[1,"é"]}'.encode(),
        batch_id=over.get("batch_id", ""),
        custom_id="line-7",
    )


@pytest.mark.parametrize(
    ("kind", "over"),
    [
        ("chat", {"body": {"messages": []}}),
        ("chat", {"body": CHAT | {"n": 2}}),
        ("completion", {"body": {"prompt": ["a", "b"]}}),
        ("chat", {"deadline_s": -1}),
    ],
)
def test_refusal_carries_the_options_of_the_result(kind: str, over: dict[str, Any]) -> None:
    sent = send(kind, result=True, metadata={"a": 1}, **over)
    assert isinstance(sent, Refused), sent
    assert sent.result == ResultOptions(kind=kind, metadata=b'{"a":1}')  # type: ignore[arg-type]


def test_refusal_without_valid_options_of_a_result_gets_none() -> None:
    sent = send(result=True, custom_id=7)
    assert isinstance(sent, Refused)
    assert (sent.message.split(":")[0], sent.result) == ("custom_id", None)


def test_metadata_are_bounded() -> None:
    sent = send(result=True, metadata={"a": "x" * 17_000})
    assert "metadata" in refusal_of(sent)
    assert "16384" in refusal_of(sent)


def test_cancel_has_no_result() -> None:
    assert send("cancel", result=True) == Cancel(id="a", reason="the client cancelled it")


OPTIONAL = sorted(Prompt.model_fields.keys() - {"id", "body"})


@pytest.mark.parametrize("field", [*OPTIONAL, "unknown"])
def test_null_in_an_optional_field_is_not_given(field: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    without = output(b"a", json.dumps({"id": "a", "body": body}).encode(), served())
    assert isinstance(without, Request)
    value = json.dumps({"id": "a", "body": body, field: None}).encode()
    assert output(b"a", value, served()) == without


def test_null_body_of_a_cancel_is_not_given() -> None:
    value = b'{"id":"a","kind":"cancel","body":null,"tenant":null}'
    assert isinstance(output(b"a", value, served()), Cancel)


def test_null_id_is_answered_by_the_key() -> None:
    assert refusal_of(output(b"a", b'{"id":null,"body":{}}', served())).startswith("id: ")


@pytest.mark.parametrize("tenant", ["acme", "a.b_c:d@e-f", "x" * 100, ""])
def test_tenant_has_the_form_that_it_has_over_http(tenant: str) -> None:
    assert Prompt(id="a", tenant=tenant).tenant == tenant


@pytest.mark.parametrize(
    "tenant", ["a\0b", "acme/x", "../acme", "\u0430cme", "x" * 101, "acme\n", " acme", "a b"]
)
def test_other_name_of_a_tenant_is_refused(tenant: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    value = json.dumps({"id": "a", "body": body, "tenant": tenant}).encode()
    message = refusal_of(output(b"a", value, served()))
    assert message.startswith("tenant: ")
    assert message.endswith("may have letters, digits and . _ : @ -, at most 100 of them")
