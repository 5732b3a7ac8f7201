"""Guided decoding: the required form of an answer, and the cost of compiling it. Pure.

The time of an engine grows with the states of a form, not its characters: `(a|b){0,900}` has
thousands. So the cost is estimated: a character costs 1, an alternative, a group or a class more,
and a repeated part as often as it may occur. The estimate refuses large forms early and bounds no
time: for small ones a worker with vLLM has trials (`app/engine/vllm/form_trials.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.request_models import GenerationBody
from kvlane.streams.record_base import JsonText
from kvlane.streams.request import GuidedDecoding

MAX_GRAMMAR_DEPTH = 500

FORWARDED = {
    "response_format": "json", "guided_json": "json", "guided_regex": "regex",
    "guided_choice": "choice", "guided_grammar": "grammar", "structured_outputs": "outputs",
    "structural_tag": "json", "json_schema": "json", "json": "json", "regex": "regex",
    "choice": "choice", "grammar": "grammar", "ebnf": "grammar", "tools": "json",
}  # fmt: skip
"""Fields that prescribe a form to a server that bodies are forwarded to, also within
`structured_outputs`; and how their costs are estimated."""

_BRACKETS = re.compile(r"[()\[\]{}]")
_ANY_OBJECT = {"type": "object"}


def guided_decoding_of(body: GenerationBody) -> GuidedDecoding | None:
    """The requested form, or None. Raises InvalidPrompt for two forms, and for a malformed one."""
    wanted = {field: value for field, value in _wishes(body).items() if value is not None}
    if not wanted:
        return None
    (field, (kind, value)), *more = wanted.items()
    if more:
        raise InvalidPrompt(more[0][0], f"an answer has one form, and {field} names one already")
    encoded = _json(field, value) if kind in ("json", "structural_tag") else value
    if kind == "choice" and not value:
        raise InvalidPrompt(field, "there is nothing to choose from")
    if kind == "grammar" and _depth(value) > MAX_GRAMMAR_DEPTH:
        raise InvalidPrompt(field, f"its brackets are nested deeper than {MAX_GRAMMAR_DEPTH}")
    outputs = body.structured_outputs
    spaces = (outputs.whitespace_pattern if outputs else None) or body.guided_whitespace_pattern
    check_cost(field, _cost(kind, value) + cost_of_pattern(spaces or ""))
    form: dict[str, Any] = {kind: tuple(value) if kind == "choice" else encoded}
    return GuidedDecoding(**form, backend=body.guided_decoding_backend, whitespace_pattern=spaces)


def forwarded_forms(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body that prescribe the form of its answer to the server it is forwarded to;
    tools where a call is enforced."""
    is_enforced = fields.get("tool_choice") not in (None, "none", "auto")
    return {
        name: value for name, value in fields.items()
        if name in FORWARDED and value and (name != "tools" or is_enforced)
        and value != {"type": "text"}
    }  # fmt: skip


def check_forwarded_forms(fields: Mapping[str, Any]) -> None:
    """Raises InvalidPrompt for a form in a body that costs too much."""
    for name, value in forwarded_forms(fields).items():
        check_cost(name, _cost_of_forwarded(name, value))


def _cost_of_forwarded(name: str, value: Any) -> int:
    match FORWARDED.get(name), value:
        case "outputs", dict():
            return sum(_cost_of_forwarded(kind, form) for kind, form in value.items())
        case "regex" | "grammar" as kind, str():
            return _cost(kind, value)
        case "choice", list():
            return cost_of_choices(choice for choice in value if isinstance(choice, str))
        case "json", str():
            with suppress(msgspec.DecodeError, UnicodeError):
                return cost_of_json(msgspec.json.decode(value))
    return cost_of_json(value)


def check_cost(field: str, cost: int) -> None:
    """Raises InvalidPrompt for a form that costs too much."""
    if cost > MAX_COST:
        raise InvalidPrompt(
            field,
            f"is too complex to enforce: it has {cost} states or more by estimate, of which "
            f"{MAX_COST} are allowed; use fewer alternatives, and smaller numbers of repetitions",
        )


