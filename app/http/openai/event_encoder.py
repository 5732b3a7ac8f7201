"""Encoder of the server-sent events of one response, from the pieces of its answers. Pure.

Its task and the reader of the log both use it, one at a time
(`app/http/openai/response_writer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvlane.app.http.api_errors import ApiError, error_of_piece, invalid_request
from kvlane.app.http.openai import openai_responses
from kvlane.app.http.openai.merged_replies import ReplyPiece
from kvlane.app.http.openai.openai_responses import Choice, ChunkEncoder, ResponseHeader
from kvlane.app.http.openai.passthrough_fields import JsonObject, split_chunk
from kvlane.app.metrics.gateway_metrics import TokenTimes
from kvlane.streams.records import Chunk

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
"""A comment, which clients ignore; proxies see that the connection is in use. No empty line: after
an event with a position, OpenAI's client takes that for an event without data, and fails."""


def encode_event(data: bytes, position: int | None = None) -> bytes:
    """One event. `data` is JSON; `position` is the id that a client sends to resume after it."""
    if position is None:
        return b"data: %b\n\n" % data
    return b"id: %d\ndata: %b\n\n" % (position, data)


class ResponseOptions(NamedTuple):
    """Options of a response. `ids`: of its requests, URL-quoted; `n` successive share a prompt.

    `is_resumed`: existing streams are resumed, each after its position of `from_tokens`.
    `reads_to_end`: the stream counts towards limits, and is read, to its end. `interval`: tokens of
    an event of text, at least. `is_background`: the response has the beginning of the answer alone.
    `served_model`: that of the alias in the header of the answer.
    """

    header: ResponseHeader
    ids: Sequence[str]
    stream: bool
    include_usage: bool = False
    n: int = 1
    is_resumed: bool = False
    from_tokens: Sequence[int] = ()
    reads_to_end: bool = False
    interval: int = 1
    is_background: bool = False
    served_model: str = ""


class AnswerEncoder(Protocol):
    """The events and the whole of one response, in the form of its endpoint."""

    keep_alive: bytes

    def add(self, index: int, piece: ReplyPiece) -> None:
        """Add a piece to its choice. Raises ApiError for a failed piece."""

    def encode(self, index: int, piece: ReplyPiece) -> bytes:
        """The events for a piece, possibly none. Raises ApiError for a failed piece, which is the
        last."""

    def encode_held(self) -> bytes:
        """The events for text that waits for an interval to be complete, possibly none."""

    def encode_ending(self) -> bytes:
        """The events after the last piece."""

    def encode_failure(self, failure: ApiError) -> bytes:
        """The events after a failure."""

    def whole(self) -> JsonObject:
        """The complete response as one object; all pieces were added."""

    def resume_query(self) -> str:
        """The query that resumes the response after the events so far."""


