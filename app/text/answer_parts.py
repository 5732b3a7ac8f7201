"""Parts of an answer, and the parser without calls, which the others extend."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from kvlane.streams.records import PassthroughDelta

CHAR_BYTES = 6
"""Of an escaped control character in JSON; anything else is shorter."""
_ITEM_BYTES = 100  # field names, numbers, the position
REASONING = -1
_encode = msgspec.json.Encoder().encode


class AnswerPart(NamedTuple):
    """A part of an answer: content, or a delta of OpenAI's form."""

    content: str = ""
    delta: dict[str, Any] | None = None
    call: int | None = None
    """Of a delta with more text: the call whose arguments these are, or REASONING."""
    text: str = ""
    at: int = 0
    """As `PassthroughDelta.at`."""


Emit = Callable[[AnswerPart], None]


class ContentParser:
    """The parser of answers without tool calls: all of the text is content."""

    calls = 0
    malformed_calls = 0
    is_full = False

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def plain_part(self, text: str) -> AnswerPart | None:
        """The part that the next text is, read as by `push`; None, and nothing is read, if a tag
        may begin or end in it."""
        return AnswerPart(text)

    def push(self, text: str) -> None:
        if text:
            self._emit(AnswerPart(text))

    def end(self) -> None:
        """Nothing is kept back."""


def reasoning_part(text: str) -> AnswerPart:
    return AnswerPart("", {"reasoning_content": text, "reasoning": text}, REASONING, text)


def arguments_part(call: int, text: str) -> AnswerPart:
    fields = {"index": call, "function": {"arguments": text}}
    return AnswerPart("", {"tool_calls": [fields]}, call, text)


def name_part(request_id: str, call: int, name: str, arguments: str = "") -> AnswerPart:
    """The beginning of a call."""
    named = {"index": call, "id": call_id(request_id, call), "type": "function"}
    function = {"name": name, "arguments": arguments}
    return AnswerPart(delta={"tool_calls": [named | {"function": function}]})


class JoinedParts:
    """Parts of an answer as items of `Chunk.data`. Adjacent texts of the reasoning, or of the
    arguments of one call, are one item, so that the number does not follow an engine's steps."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """An upper bound on the size of the items in JSON."""
        self._items: list[PassthroughDelta] = []
        self._first = AnswerPart()
        """The first of the texts."""
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._items or self._texts)

    def add(self, part: AnswerPart, at: int) -> None:
        """Add a delta behind `at` characters of the whole text."""
        if part.call is None:
            self.add_item(PassthroughDelta(at=at, delta=part.delta or {}))
            return
        if not self._texts or part.call != self._first.call or at != self._first.at:
            self._close()
            self._first = part._replace(at=at) if at else part
            self.size_bytes += _ITEM_BYTES
        self._texts.append(part.text)
        self.size_bytes += 2 * CHAR_BYTES * len(part.text)

    def add_item(self, item: PassthroughDelta) -> None:
        self._close()
        self._items.append(item)
        self.size_bytes += _ITEM_BYTES + len(_encode(item))

    def take(self) -> tuple[PassthroughDelta, ...]:
        """The items so far, which are no longer held."""
        self._close()
        items = tuple(self._items)
        self._items.clear()
        self.size_bytes = 0
        return items

    def _close(self) -> None:
        if not self._texts:
            return
        part, at = self._first, self._first.at
        if len(self._texts) > 1:
            text, call = "".join(self._texts), part.call or 0
            part = reasoning_part(text) if call == REASONING else arguments_part(call, text)
        self._items.append(PassthroughDelta(at=at, delta=part.delta or {}))
        self._texts.clear()


def writable(text: str) -> str:
    """The text with U+FFFD for each half of a character: models escape them in JSON, and records
    have none."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def call_id(request_id: str, number: int) -> str:
    """The same id for every worker and reader."""
    digest = blake2b(f"{number} {request_id}".encode(), digest_size=12).hexdigest()
    return f"call_{digest}"
