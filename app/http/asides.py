"""What servers say besides text, on its way to OpenAI's clients: in a stream as it came, in a whole
answer put together.

Pure functions over `Aside`s. Knows how OpenAI means the pieces of a stream to be put together, and
nothing of what they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from streams.records import Aside, Chunk

Json = dict[str, Any]

_SAID_AGAIN = frozenset({"id", "type", "name", "role", "index"})
"""Strings that name something: a later one stands for it, it is not a piece of it."""


def parts_of(piece: Chunk, *, apart: bool = False) -> Iterator[Chunk]:
    """A piece as several, each with at most one aside, in the order in which they were said.

    An aside that is about the text behind it, as log probabilities are, comes with that; one that
    adds to the message comes alone, and with `apart` each does: for who may know the aside and not
    the text. The last part has what belongs to all of them.
    """
    if not piece.data:
        yield piece
        return
    begins_at = piece.chars - len(piece.text)
    parts: list[Chunk] = []

    def add(until: int, *asides: Aside) -> None:
        at = parts[-1].chars if parts else begins_at
        parts.append(_part(piece, piece.text[at - begins_at : until - begins_at], until, asides))

    ends = [max(aside.at, begins_at) for aside in piece.data[1:]] + [piece.chars]
    if (first := piece.data[0].at) > begins_at:
        add(first)
    for aside, end in zip(piece.data, ends, strict=True):
        at = parts[-1].chars if parts else begins_at
        if not (aside.delta or apart):
            add(max(at, end), aside)
            continue
        add(at, aside)
        if end > at:
            add(end)
    if piece.finish_reason is not None and any(a.delta or apart for a in parts[-1].data):
        add(piece.chars)
    yield from parts[:-1]
    last = parts[-1]
    yield replace(piece, text=last.text, chars=last.chars, data=last.data)


def _part(piece: Chunk, text: str, until: int, asides: tuple[Aside, ...]) -> Chunk:
    """Some of a piece, up to a place in the whole text; nothing ends with it."""
    return replace(piece, text=text, chars=until, data=asides, finish_reason=None, usage=None)


def merged(*said: Mapping[str, Any]) -> Json:
    """What was said, one after the other, as one: texts go on, lists by the index of their items.

    All at once, since a text that grows piece by piece would be copied with each.
    """
    values: dict[str, list[Any]] = {}
    for each in said:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: _whole(name, pieces) for name, pieces in values.items()}


def _whole(name: str, pieces: Sequence[Any]) -> Any:
    """Successive values of a field; one of another kind stands for those before it."""
    run: list[Any] = []
    for piece in pieces:
        if piece is None:
            continue
        if run and type(piece) is not type(run[-1]):
            run.clear()
        run.append(piece)
    match run:
        case []:
            return None
        case [str(), *_] if name in _SAID_AGAIN:
            return next((text for text in reversed(run) if text), "")
        case [str(), *_]:
            return "".join(run)
        case [dict(), *_]:
            return merged(*run)
        case [list(), *_]:
            return _listed([item for items in run for item in items])
    return run[-1]


def _listed(items: Sequence[Any]) -> list[Any]:
    """Items with the same index are pieces of one."""
    whole: list[list[Any]] = []
    by_index: dict[Hashable, list[Any]] = {}
    for item in items:
        at = item.get("index") if isinstance(item, dict) else None
        if not isinstance(at, int | str):
            whole.append([item])
        elif at in by_index:
            by_index[at].append(item)
        else:
            by_index[at] = [item]
            whole.append(by_index[at])
    return [merged(*pieces) if len(pieces) > 1 else pieces[0] for pieces in whole]


def added(*counted: Mapping[str, Any]) -> Json:
    """Numbers of several, by their names; of what is no number the last."""
    total: Json = {}
    for each in counted:
        for name, value in each.items():
            match total.get(name), value:
                case (dict() as known, dict()):
                    total[name] = added(known, value)
                case (int() | float() as known, int() | float()):
                    total[name] = known + value
                case _:
                    total[name] = value
    return total


def message_of(delta: Mapping[str, Any]) -> Json:
    """Deltas that were put together, as a message has them: its lists need no index."""
    return {
        name: [_without_index(item) for item in value] if isinstance(value, list) else value
        for name, value in delta.items()
    }


def _without_index(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    return {name: value for name, value in item.items() if name != "index"}


def put_together(*said: Aside) -> Aside:
    """Several asides, one after the other, as one."""
    event: Json = {}
    for each in said:
        event |= each.event
    return Aside(
        delta=merged(*(each.delta for each in said)),
        choice=merged(*(each.choice for each in said)),
        event=event,
    )