class EventEncoder:
    """The answers of one response in OpenAI's form: an `AnswerEncoder`."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self, options: ResponseOptions, choices: Sequence[Choice], paces: Sequence[TokenTimes]
    ) -> None:
        self.choices = choices
        self._options = options
        self._paces = paces
        self._from = options.from_tokens or [0] * len(choices)
        self._sent = [*self._from]
        """Positions behind the last events of the answers; an event has them all."""
        self._held = [_HeldText() for _ in choices]
        self._set_header(options.header)

    def add(self, index: int, piece: ReplyPiece) -> None:
        if (failure := error_of_piece(piece)) is not None:
            raise failure
        if isinstance(piece, Chunk) and piece.model and not self.header.model:
            self._set_header(self.header._replace(model=piece.model))
        choice = self.choices[index]
        choice.add(piece)
        if choice.finish_reason is not None and choice.position < self._from[index]:
            raise invalid_request(
                f"the stream has ended at position {choice.position}, before the one to go on from",
                "from",
            )
        self._paces[index].on_tokens(choice.timed_tokens)

    def encode(self, index: int, piece: ReplyPiece) -> bytes:
        choice = self.choices[index]
        if not (
            choice.has_started
            and type(piece) is Chunk
            and piece.finish_reason is None
            and piece.log_probs is None
            and not piece.data
            and not piece.model
            and choice.position >= self._from[index]
        ):
            return self._encode_unusual(index, piece)
        choice.add(piece)
        self._paces[index].on_tokens(choice.timed_tokens)
        text = piece.text
        if self._options.interval > 1:
            text = self._held[index].add(text, len(piece.token_ids), self._options.interval)
        return self._encode_text(index, text) if text else b""

    def encode_held(self) -> bytes:
        events = b""
        for index, held in enumerate(self._held):
            if text := held.take():
                events += self._encode_text(index, text)
        return events

    def encode_ending(self) -> bytes:
        options = self._options
        if not options.include_usage:
            return DONE
        total = openai_responses.usage_chunk(self.header, self.choices, options.n)
        if total is None:
            return DONE
        return encode_event(msgspec.json.encode(total)) + DONE

    def encode_failure(self, failure: ApiError) -> bytes:
        return encode_event(failure.body()) + DONE

    def whole(self) -> JsonObject:
        return openai_responses.full_response(self.header, self.choices, self._options.n)

    def resume_query(self) -> str:
        kind = self.header.kind
        read = [max(c.position, known) for c, known in zip(self.choices, self._from, strict=True)]
        return f"from={','.join(map(str, read))}" + ("" if kind == "chat" else f"&form={kind}")

    def _set_header(self, header: ResponseHeader) -> None:
        self.header = header
        with_usage = self._options.include_usage
        numbers = range(len(self.choices) if self._options.stream else 0)
        self._encoders = [ChunkEncoder(header, n, with_usage=with_usage) for n in numbers]

    def _encode_text(self, index: int, text: str) -> bytes:
        data = self._encoders[index].encode_text(text)
        return self._encode_event(index, data)

    def _encode_unusual(self, index: int, piece: ReplyPiece) -> bytes:
        if (failure := error_of_piece(piece)) is not None:
            raise failure  # held text can still be sent
        held = self._held[index].take()
        before = self._encode_text(index, held) if held else b""
        if (rest := self._rest(index, piece)) is None:
            self.add(index, piece)
            return before
        if isinstance(rest, Chunk) and rest.data and not rest.token_ids:
            return before + b"".join(self._encode_part(index, part) for part in split_chunk(rest))
        return before + self._encode_part(index, rest)

    def _rest(self, index: int, piece: ReplyPiece) -> ReplyPiece | None:
        """The part of a piece that a resuming client lacks; None if it has all of it."""
        choice, position = self.choices[index], self._from[index]
        if not isinstance(piece, Chunk) or choice.position >= position:
            return piece
        return choice.rest_of(piece, position)

    def _encode_part(self, index: int, piece: ReplyPiece) -> bytes:
        """The event of a piece that has one position: with token ids, or a part of another."""
        choice = self.choices[index]
        self.add(index, piece)
        event = self._encoders[index].encode(choice, piece)
        if event is None:
            return b""
        return self._encode_event(index, event)

    def _encode_event(self, index: int, data: bytes) -> bytes:
        self._sent[index] = position = self.choices[index].position
        if len(self._sent) == 1:
            return encode_event(data, position)
        return b"id: %b\n" % ",".join(map(str, self._sent)).encode() + encode_event(data)


class _HeldText:
    """Text of a choice that is in no event yet, because an interval is incomplete."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._tokens = 0

    def add(self, text: str, tokens: int, interval: int) -> str:
        """Add a piece; returns the held text if it completes an interval, otherwise nothing."""
        self._parts.append(text)
        self._tokens += tokens or 1  # a server that reports no token ids counts with its pieces
        return self.take() if self._tokens >= interval else ""

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        self._tokens = 0
        return text