def _cost(kind: str, value: Any) -> int:
    match kind:
        case "choice":
            return cost_of_choices(value)
        case "regex" | "grammar":
            return cost_of_pattern(value, is_grammar=kind == "grammar")
    return cost_of_json(msgspec.json.decode(value) if isinstance(value, str) else value)


def guided_field(body: GenerationBody) -> str | None:
    """The first field that prescribes a form; None without one. Raises as `guided_decoding_of`."""
    return next((field for field, value in _wishes(body).items() if value is not None), None)


def _wishes(body: GenerationBody) -> dict[str, tuple[str, Any] | None]:
    """By field: the kind of the constraint, and the constraint."""
    wishes = {
        "response_format": _response_format(body),
        "guided_json": _wish("json", body.guided_json),
        "guided_regex": _wish("regex", body.guided_regex),
        "guided_choice": _wish("choice", body.guided_choice),
        "guided_grammar": _wish("grammar", body.guided_grammar),
    }
    if (outputs := body.structured_outputs) is not None:
        wishes |= {
            "structured_outputs.json": _wish("json", outputs.json_),
            "structured_outputs.json_object": _wish("json", _ANY_OBJECT)
            if outputs.json_object
            else None,
            "structured_outputs.regex": _wish("regex", outputs.regex),
            "structured_outputs.choice": _wish("choice", outputs.choice),
            "structured_outputs.grammar": _wish("grammar", outputs.grammar),
            "structured_outputs.structural_tag": _wish("structural_tag", outputs.structural_tag),
        }
    return wishes


def _wish(kind: str, value: Any) -> tuple[str, Any] | None:
    return None if value is None else (kind, value)


