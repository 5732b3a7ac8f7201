"""Forms of answers that have tool calls or reasoning, as structural tags of xgrammar. Pure.

    tools, tool_choice ─► calls_form ─► GuidedDecoding ─► after_reasoning ─► grammar of the engine

The tags are those of `answer_parsers.py`. Only the tokens of an answer decide where its reasoning
ends, so a grammar that accepts the tokens so far continues anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import DecodeError
from msgspec import json as msgspec_json

from kvlane.app.text.answer_parsers import CALL, END_OF_CALL, REASONING_TAGS
from kvlane.streams.request import AnswerParsing, GuidedDecoding

Format = dict[str, Any]
"""A format of xgrammar's structural tags."""
_ANY_OBJECT = {"type": "object"}
_MOST_SPACES = 2
"""White space at one place within arguments, which are written in one line: models may fill the
rest of an answer with it."""


def calls_form(
    tools: Sequence[Mapping[str, Any]], choice: Any, *, is_single: bool,
    content: GuidedDecoding | None = None,
) -> GuidedDecoding | None:  # fmt: skip
    """The form of an answer to a chat with tools; None if nothing is prescribed.

    `tools`: as OpenAI has them. `choice`: auto, required, or a function by its name; with auto
    only calls of strict tools have a form. `is_single`: the answer has one call at most. `content`:
    the form of an answer without a call.
    """
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, Mapping):
        functions = [each for each in functions if each["name"] == choice["function"]["name"]]
        is_single = True
    tags = [_call(function, is_free=not _is_strict(function)) for function in functions]
    if choice != "auto":
        tags = [_call(each, is_free=each.get("strict") is False) for each in functions]
        return _structural(_calls(tags, is_single=is_single))
    if not any(map(_is_strict, functions)):
        return content
    if content is None:
        return _structural({
            "type": "triggered_tags", "triggers": [CALL], "tags": tags,
            "stop_after_first": is_single,
        })  # fmt: skip
    form = format_of(content)
    if form is None:
        return content
    return _structural({"type": "or", "elements": [_calls(tags, is_single=is_single), form]})


def after_reasoning(
    guided: GuidedDecoding | None, parsing: AnswerParsing | None
) -> GuidedDecoding | None:
    """The form of a whole answer, whose content has the form `guided`: its reasoning is free."""
    if guided is None or parsing is None or not parsing.reasoning:
        return guided
    form = format_of(guided)
    if form is None:
        return guided
    tags = REASONING_TAGS[parsing.reasoning]
    rest = _tag("" if parsing.in_reasoning else tags.start, {"type": "any_text"}, tags.end)
    whole: Format = {"type": "sequence", "elements": [rest, form]}
    return _structural(whole if parsing.in_reasoning else {"type": "or", "elements": [whole, form]})


def format_of(guided: GuidedDecoding) -> Format | None:
    """A form as a part of a structural tag; None for one that cannot be a part."""
    if guided.json is not None:
        return {"type": "json_schema", "json_schema": msgspec_json.decode(guided.json)}
    if guided.regex is not None:
        return {"type": "regex", "pattern": guided.regex}
    if guided.choice is not None:
        values = [{"type": "const_string", "value": value} for value in guided.choice]
        return {"type": "or", "elements": values}
    if guided.grammar is not None:
        return {"type": "grammar", "grammar": guided.grammar} if "::=" in guided.grammar else None
    try:
        return msgspec_json.decode(guided.structural_tag or b"", type=dict[str, Any]).get("format")
    except DecodeError:
        return None


def _is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def _call(function: Mapping[str, Any], *, is_free: bool) -> Format:
    schema = (None if is_free else function.get("parameters")) or _ANY_OBJECT
    name = json.dumps(function["name"], ensure_ascii=False)
    return _tag(
        f'{CALL}\n{{"name": {name}, "arguments": ',
        {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_SPACES},
        f"}}\n{END_OF_CALL}",
    )


def _calls(tags: Sequence[Format], *, is_single: bool) -> Format:
    return {
        "type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True,
        "stop_after_first": is_single,
    }  # fmt: skip


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _structural(form: Format) -> GuidedDecoding:
    return GuidedDecoding(
        structural_tag=msgspec_json.encode({"type": "structural_tag", "format": form})
    )
