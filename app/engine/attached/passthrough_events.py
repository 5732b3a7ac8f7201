"""Answers passed through: the events of an OpenAI stream, and embeddings, to engine outputs.

Text becomes text; only the end, token counts and errors are interpreted; all other fields of an
event become an aside. The deadline of the request bounds the stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from msgspec.structs import replace

from kvlane.app.engine.attached.answer_stream import (
    AnswerStream,
    non_empty,
    parse_finish_reason,
    parse_usage,
)
from kvlane.app.engine.attached.server_client import EventStream
from kvlane.app.engine.attached.server_errors import (
    ResponseTooLarge,
    ServerFailed,
    error_of_event,
    error_of_text,
    is_json,
)
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext, InvalidRequest
from kvlane.streams.records import PassthroughDelta, Usage

_OTHERS = frozenset({"id", "object", "created", "model"})
"""Fields of an event that the gateway writes itself."""
MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Limit on one event: images and audio come in a few large ones. Each becomes a Chunk at most."""
MAX_EMBEDDINGS_BYTES = 6 * 1024 * 1024
"""Limit on one answer, which is one Chunk: a record has 8 MiB at most."""
_events = msgspec.json.Decoder(dict[str, Any])


class PassthroughStream(AnswerStream):
    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._counts: Usage | None = None
        self._sent: dict[str, Any] = {}
        """The fields besides choices already sent: most events repeat them."""
        self._begun = False
        self._held_back: dict[str, Any] = {}
        """Fields from before the first output, sent with it: until then another server can give
        the answer."""

    def _too_large(self, error: ResponseTooLarge) -> EngineError:
        """As in the base: it would be too large at every server."""
        return InvalidRequest(f"the answer is too large: {error}")

    def _usage(self) -> Usage | None:
        return self._counts

    def _output(self, event: bytes) -> EngineOutput:
        fields = _read(event)
        self._counts = parse_usage(fields.pop("usage", None)) or self._counts
        choice = _choice(fields.pop("choices", None))
        # A server that streams nothing sends a message.
        delta = choice.pop("delta", None) or choice.pop("message", None) if self._is_chat else {}
        delta = _object(delta, "delta")
        text = (delta if self._is_chat else choice).pop("content" if self._is_chat else "text", "")
        if text is not None and not isinstance(text, str):
            raise ServerFailed(f"the server sent text of type {type(text).__name__}")
        if delta.get("role") == "assistant":
            del delta["role"]
        reason = parse_finish_reason(choice.pop("finish_reason", None))
        stop_reason = choice.get("stop_reason")
        delta, choice = non_empty(delta), non_empty(choice)
        self._held_back |= self._changed_fields(fields)
        self._begun = self._begun or bool(text or delta or choice or reason)
        if not self._begun:
            return EngineOutput()
        data: tuple[PassthroughDelta, ...] = ()
        if delta or choice or self._held_back:
            data = (PassthroughDelta(delta=delta, choice=choice, event=self._held_back),)
            self._held_back = {}
        return EngineOutput(
            text=text or "",
            finish_reason=reason,
            stop_reason=stop_reason if isinstance(stop_reason, (int, str)) else None,
            data=data,
        )

    def _changed_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        sent = self._sent
        others = {name: value for name, value in fields.items() if name not in _OTHERS}
        changed = {
            name: value
            for name, value in non_empty(others).items()
            if name not in sent or sent[name] != value
        }
        sent |= changed
        return changed


class EmbeddingsResponse:
    """An answer of embeddings, without a stream: all of it is one aside."""

    async def read_outputs(
        self, stream: EventStream, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the only output. Raises ServerFailed, and InvalidRequest for one too large."""
        try:
            body = await stream.read_all(MAX_EMBEDDINGS_BYTES)
        except ResponseTooLarge as e:
            raise InvalidRequest(
                f"input: the embeddings exceed the limit of {MAX_EMBEDDINGS_BYTES} bytes: "
                "send fewer texts per request, or use encoding_format base64"
            ) from e
        if context.is_stopped:
            yield self.cancelled_output()
            return
        # Not in a thread: decoding holds the interpreter lock anyway, 30 ms at the limit.
        try:
            fields = _read(body)
        except ServerFailed:
            if not is_json(body):
                raise error_of_text(body) from None
            raise
        counts = parse_usage(fields.pop("usage", None))
        if counts is not None:  # no answer is generated, so none is counted
            unknown = tuple(name for name in counts.unknown if name != "completion_tokens")
            counts = replace(counts, unknown=unknown)
        if not isinstance(fields.get("data"), list):
            raise ServerFailed("the server sent no list of embeddings in `data`")
        event = {name: value for name, value in non_empty(fields).items() if name not in _OTHERS}
        yield EngineOutput(
            data=(PassthroughDelta(event=event),), finish_reason="stop", usage=counts
        )

    def cancelled_output(self) -> EngineOutput:
        return EngineOutput.cancelled()


def _read(event: bytes) -> dict[str, Any]:
    """Decode an event. Raises ServerFailed or RequestRejected for an error event."""
    try:
        fields = _events.decode(event)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise ServerFailed(f"the server sent an invalid event: {e}") from e
    if (error := error_of_event(fields)) is not None:
        raise error
    return fields


def _choice(choices: Any) -> dict[str, Any]:
    if not choices:
        return {}
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
        choice = dict(choices[0])
        if choice.pop("index", None) in (0, None):
            return choice
    raise ServerFailed("the server sent choices other than the requested one")


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is None or isinstance(value, dict):
        return value or {}
    raise ServerFailed(f"the server sent a {name} that is not an object")
