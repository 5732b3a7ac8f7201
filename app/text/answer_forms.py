"""Forms of answers that have tool calls or reasoning, as structural tags of xgrammar. Pure.

    tools, tool_choice ─► calls_form ─► GuidedDecoding ─► after_reasoning ─► grammar of the engine

The tags are those of `answer_parsers.py`. Only the tokens of an answer decide where its reasoning
ends, so a grammar that accepts the tokens so far continues anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import DecodeError
from msgspec import json as msgspec_json

from kvlane.app.text.answer_parsers import CALL, END_OF_CALL, REASONING_TAGS, is_harmony
from kvlane.streams.request import AnswerParsing, GuidedDecoding

Format = dict[str, Any]
"""A format of xgrammar's structural tags."""
_ANY_OBJECT = {"type": "object"}
_MOST_SPACES = 2
"""White space at one place within arguments, which are written in one line: models may fill the
rest of an answer with it."""
_NAME = "NAME"


class CallForm(NamedTuple):
    """The form of a call. `style`: of its arguments, if not JSON; `before`: a pattern in front of
    them; `block`: tags around all calls of an answer."""

    begin: str
    end: str
    style: str = ""
    separator: str = "\n"
    before: str = ""
    block: tuple[str, str] | None = None


_QWEN_XML = CallForm(f"{CALL}\n<function={_NAME}>\n", f"\n</function>\n{END_OF_CALL}", "qwen_xml")
_GLM_XML = CallForm(f"{CALL}{_NAME}", END_OF_CALL, "glm_xml")
_END_OF_MESSAGE = ["<|end|>", ""]
"""The other ends of a message are stop tokens, which no grammar contains."""
CALL_FORMS = {
    "hermes": CallForm(f'{CALL}\n{{"name": "{_NAME}", "arguments": ', f"}}\n{END_OF_CALL}"),
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "glm45": _GLM_XML,
    "glm47": _GLM_XML,
    "minimax_m2": CallForm(
        f'<invoke name="{_NAME}">\n', "</invoke>\n", "minimax_xml", "",
        block=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
    "kimi_k2": CallForm(
        f"<|tool_call_begin|>functions.{_NAME}:", "<|tool_call_end|>", separator="",
        before=r"\d+<\|tool_call_argument_begin\|>",
        block=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "openai": CallForm(
        f"<|channel|>commentary to=functions.{_NAME} <|constrain|>json<|message|>", ""
    ),
}  # fmt: skip
"""By the name of the parser."""


def calls_form(
    tools: Sequence[Mapping[str, Any]], choice: Any, *, is_single: bool,
    content: GuidedDecoding | None = None, parser: str = "hermes",
) -> GuidedDecoding | None:  # fmt: skip
    """The form of an answer to a chat with tools; None if nothing is prescribed.

    `tools`: as OpenAI has them. `choice`: auto, required, or a function by its name; with auto
    only calls of strict tools have a form. `is_single`: the answer has one call at most. `content`:
    the form of an answer without a call. `parser`: one of `CALL_FORMS`.
    """
    form = CALL_FORMS[parser]
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, Mapping):
        functions = [each for each in functions if each["name"] == choice["function"]["name"]]
        is_single = True
    if choice != "auto":
        tags = [_call(form, each, is_free=each.get("strict") is False) for each in functions]
        return _structural(_calls(form, tags, is_single=is_single))
    tags = [_call(form, function, is_free=not _is_strict(function)) for function in functions]
    if not any(map(_is_strict, functions)):
        return content
    calls = _calls(form, tags, is_single=is_single)
    if content is None:
        begin = form.block[0] if form.block else form.begin
        return _structural({
            "type": "triggered_tags", "triggers": [begin.partition(_NAME)[0].partition("\n")[0]],
            "tags": [calls] if form.block else tags, "stop_after_first": is_single,
        })  # fmt: skip
    rest = format_of(content)
    if rest is None:
        return content
    if parser == "openai":
        rest = _final(rest)
    return _structural({"type": "or", "elements": [calls, rest]})


def after_reasoning(
    guided: GuidedDecoding | None, parsing: AnswerParsing | None
) -> GuidedDecoding | None:
    """The form of a whole answer, whose content has the form `guided`: its reasoning is free."""
    if guided is None or parsing is None or not parsing.reasoning:
        return guided
    form = format_of(guided)
    if form is None:
        return guided
    if is_harmony(parsing):
        content = form if guided.structural_tag else _final(form)
        start = {"type": "const_string", "value": "<|start|>assistant"}
        thought = _tag("<|channel|>analysis<|message|>", {"type": "any_text"}, "<|end|>")
        before = {"type": "sequence", "elements": [thought, start]}
        elements = [{"type": "optional", "content": before}, content]
        return _structural({"type": "sequence", "elements": elements})
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


def _call(form: CallForm, function: Mapping[str, Any], *, is_free: bool) -> Format:
    schema = (None if is_free else function.get("parameters")) or _ANY_OBJECT
    arguments: Format = {
        "type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_SPACES
    }  # fmt: skip
    if form.style:  # white space beside a value is a part of it, and xgrammar allows some
        arguments |= {"style": form.style, "max_whitespace_cnt": 1}
    if form.before:
        pattern = {"type": "regex", "pattern": form.before}
        arguments = {"type": "sequence", "elements": [pattern, arguments]}
    name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
    return _tag(form.begin.replace(_NAME, name), arguments, form.end or _END_OF_MESSAGE)


def _calls(form: CallForm, tags: Sequence[Format], *, is_single: bool) -> Format:
    calls: Format = {
        "type": "tags_with_separator", "tags": tags, "separator": form.separator,
        "at_least_one": True, "stop_after_first": is_single or not form.end,
    }  # fmt: skip
    return _tag(form.block[0], calls, form.block[1]) if form.block else calls


def _final(content: Format) -> Format:
    return _tag("<|channel|>final<|message|>", content, _END_OF_MESSAGE)


def _tag(begin: str, content: Format, end: str | list[str]) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _structural(form: Format) -> GuidedDecoding:
    return GuidedDecoding(
        structural_tag=msgspec_json.encode({"type": "structural_tag", "format": form})
    )
