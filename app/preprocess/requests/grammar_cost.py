"""Cost of compiling the required form of an answer: an estimate from its text alone. Pure.

The time of an engine grows with the states of a form, not its characters: `(a|b){0,900}` has
thousands. So a character costs 1, an alternative, a group or a class more, and a repeated part as
often as it may occur. The estimate ends where a form costs too much.

It refuses large forms early and bounds no time: small ones can take minutes. A worker with vLLM has
trials for them (app/engine/vllm/form_trials.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MAX_COST = 1_200_000
"""Of one form. A regular expression with 5000 repetitions of a small class, a schema with 20 000
fields, or 8192 choices of 30 characters."""

_BRANCH = 20
"""An alternative, a group, a class, a field of a schema, in addition to its characters."""
_ESCAPE = 4
_CLASS = 3
"""A class that is repeated."""
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
"""Keys of a schema without effect on the form."""
_QUANTIFIER = re.compile(
    r"\{\s{0,9}(\d++)\s{0,9}(?:,\s{0,9}(\d*+)\s{0,9})?\}|~\s{0,9}(\d++)(?:\s{0,9}\.\.\s{0,9}(\d++))?"
)
_SPECIAL = re.compile(r"[()|{~\[\\\n]")
_CLASS_NAME = re.compile(r"\\[pP](?:\{[^}]{0,40}\}|.)")


def cost_of_choices(choices: Iterable[str]) -> int:
    return _sum(_CHOSEN * len(choice) + _BRANCH for choice in choices)


def cost_of_pattern(pattern: str, *, is_grammar: bool = False) -> int:
    """Of a regular expression; or of a grammar in EBNF or for Lark, in which a quantifier is taken
    to repeat all of its alternative: its parts are words there, not characters. Groups that are
    nested too deeply cost too much."""
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
    it, which a quantifier repeats. A brace that is no quantifier has length 1."""
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