def _response_format(body: GenerationBody) -> tuple[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return "json", _ANY_OBJECT
    if wanted.json_schema is None or wanted.json_schema.form is None:
        raise InvalidPrompt("response_format.json_schema.schema", "is needed with this type")
    return "json", wanted.json_schema.form


def _json(field: str, value: Any) -> JsonText:
    """JSON text of an object; JSON text itself stays as it is."""
    try:
        return msgspec.json.encode(msgspec.json.decode(value) if isinstance(value, str) else value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise InvalidPrompt(field, "is not JSON") from None


def _depth(grammar: str) -> int:
    depth = deepest = 0
    for char in _BRACKETS.findall(grammar):
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth = max(depth - 1, 0)
    return deepest


MAX_COST = 1_200_000
"""Cost of one form, at which its estimate ends. A regular expression with 5000 repetitions of a
small class has it, a schema with 20 000 fields, or 8192 choices of 30 characters."""

_BRANCH = 20
"""An alternative, a group, a class, a field of a schema, in addition to its characters."""
_ESCAPE = 4
_CLASS = 3
_REPEATED = 20
"""A character that is repeated: each repetition may be the last one."""
_CHOSEN = 4
"""A character of a choice: every other choice may go on differently there."""
_OF_LENGTH = 2
"""A character that a longest length allows: they all repeat one simple class."""
_UNICODE_CLASS = 1000
_MAX_GROUPS = 500
"""Groups inside groups: the parsers of patterns are recursive."""
_UNREAD = frozenset({"$comment", "default", "description", "examples", "title"})
_QUANTIFIER = re.compile(
    r"\{\s{0,9}(\d++)\s{0,9}(?:,\s{0,9}(\d*+)\s{0,9})?\}|~\s{0,9}(\d++)(?:\s{0,9}\.\.\s{0,9}(\d++))?"
)
_SPECIAL = re.compile(r"[()|{~\[\\\n]")
_CLASS_NAME = re.compile(r"\\[pP](?:\{[^}]{0,40}\}|.)")


def cost_of_choices(choices: Iterable[str]) -> int:
    return _sum(_CHOSEN * len(choice) + _BRANCH for choice in choices)


def cost_of_pattern(pattern: str, *, is_grammar: bool = False) -> int:
    """Of a regular expression; or of a grammar in EBNF or for Lark, in which a quantifier is taken
    to repeat all of its alternative. Groups that are nested too deeply cost too much."""
    outer: list[int] = []
    total = last = at = 0
    while total <= MAX_COST and (found := _SPECIAL.search(pattern, at)) is not None:
        plain = found.start() - at
        total += plain
        last = last + plain if is_grammar else min(plain, 1) or last
        size, cost = _part(pattern, found.start(), last)
        match found[0]:
            case "(":
                outer.append(total + cost)
                total = last = 0
                if len(outer) > _MAX_GROUPS:
                    return MAX_COST + 1
            case ")":
                last = total + cost
                total = (outer.pop() if outer else 0) + last
            case "{" | "~" if size > 1:
                total += cost
                last += cost
            case _:
                total += cost
                one = min(cost, _CLASS) if found[0] == "[" else cost
                last = 0 if found[0] in "|\n" else (last if is_grammar else 0) + one
        at = found.start() + size
    return total + len(pattern) - at + sum(outer)


def _part(pattern: str, at: int, last: int) -> tuple[int, int]:
    """Length and cost of what begins with a special character; `last`: the cost of what precedes
    it, which a quantifier repeats."""
    size, cost = 1, _BRANCH
    match pattern[at]:
        case "{" | "~":
            if (quantifier := _QUANTIFIER.match(pattern, at)) is not None:
                times = max(int(n.lstrip("0")[:10] or 0) for n in quantifier.groups() if n)
                size, cost = len(quantifier[0]), _REPEATED * last * times
        case "[":
            size = _end_of_class(pattern, at) - at
            cost = size + _BRANCH
        case "\\":
            size, cost = 2, _ESCAPE
            if (name := _CLASS_NAME.match(pattern, at)) is not None:
                size, cost = len(name[0]), _UNICODE_CLASS
    return size, cost


def _end_of_class(pattern: str, at: int) -> int:
    """The index behind a class of characters that begins here; of the next one if it has no end."""
    end = pattern.find("]", at + 2)
    while end > 0 and pattern[end - 1] == "\\":
        end = pattern.find("]", end + 1)
    return end + 1 if end > 0 else len(pattern)


def cost_of_json(value: Any) -> int:  # noqa: C901 - a table
    """Of a JSON schema, or of an object with schemas in it."""
    if isinstance(value, str):
        return len(value) + _BRANCH
    if isinstance(value, list):
        return _sum(map(cost_of_json, value))
    if not isinstance(value, dict):
        return 1
    items = max(_count(value.get("minItems")), _count(value.get("maxItems")))
    properties = max(_count(value.get("minProperties")), _count(value.get("maxProperties")))
    # A part is estimated once: its parts may be repeated as well.
    times = {"items": items, "prefixItems": items, "additionalProperties": properties}
    cost = 1 + items + properties
    for key, inner in value.items():
        if cost > MAX_COST:
            return cost
        if key in _UNREAD and not isinstance(inner, dict):
            continue
        cost += len(key) + _BRANCH
        if key == "pattern" and isinstance(inner, str):
            cost += cost_of_pattern(inner)
        elif key == "grammar" and isinstance(inner, str):
            cost += cost_of_pattern(inner, is_grammar=True)
        elif key == "patternProperties" and isinstance(inner, dict):
            cost += _sum(map(cost_of_pattern, inner)) + cost_of_json(inner)
        elif key in ("minLength", "maxLength"):
            cost += _OF_LENGTH * _count(inner)
        else:
            cost += (1 + times.get(key, 0)) * cost_of_json(inner)
    return cost


def _sum(costs: Iterable[int]) -> int:
    total = 1
    for cost in costs:
        total += cost
        if total > MAX_COST:
            break
    return total


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and value > 0 else 0
