"""What servers say besides text, on its way to OpenAI's clients: in a stream as it came, in a whole
answer put together.

Pure functions over `Aside`s. Knows how OpenAI means the pieces of a stream to be put together, and
nothing of what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from streams.records import Aside, Chunk

Json = dict[str, Any]

_SAID_AGAIN = frozenset({"id", "type", "name", "role", "index"})
"""Strings that name something: a later one stands for it, it is not a piece of it."""


def parts_of(piece: Chunk) -> Iterator[Chunk]:
    """A piece as several, each with text or with one aside, in the order in which they were said.

    The last one has what belongs to all of them.
    """
    if not piece.data:
        yield piece
        return
    begins_at = at = piece.chars - len(piece.text)
    for aside in piece.data:
        if aside.at > at:
            yield _part(piece, piece.text[at - begins_at : aside.at - begins_at], at=aside.at)
            at = aside.at
        yield replace(_part(piece, "", at=at), data=(aside,))
    if at < piece.chars or piece.finish_reason is not None:
        yield replace(piece, text=piece.text[at - begins_at :], data=())


def _part(piece: Chunk, text: str, *, at: int) -> Chunk:
    """Some of a piece, up to a place in the whole text; nothing ends with it."""
    return replace(piece, text=text, chars=at, data=(), finish_reason=None, usage=None)


def merged(known: Mapping[str, Any], more: Mapping[str, Any]) -> Json:
    """What was said so far, and what comes then: texts go on, lists by the index of their items."""
    whole = dict(known)
    for name, value in more.items():
        whole[name] = _joined(name, whole.get(name), value)
    return whole


def _joined(name: str, known: Any, more: Any) -> Any:
    match known, more:
        case (str(), str()):
            return (more or known) if name in _SAID_AGAIN else known + more
        case (dict(), dict()):
            return merged(known, more)
        case (list() | None, list()):
            return _listed(known or [], more)
    return known if more is None else more


def _listed(known: list[Any], more: list[Any]) -> list[Any]:
    whole = list(known)
    for item in more:
        at = item.get("index") if isinstance(item, dict) else None
        same = next((n for n, each in enumerate(whole) if _index(each) == at), None)
        if at is None or same is None:
            whole.append(item)
        else:
            whole[same] = merged(whole[same], item)
    return whole


def _index(item: Any) -> Any:
    return item.get("index") if isinstance(item, dict) else None


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


def put_together(known: Aside, more: Aside) -> Aside:
    """Two asides as one."""
    return Aside(
        delta=merged(known.delta, more.delta),
        choice=merged(known.choice, more.choice),
        event=dict(known.event) | more.event,
    )
