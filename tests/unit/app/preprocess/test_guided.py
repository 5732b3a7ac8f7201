"""Tests of guided decoding: one form of an answer, from all fields that request one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.guided_decoding import (
    MAX_COST,
    MAX_GRAMMAR_DEPTH,
    cost_of_pattern,
    guided_decoding_of,
)
from kvlane.app.preprocess.requests.openai_requests import read_openai
from kvlane.streams.request import GuidedDecoding

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
SCHEMA_JSON = json.dumps(SCHEMA, separators=(",", ":")).encode()


def guided(**fields: Any) -> GuidedDecoding | None:
    return guided_decoding_of(read_openai("chat", CHAT | fields).body)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, GuidedDecoding(json=b'{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            GuidedDecoding(json=SCHEMA_JSON),
        ),
        ({"guided_json": SCHEMA}, GuidedDecoding(json=SCHEMA_JSON)),
        ({"guided_json": json.dumps(SCHEMA)}, GuidedDecoding(json=SCHEMA_JSON)),
        ({"guided_regex": "a+"}, GuidedDecoding(regex="a+")),
        ({"guided_choice": ["a", "b"]}, GuidedDecoding(choice=("a", "b"))),
        ({"guided_grammar": "root ::= x"}, GuidedDecoding(grammar="root ::= x")),
        ({"structured_outputs": {"json": SCHEMA}}, GuidedDecoding(json=SCHEMA_JSON)),
        ({"structured_outputs": {"json_object": True}}, GuidedDecoding(json=b'{"type":"object"}')),
        ({"structured_outputs": {"regex": "a"}}, GuidedDecoding(regex="a")),
        ({"structured_outputs": {"choice": ["a"]}}, GuidedDecoding(choice=("a",))),
        ({"structured_outputs": {"grammar": "g"}}, GuidedDecoding(grammar="g")),
        (
            {"structured_outputs": {"structural_tag": {"x": 1}}},
            GuidedDecoding(structural_tag=b'{"x":1}'),
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "_"}},
            GuidedDecoding(regex="a", whitespace_pattern="_"),
        ),
        (
            {"guided_regex": "a", "guided_decoding_backend": "b", "guided_whitespace_pattern": "_"},
            GuidedDecoding(regex="a", backend="b", whitespace_pattern="_"),
        ),
    ],
)
def test_form_is_taken_over(fields: dict[str, Any], expected: GuidedDecoding) -> None:
    assert guided(**fields) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"guided_whitespace_pattern": " "},
    ],
)
def test_without_a_form_there_is_none(fields: dict[str, Any]) -> None:
    assert guided(**fields) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 7}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "(" * (MAX_GRAMMAR_DEPTH + 1)}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"regex": "a", "grammar": "g"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
    ],
)
def test_wrong_form_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPrompt) as raised:
        guided(**fields)
    assert raised.value.field == field


def test_brackets_that_are_closed_are_not_nested() -> None:
    assert guided(guided_grammar="()" * (MAX_GRAMMAR_DEPTH + 1)) is not None


# --- cost -----------------------------------------------------------------------------------------


def schema_of(*, alternatives: int, properties: int, pattern: str) -> dict[str, Any]:
    inner = {"type": "string", "pattern": pattern}
    one = {"type": "object", "properties": {f"p{i}": inner for i in range(properties)}}
    return {"anyOf": [one] * alternatives}


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a{100001}"},
        {"guided_regex": "((((a{9}){9}){9}){9}){9}" },
        {"guided_regex": ".{900}" + "(x|y){0,900}" * 30},
        {"guided_regex": r"(\p{L}|\p{N}){0,5000}"},
        {"guided_regex": r"[\]a-z]{99999,}"},
        {"guided_regex": "a{999999999}" * 5000},
        {"guided_regex": "a{0," + "0" * 5000 + "9" * 5000 + "}"},
        {"guided_regex": '"(x|y){0,90000}"'},
        {"guided_grammar": "start: " + " | ".join(f'"w{i}"' for i in range(70_000))},
        {"guided_grammar": 'start: "' + "ab" * 500 + '" ~ 3..900'},
        {"guided_grammar": 'root ::= ("a" | "b"){0,9999}'},
        {"guided_choice": [f"c{i}" * 8 for i in range(8192)]},
        {"guided_json": schema_of(alternatives=300, properties=20, pattern="^(a|b|c){1,50}$")},
        {"guided_json": json.dumps(schema_of(alternatives=1, properties=1, pattern="a{99999}"))},
        {"guided_json": {"type": "string", "maxLength": 10**6}},
        {"guided_json": {"type": "array", "maxItems": 99999, "items": SCHEMA}},
        {"guided_json": {"enum": ["x" * 200] * 9000}},
        {"guided_json": {"patternProperties": {"a{99999}": {}}}},
        {"structured_outputs": {"structural_tag": {"structures": [{"maxLength": 10**7}]}}},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]{0,99999}"},
        {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "string", "pattern": "(a|b){0,99999}"}}}},
    ],
)  # fmt: skip
def test_form_that_costs_too_much_is_refused_by_its_field(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidPrompt, match="too complex to enforce") as raised:
        guided(**fields)
    assert raised.value.field.split(".")[0] == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?(Z|[+-]\d{2}:\d{2})"},
        {"guided_regex": "[a-zA-Z0-9 .,]{1,2000}"},
        {"guided_choice": [f"label-{i}" for i in range(8192)]},
        {"guided_json": schema_of(alternatives=20, properties=20, pattern="^[a-z]{1,20}$")},
        {"guided_json": {"type": "object", "properties": {
            f"column_{i}": {"type": "string", "maxLength": 4000, "description": "x" * 5000}
            for i in range(50)}}},
        {"guided_json": {"enum": [f"city of {i}" for i in range(3000)]}},
        {"guided_grammar": "start: " + " | ".join(f'"w{i}"' for i in range(5000))},
        {"guided_grammar": 'root ::= "{" ws "}"\nws ::= [ \\n]{0,20}'},
    ],
)  # fmt: skip
def test_form_of_a_usual_size_is_accepted(fields: dict[str, Any]) -> None:
    assert guided(**fields) is not None


@pytest.mark.parametrize(
    "text", ["(", ")", "[", "{", "~", "\\", '"', "[\\]", "\\p{", "a{9}", "{1 ", "|", "[^]"]
)
def test_work_of_the_estimate_grows_with_the_text(text: str) -> None:
    """A billion steps would not end within the time limit of a test."""
    assert cost_of_pattern(text * (MAX_COST // len(text))) >= 1


def test_numbers_in_front_of_a_quantifier_count_as_often_as_they_repeat() -> None:
    assert cost_of_pattern("(ab){10}") > 1.7 * cost_of_pattern("(ab){5}")
    assert cost_of_pattern("ab{10}") == 2 + 20 * 10
    assert cost_of_pattern("((a{10}){10}){10}") > 1000 * 20**3


def nested(key: str, bound: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array" if key == "items" else "object", bound: 1, key: schema}
    return schema


@pytest.mark.parametrize(
    ("key", "bound"),
    [("items", "minItems"), ("items", "maxItems"), ("additionalProperties", "minProperties")],
)
def test_work_of_the_estimate_grows_with_the_depth_of_a_schema(key: str, bound: str) -> None:
    """2^60 steps, if each level were estimated twice."""
    with pytest.raises(InvalidPrompt, match="too complex to enforce"):
        guided(guided_json=nested(key, bound, 60))


@pytest.mark.parametrize("depth", [501, 20_000])
def test_regular_expression_with_deep_groups_is_refused(depth: int) -> None:
    """A parser that is recursive would end the engine's process."""
    with pytest.raises(InvalidPrompt, match="too complex to enforce"):
        guided(guided_regex="(" * depth + "a" + ")" * depth)
    assert guided(guided_regex="(a)" * depth) is not None


def test_grammar_within_a_structural_tag_costs_as_one_alone() -> None:
    form = {"type": "grammar", "grammar": "root ::= (a|b){0,90000}(c|d){0,99999}"}
    tag = {"type": "structural_tag", "format": form}
    with pytest.raises(InvalidPrompt, match="too complex to enforce"):
        guided(structured_outputs={"structural_tag": json.dumps(tag)})
