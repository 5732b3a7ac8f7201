"""Tests of histories as clients send them, through chat templates in the shapes of public
models."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.preprocess.models.byte_model import ByteModel
from kvlane.app.preprocess.requests.openai_requests import read_openai
from kvlane.app.preprocess.text.chat_template import ChatTemplate
from kvlane.streams.clock import SystemClock
from tests.harness.chat_templates import SPECIAL_TOKENS, TEMPLATES

CLOCK = SystemClock()
LOADED = {name: ChatTemplate(text, CLOCK, SPECIAL_TOKENS) for name, text in TEMPLATES.items()}

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
USER = {"role": "user", "content": "hello"}
ASKED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "eight"}
SAID = {"role": "assistant", "content": "gladly"}
SYSTEM = {"role": "system", "content": "be kind"}
GO = {"role": "user", "content": "go on"}
NULLS = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "name": None}
PLAIN_TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def parts(text: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text}]


def called(arguments: Any) -> dict[str, Any]:
    return CALL | {"function": {"name": "add", "arguments": arguments}}


AS_SENT: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "call with null content": (
        [USER, ASKED | {"content": None}, RESULT, GO], [USER, ASKED, RESULT, GO],
    ),
    "call without content": (
        [USER, without(ASKED, "content"), RESULT, GO], [USER, ASKED, RESULT, GO],
    ),
    "call with empty parts": (
        [USER, ASKED | {"content": []}, RESULT, GO], [USER, ASKED, RESULT, GO],
    ),
    "call of an SDK": ([USER, ASKED | NULLS, RESULT, GO], [USER, ASKED, RESULT, GO]),
    "answer with null content": (
        [USER, SAID | {"content": None}, GO], [USER, SAID | {"content": ""}, GO],
    ),
    "answer of an SDK": ([USER, SAID | NULLS | {"tool_calls": None}, GO], [USER, SAID, GO]),
    "answer with no calls": ([USER, SAID | {"tool_calls": []}, GO], [USER, SAID, GO]),
    "result with null content": (
        [USER, ASKED, RESULT | {"content": None}, GO], [USER, ASKED, RESULT | {"content": ""}, GO],
    ),
    "result in parts": (
        [USER, ASKED, RESULT | {"content": parts("eight")}, GO], [USER, ASKED, RESULT, GO],
    ),
    "result in two parts": (
        [USER, ASKED, RESULT | {"content": parts("eight") + parts("nine")}, GO],
        [USER, ASKED, RESULT | {"content": "eight\nnine"}, GO],
    ),
    "instructions in two parts": (
        [SYSTEM | {"content": parts("be kind") + parts("be brief")}, GO],
        [SYSTEM | {"content": "be kind\nbe brief"}, GO],
    ),
    "question in parts": ([USER | {"content": parts("hello")}, SAID, GO], [USER, SAID, GO]),
    "answer in parts of another endpoint": (
        [USER, SAID | {"content": parts("gladly", "output_text")}, GO], [USER, SAID, GO],
    ),
    "refusal": (
        [USER, SAID | {"content": [{"type": "refusal", "refusal": "gladly"}]}, GO],
        [USER, SAID, GO],
    ),
    "arguments as an object": (
        [USER, ASKED | {"tool_calls": [called({"a": 7})]}, RESULT, GO],
        [USER, ASKED, RESULT, GO],
    ),
    "empty arguments": (
        [USER, ASKED | {"tool_calls": [called("")]}, RESULT, GO],
        [USER, ASKED | {"tool_calls": [called("{}")]}, RESULT, GO],
    ),
    "arguments that are null in JSON": (
        [USER, ASKED | {"tool_calls": [called("null")]}, RESULT, GO],
        [USER, ASKED | {"tool_calls": [called("{}")]}, RESULT, GO],
    ),
    "call with nulls": (
        [USER, ASKED | {"tool_calls": [CALL | {"index": None, "custom": None}]}, RESULT, GO],
        [USER, ASKED, RESULT, GO],
    ),
    "parts with nulls": (
        [USER | {"content": [{"type": "text", "text": "hello", "image_url": None}]}, SAID, GO],
        [USER, SAID, GO],
    ),
    "older names of calls": (
        [USER, {"role": "assistant", "content": None, "function_call": CALL["function"]},
         {"role": "function", "name": "add", "content": "eight"}, GO],
        [USER, ASKED | {"tool_calls": [CALL | {"id": "call00001"}]},
         RESULT | {"tool_call_id": "call00001", "name": "add"}, GO],
    ),
}  # fmt: skip
"""A history in the form that a client sends, and the same history in full."""


def rendered(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    body = {"model": "m", "messages": messages} | options
    (prompt,) = read_openai("chat", body).prompts(LOADED[name])
    assert isinstance(prompt, str)
    return prompt


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("history", AS_SENT)
def test_history_is_rendered_as_its_full_form(template: str, history: str) -> None:
    sent, full = AS_SENT[history]
    prompt = rendered(template, sent)
    assert prompt == rendered(template, full)
    assert "None" not in prompt
    assert "go on" in prompt
    for message in full:
        if isinstance(text := message["content"], str):
            assert all(line in prompt for line in text.split("\n"))
        for call in message.get("tool_calls", ()):
            assert "add" in prompt
            assert ("7" in prompt) == ("7" in call["function"]["arguments"])


@pytest.mark.parametrize("template", TEMPLATES)
def test_instructions_of_a_developer_are_those_of_the_system(template: str) -> None:
    developer = SYSTEM | {"role": "developer"}
    prompt = rendered(template, [developer, USER])
    assert "be kind" in prompt
    assert prompt == rendered(template, [SYSTEM, USER])


@pytest.mark.parametrize(
    ("template", "ids"),
    [
        ("sections", ["functions.add:0", "functions.add:1"]),
        ("instruct", ["tool00000", "tool00001"]),
        ("plain", ["call_Z4", "call_Z5"]),
    ],
)
def test_ids_of_calls_have_the_form_that_the_template_needs(template: str, ids: list[str]) -> None:
    turns = [
        [ASKED | {"tool_calls": [CALL | {"id": name}]}, RESULT | {"tool_call_id": name}]
        for name in ("call_Z4", "call_Z5")
    ]
    prompt = rendered(template, [USER, *turns[0], *turns[1], GO])
    assert [prompt.count(each) for each in ids] == ([1, 1] if template == "plain" else [2, 2])
    own = ids[0] if template == "plain" else ids[1]
    kept = rendered(template, [USER, *turns[0][:1], RESULT | {"tool_call_id": "call_Z4"}, GO])
    assert kept.count(ids[0]) >= 1
    named = [ASKED | {"tool_calls": [CALL | {"id": own}]}, RESULT | {"tool_call_id": own}]
    assert own in rendered(template, [USER, *named, GO])


def test_text_beside_calls_stays_where_a_template_has_one_of_both() -> None:
    prompt = rendered("calls or text", [USER, ASKED | {"content": "I add."}, RESULT, GO])
    assert "<A>I add.<end><call>function<sep>add" in prompt


@pytest.mark.parametrize("content", [None, "I add."])
def test_reasoning_of_an_earlier_call_reaches_its_template(content: str | None) -> None:
    asked = ASKED | {"content": content, "reasoning_content": "seven?"}
    for template in ("channels", "reasoning", "macros"):
        prompt = rendered(template, [USER, asked, RESULT])
        assert ("seven?" in prompt) == (template != "channels" or content is None)
        assert (content or "") in prompt


def test_role_developer_stays_for_templates_with_it() -> None:
    source = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{% endfor %}"
    assert ChatTemplate(source, CLOCK).render([{"role": "developer", "content": "x"}]) == "D"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("parameters", ["none", "null", "empty", "no properties"])
def test_tool_without_parameters_has_an_empty_object_of_them(
    template: str, parameters: str
) -> None:
    function: dict[str, Any] = {"name": "add", "description": None, "strict": None}
    match parameters:
        case "null":
            function["parameters"] = None
        case "empty":
            function["parameters"] = {}
        case "no properties":
            function["parameters"] = {"type": "object"}
    prompt = rendered(template, [USER], tools=[{"type": "function", "function": function}])
    assert prompt == rendered(template, [USER], tools=[PLAIN_TOOL])
    assert "null" not in prompt
    assert "None" not in prompt


@pytest.mark.parametrize("template", TEMPLATES)
def test_long_history_stays_far_below_the_bounds_of_a_rendering(template: str) -> None:
    long = [USER | {"content": "word " * 20_000}, SAID | {"content": "word " * 20_000}]
    prompt = rendered(template, [SYSTEM, *long * 20, GO])
    assert prompt.count("word ") >= 20 * 20_000


async def test_byte_model_takes_the_same_histories() -> None:
    for sent, full in AS_SENT.values():
        for messages in (sent, full):
            body = {"model": "m", "messages": messages}
            assert (await ByteModel("m").prepare(read_openai("chat", body))).requests
