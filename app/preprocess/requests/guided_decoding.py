"""Guided decoding: the required form of an answer, from all fields that can request one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.grammar_cost import (
    MAX_COST,
    cost_of_choices,
    cost_of_json,
    cost_of_pattern,
)
from kvlane.app.preprocess.requests.request_models import GenerationBody
from kvlane.streams.record_base import JsonText
from kvlane.streams.request import GuidedDecoding

MAX_GRAMMAR_DEPTH = 500
"""Brackets inside brackets: the parsers of grammars are recursive."""

FORWARDED = {
    "response_format": "json", "guided_json": "json", "guided_regex": "regex",
    "guided_choice": "choice", "guided_grammar": "grammar", "structured_outputs": "outputs",
    "structural_tag": "json", "json_schema": "json", "json": "json", "regex": "regex",
    "choice": "choice", "grammar": "grammar", "ebnf": "grammar", "tools": "json",
}  # fmt: skip
"""Fields that prescribe a form to one of the servers that bodies are forwarded to, or within
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
    """Raises InvalidPrompt for a form that costs too much (`grammar_cost.py`)."""
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
