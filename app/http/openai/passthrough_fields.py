"""Passthrough fields: response fields of attached servers other than text.

A stream forwards them unchanged, a whole response merges them by OpenAI's rules for deltas. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from msgspec.structs import replace

from kvlane.streams.records import Chunk, PassthroughDelta

JsonObject = dict[str, Any]

_REPLACED_FIELDS = frozenset({"type", "role", "index"})
"""Strings that are replaced by later ones instead of being concatenated."""
_REPEATED_FIELDS = frozenset({"id", "name"})
"""Strings that some servers send in pieces, and others whole in every delta."""


def split_chunk(piece: Chunk) -> Iterator[Chunk]:
    """Split a chunk into parts with at most one aside each. An aside about the text that follows
    it, such as log probabilities, stays with that text; the last part has the fields of the
    whole."""
    if not piece.data:
        yield piece
        return
    begins_at = piece.chars - len(piece.text)
    parts: list[Chunk] = []

    def add(until: int, *asides: PassthroughDelta) -> None:
        at = parts[-1].chars if parts else begins_at
        parts.append(_part(piece, piece.text[at - begins_at : until - begins_at], until, asides))

    ends = [max(aside.at, begins_at) for aside in piece.data[1:]] + [piece.chars]
    if (first := piece.data[0].at) > begins_at:
        add(first)
    for aside, end in zip(piece.data, ends, strict=True):
        at = parts[-1].chars if parts else begins_at
        if not aside.delta:
            add(max(at, end), aside)
            continue
        add(at, aside)
        if end > at:
            add(end)
    if piece.finish_reason is not None and any(aside.delta for aside in parts[-1].data):
        add(piece.chars)
    yield from parts[:-1]
    last = parts[-1]
    yield replace(piece, text=last.text, chars=last.chars, data=last.data)


def _part(piece: Chunk, text: str, until: int, asides: tuple[PassthroughDelta, ...]) -> Chunk:
    """Part of a chunk, up to a position in the whole text, without an end."""
    return replace(piece, text=text, chars=until, data=asides, finish_reason=None, usage=None)


def merge_fields(*deltas: Mapping[str, Any]) -> JsonObject:
    """Merge successive deltas: texts are concatenated, list items are merged by their index. All at
    once, since a text that grows by pieces would be copied with each."""
    values: dict[str, list[Any]] = {}
    for each in deltas:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: _whole(name, pieces) for name, pieces in values.items()}


def _whole(name: str, pieces: Sequence[Any]) -> Any:
    """Merge successive values of a field; a value of another type replaces earlier ones."""
    run: list[Any] = []
    for piece in pieces:
        if piece is None:
            continue
        if run and type(piece) is not type(run[-1]):
            run.clear()
        run.append(piece)
    match run:
        case [str(), *_]:
            return _text(name, run)
        case [dict(), *_]:
            return merge_fields(*run)
        case [list(), *_]:
            return _listed(name, [item for items in run for item in items])
    return run[-1] if run else None


def _text(name: str, pieces: Sequence[str]) -> str:
    if name in _REPLACED_FIELDS:
        return next((text for text in reversed(pieces) if text), "")
    if name in _REPEATED_FIELDS:
        return reduce(joined_name, pieces)
    return "".join(pieces)


def joined_name(whole: str, text: str) -> str:
    """A name with its next piece, or the same name whole again."""
    return whole if text == whole else whole + text


def _listed(name: str, items: Sequence[Any]) -> list[Any]:
    """Merge list items that have the same index; tool calls also without one."""
    whole: list[list[Any]] = []
    by_index: dict[Hashable, list[Any]] = {}
    for item in items:
        is_call = name == "tool_calls"
        at = call_key(item) if is_call else _index(item)
        if is_call and whole and continues_call(item):
            whole[-1].append(item)
            continue
        if at is None:
            whole.append([item])
        elif at in by_index:
            by_index[at].append(item)
        else:
            by_index[at] = [item]
            whole.append(by_index[at])
    return [merge_fields(*pieces) if len(pieces) > 1 else pieces[0] for pieces in whole]


def _index(item: Any) -> Hashable:
    index = item.get("index") if isinstance(item, dict) else None
    return index if isinstance(index, int | str) else None


def call_key(item: Any) -> Hashable:
    """The key of a part of a tool call: its index, else its id; None without both."""
    if (index := _index(item)) is not None:
        return index
    found = item.get("id") if isinstance(item, dict) else None
    return ("id", found) if found and isinstance(found, str) else None


def continues_call(item: Any) -> bool:
    """True for a part of a tool call without index, id and name, which continues the last."""
    function = item.get("function") if isinstance(item, dict) else None
    has_name = not isinstance(function, dict) or bool(function.get("name"))
    return call_key(item) is None and not has_name


def sum_counts(*counted: Mapping[str, Any]) -> JsonObject:
    """Sum numbers by their names; of other values the last one counts."""
    total: JsonObject = {}
    for each in counted:
        for name, value in each.items():
            match total.get(name), value:
                case (dict() as known, dict()):
                    total[name] = sum_counts(known, value)
                case (int() | float() as known, int() | float()):
                    total[name] = known + value
                case _:
                    total[name] = value
    return total


def to_message(delta: Mapping[str, Any]) -> JsonObject:
    """Merged deltas in the form of a message, whose lists have no index."""
    return {
        name: [_without_index(item) for item in value] if isinstance(value, list) else value
        for name, value in delta.items()
    }


def _without_index(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    return {name: value for name, value in item.items() if name != "index"}


def merge_deltas(*deltas: PassthroughDelta) -> PassthroughDelta:
    event: JsonObject = {}
    for each in deltas:
        event |= each.event
    return PassthroughDelta(
        delta=merge_fields(*(each.delta for each in deltas)),
        choice=merge_fields(*(each.choice for each in deltas)),
        event=event,
    )
