"""Items of an answer: its text, reasoning and tool calls, in the order in which they begin.

    pieces ──► AnswerItems ──ItemChange: begin, text, end──► events of an endpoint

An event has the number of the one before it and one more, or for text one more for each of its
characters. So numbers follow from the answer alone, not from its pieces, and a reader that resumes
after any number gets the rest, also within a text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from kvlane.app.http.api_errors import error_of_piece, invalid_request
from kvlane.app.http.openai.event_encoder import ResponseOptions
from kvlane.app.http.openai.merged_replies import ReplyPiece
from kvlane.app.http.openai.openai_responses import Choice
from kvlane.app.http.openai.passthrough_fields import (
    JsonObject,
    call_key,
    continues_call,
    joined_name,
)
from kvlane.app.metrics.gateway_metrics import TokenTimes
from kvlane.streams.records import Chunk, Usage

ItemKind = Literal["text", "reasoning", "call"]


class AnswerItem:
    def __init__(self, kind: ItemKind, index: int, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.index = index
        self.call_id = call_id
        self.name = name
        self.has_begun = False
        """Whether a change has announced it: a call is announced once its name is complete."""
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far: content, reasoning, or the arguments of the call."""
        return "".join(self._parts)

    def add(self, text: str) -> None:
        self._parts.append(text)


class ItemChange(NamedTuple):
    """A step of an item. `text` is the next part of it; only in the step `text`."""

    step: Literal["begin", "text", "end"]
    item: AnswerItem
    text: str = ""


class AnswerItems:
    """The items of one answer, from its pieces in order. White space alone is no text item."""

    def __init__(self) -> None:
        self.items: list[AnswerItem] = []
        self._space = ""
        """White space that may begin a text."""
        self._open: AnswerItem | None = None
        self._calls: dict[Hashable, AnswerItem] = {}

    def add(self, piece: Chunk) -> Iterator[ItemChange]:
        """The changes by a piece. An item of `data` comes before the text at its place."""
        begins_at = piece.chars - len(piece.text)
        done = 0
        for aside in piece.data:
            place = max(done, aside.at - begins_at)
            yield from self._add_text("text", piece.text[done:place])
            yield from self._add_delta(aside.delta)
            done = place
        yield from self._add_text("text", piece.text[done:])

    def end(self) -> Iterator[ItemChange]:
        if self._open is not None:
            yield from self._begun(self._open)
            ended, self._open = self._open, None
            yield ItemChange("end", ended)

    def _add_delta(self, delta: Mapping[str, Any]) -> Iterator[ItemChange]:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(reasoning, str):
            yield from self._add_text("reasoning", reasoning)
        if isinstance(refusal := delta.get("refusal"), str):
            yield from self._add_text("text", refusal)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                yield from self._add_call(call)

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[ItemChange]:
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = str(function.get("name") or ""), function.get("arguments")
        key = call_key(call)
        if self._calls and continues_call(call):
            key = next(reversed(self._calls))
        item = self._calls.get(key)
        if item is None:
            call_id = str(call.get("id") or f"call_{len(self._calls)}")
            yield from self._begin("call", call_id, name)
            key = ("call", len(self._calls)) if key is None else key
            item = self._calls[key] = self.items[-1]
        elif not item.has_begun:
            item.name = joined_name(item.name, name)
        if arguments not in (None, ""):
            yield from self._begun(item)
            is_text = isinstance(arguments, str)
            text = arguments if is_text else msgspec.json.encode(arguments).decode()
            item.add(text)
            yield ItemChange("text", item, text)

    def _add_text(self, kind: ItemKind, text: str) -> Iterator[ItemChange]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            if kind == "text":
                text, self._space = self._space + text, ""
                if text.isspace():
                    self._space = text
                    return
            yield from self._begin(kind)
        item = self.items[-1]
        item.add(text)
        yield ItemChange("text", item, text)

    def _begin(self, kind: ItemKind, call_id: str = "", name: str = "") -> Iterator[ItemChange]:
        yield from self.end()
        self._space = ""
        self._open = AnswerItem(kind, len(self.items), call_id, name)
        self.items.append(self._open)
        if kind != "call":
            yield from self._begun(self._open)

    def _begun(self, item: AnswerItem) -> Iterator[ItemChange]:
        if not item.has_begun:
            item.has_begun = True
            yield ItemChange("begin", item)


