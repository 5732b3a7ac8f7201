"""Tests of the forms of answers with calls and reasoning; tests/vllm has them in a real grammar."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.answer_parsing import ModelParsers, with_parsing
from kvlane.app.preprocess.requests.openai_requests import read_openai
from kvlane.app.text.answer_forms import after_reasoning
from kvlane.streams.records import ModelCard
from kvlane.streams.request import AnswerParsing, GuidedDecoding

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ANY = {"type": "object"}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | more}


def form_of(parsers: ModelParsers = ModelParsers("hermes"), **fields: Any) -> Any:  # noqa: B008
    """The structural tag of the request for a chat; None for none."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool("f"), tool("g")]}
    asked = read_openai("chat", chat | fields)
    (request,) = with_parsing(asked, parsers, asked.requests([[1]], ModelCard(name="m")), ["hi"])
    guided = request.sampling.guided_decoding
    return guided and msgspec.json.decode(guided.structural_tag or b"null")["format"]


def begins(form: Any) -> list[str]:
    return [tag["begin"] for tag in form["tags"]]


def schemas(form: Any) -> list[Any]:
    return [tag["content"]["json_schema"] for tag in form["tags"]]


F, G = (f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in "fg")


def test_required_call_may_be_any_tool_by_its_schema() -> None:
    form = form_of(tool_choice="required")
    assert (form["type"], form["at_least_one"]) == ("tags_with_separator", True)
    assert (begins(form), schemas(form)) == ([F, G], [SCHEMA, SCHEMA])
    assert not form["stop_after_first"]


def test_named_call_is_the_only_one() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    form = form_of(tool_choice=choice)
    assert (begins(form), form["stop_after_first"]) == ([G], True)


def test_required_call_without_parallel_calls_is_the_only_one() -> None:
    assert form_of(tool_choice="required", parallel_tool_calls=False)["stop_after_first"]


def test_arguments_of_a_tool_that_is_not_strict_are_free() -> None:
    tools = [tool("f", strict=False), tool("g")]
    assert schemas(form_of(tools=tools, tool_choice="required")) == [ANY, SCHEMA]


def test_name_of_a_function_is_written_as_json() -> None:
    form = form_of(tools=[tool('a"b')], tool_choice="required")
    assert begins(form) == ['<tool_call>\n{"name": "a\\"b", "arguments": ']


def test_strict_tool_that_may_be_called_leaves_text_free() -> None:
    assert form_of() is None
    form = form_of(tools=[tool("f", strict=True), tool("g")])
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert schemas(form) == [SCHEMA, ANY]
    assert form_of(tools=[tool("f", strict=True)], tool_choice="none") is None


def test_strict_tool_beside_a_form_is_called_or_the_form_is_kept() -> None:
    form = form_of(tools=[tool("f", strict=True)], response_format={"type": "json_object"})
    calls, content = form["elements"]
    assert (form["type"], begins(calls)) == ("or", [F])
    assert content == {"type": "json_schema", "json_schema": ANY}


def test_required_call_leaves_no_content_for_a_form() -> None:
    form = form_of(tool_choice="required", response_format={"type": "json_object"})
    assert begins(form) == [F, G]


def test_call_in_an_unknown_form_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match="form of this model's calls") as raised:
        form_of(ModelParsers("", "qwen3"), tool_choice="required")
    assert raised.value.field == "tool_choice"


def test_schema_that_costs_too_much_is_refused() -> None:
    huge = {"type": "object", "properties": {f"p{n}": {"maxLength": 9999} for n in range(90)}}
    with pytest.raises(InvalidPrompt, match="too complex"):
        form_of(tools=[tool("f", parameters=huge)], tool_choice="required")


THOUGHT = {"type": "any_text"}


@pytest.mark.parametrize(
    ("guided", "content"),
    [
        (GuidedDecoding(json=b'{"type":"object"}'), {"type": "json_schema", "json_schema": ANY}),
        (GuidedDecoding(regex="a+"), {"type": "regex", "pattern": "a+"}),
        (
            GuidedDecoding(choice=("a",)),
            {"type": "or", "elements": [{"type": "const_string", "value": "a"}]},
        ),
        (GuidedDecoding(grammar="root ::= x"), {"type": "grammar", "grammar": "root ::= x"}),
        (GuidedDecoding(structural_tag=b'{"format":{"type":"any_text"}}'), {"type": "any_text"}),
    ],
)
def test_form_begins_after_the_reasoning(guided: GuidedDecoding, content: Any) -> None:
    inside = after_reasoning(guided, AnswerParsing(reasoning="qwen3", in_reasoning=True))
    assert inside is not None
    thought, rest = msgspec.json.decode(inside.structural_tag or b"")["format"]["elements"]
    assert thought == {"type": "tag", "begin": "", "content": THOUGHT, "end": "</think>"}
    assert rest == content
    before = after_reasoning(guided, AnswerParsing(reasoning="qwen3"))
    assert before is not None
    thinking, plain = msgspec.json.decode(before.structural_tag or b"")["format"]["elements"]
    assert thinking["elements"][0]["begin"] == "<think>"
    assert (thinking["elements"][1], plain) == (content, content)


@pytest.mark.parametrize(
    "guided", [GuidedDecoding(grammar="start: x"), GuidedDecoding(structural_tag=b"[]")]
)
def test_form_that_cannot_be_a_part_stays_as_it_is(guided: GuidedDecoding) -> None:
    assert after_reasoning(guided, AnswerParsing(reasoning="qwen3")) == guided
    assert after_reasoning(None, AnswerParsing(reasoning="qwen3")) is None
    assert after_reasoning(guided, AnswerParsing(tools="hermes")) == guided


@pytest.mark.parametrize(
    ("parser", "begin", "style"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n", "qwen_xml"),
        ("glm45", "<tool_call>f", "glm_xml"),
        ("minimax_m2", '<invoke name="f">\n', "minimax_xml"),
        ("openai", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", None),
    ],
)
def test_required_call_has_the_form_of_its_parser(
    parser: str, begin: str, style: str | None
) -> None:
    form = form_of(ModelParsers(parser, ""), tool_choice="required")
    calls = form["content"] if form["type"] == "tag" else form
    assert begins(calls)[0] == begin
    assert calls["tags"][0]["content"].get("style") == style


def test_form_of_gpt_oss_follows_its_analysis() -> None:
    parsing = AnswerParsing(reasoning="openai_gptoss")
    form = after_reasoning(GuidedDecoding(regex="a+"), parsing)
    assert form is not None
    before, final = msgspec.json.decode(form.structural_tag or b"")["format"]["elements"]
    assert before["type"] == "optional"
    assert (final["begin"], final["content"]["pattern"]) == (
        "<|channel|>final<|message|>", "a+"
    )  # fmt: skip
