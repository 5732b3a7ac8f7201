"""The form that an answer must have: one, however it is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.preprocess.prompt_errors import InvalidPrompt
from app.preprocess.requests.guided_decoding import MAX_GRAMMAR_DEPTH, guided_decoding_of
from app.preprocess.requests.openai_requests import read_openai
from streams.request import GuidedDecoding

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