_NO_COUNTS = Usage(unknown=("prompt_tokens", "completion_tokens", "cached_tokens"))


class ItemEncoder:
    """Events and whole of one answer as items: an `AnswerEncoder`, without those of its form."""

    keep_alive: bytes
    form: str
    hidden = ""
    """The kind of items whose text is left out of the events."""

    def __init__(
        self, options: ResponseOptions, choices: Sequence[Choice], paces: Sequence[TokenTimes]
    ) -> None:
        (self.choice,) = choices
        self._paces = paces
        self.header = options.header
        self.items = AnswerItems()
        self.stop_string: str | None = None
        """The stop string that ended the answer."""
        self._from = next(iter(options.from_tokens), 0)
        self._number = 0
        self._has_begun = False
        self.is_ending = False

    def add(self, index: int, piece: ReplyPiece) -> None:
        self.encode(index, piece)

    def encode(self, index: int, piece: ReplyPiece) -> bytes:  # noqa: ARG002
        if (failure := error_of_piece(piece)) is not None:
            raise failure
        self.choice.add(piece)
        events = b""
        if isinstance(piece, Chunk):
            if piece.model and not self.header.model:
                self.header = self.header._replace(model=piece.model)
            if isinstance(piece.stop_reason, str):
                self.stop_string = piece.stop_reason
            for change in self.items.add(piece):
                events += self._encode_change(change)
        for pace in self._paces:
            pace.on_tokens(self.choice.timed_tokens)
        return events

    def encode_held(self) -> bytes:
        return b""

    def encode_ending(self) -> bytes:
        events = self._beginning()
        self.is_ending = True
        for change in self.items.end():
            events += self._encode_change(change)
        events += self._numbered(self.last_events())
        if self._number < self._from:
            raise invalid_request(
                f"the stream has ended at position {self._number}, before the one to go on from",
                "from",
            )
        return events

    def encode_last(self, event: JsonObject) -> bytes:
        """An event after which nothing comes, also for a reader that lacks nothing else."""
        events = self._beginning()
        self._number = max(self._number, self._from) + 1
        return events + self._framed(event)

    def whole(self) -> JsonObject:
        """As `AnswerEncoder.whole`. Raises ApiError if the answer ends before a position."""
        whole = self.whole_answer()
        if self._from:
            self.encode_ending()
        return whole

    def resume_query(self) -> str:
        return f"from={max(self._number, self._from)}&form={self.form}"

    @property
    def usage(self) -> Usage:
        return self.choice.usage or _NO_COUNTS

    def _encode_change(self, change: ItemChange) -> bytes:
        events = self._beginning()
        if change.step != "text":
            return events + self._numbered(self.item_events(change))
        known = max(0, self._from - self._number)
        self._number += len(change.text)
        if known >= len(change.text) or change.item.kind == self.hidden:
            return events
        event = self.text_event(change._replace(text=change.text[known:]))
        return events + self._framed(event)

    def _beginning(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._numbered(self.first_events())

    def _numbered(self, events: Sequence[JsonObject]) -> bytes:
        """Events that are no text, each with the next number, without known ones."""
        framed = b""
        for event in events:
            self._number += 1
            if self._number > self._from:
                framed += self._framed(event)
        return framed

    def _framed(self, event: JsonObject) -> bytes:
        return b"event: %b\nid: %d\ndata: %b\n\n" % (
            event["type"].encode(),
            self._number,
            msgspec.json.encode(self.with_number(event, self._number)),
        )

    # --- of the form -----------------------------------------------------------------------------

    def whole_answer(self) -> JsonObject:
        """The answer as one object."""
        raise NotImplementedError

    def first_events(self) -> Sequence[JsonObject]:
        """The events before all items."""
        raise NotImplementedError

    def item_events(self, change: ItemChange) -> Sequence[JsonObject]:
        """The events at the begin or the end of an item."""
        raise NotImplementedError

    def text_event(self, change: ItemChange) -> JsonObject:
        """The event of a part of an item's text."""
        raise NotImplementedError

    def last_events(self) -> Sequence[JsonObject]:
        """The events after all items."""
        raise NotImplementedError

    def with_number(self, event: JsonObject, number: int) -> JsonObject:  # noqa: ARG002
        """An event with its number, where the form has a field for it."""
        return event
