"""Engine over a running server that receives OpenAI bodies unchanged, for one kind of request.

    Request.body ─► request_body.py ─► server_client.py ─HTTP─► the server ─► EngineOutputs

The server handles templates, tools, reasoning and images. Tokens and cache are unknown, and no
other worker can resume an answer. Of its events only the end, token counts and errors are
interpreted; all fields beside the text become an aside. The deadline of the request bounds the
stream.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from kvlane.app.engine.attached.answer_stream import (
    AnswerStream,
    non_empty,
    parse_finish_reason,
    parse_usage,
)
from kvlane.app.engine.attached.new_forms import form_key
from kvlane.app.engine.attached.request_body import passthrough_body
from kvlane.app.engine.attached.server_client import EventStream
from kvlane.app.engine.attached.server_engine import ServerAddress, ServerEngine
from kvlane.app.engine.attached.server_errors import (
    ResponseTooLarge,
    ServerFailed,
    error_of_event,
    error_of_text,
    is_json,
)
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext, InvalidRequest
from kvlane.streams.clock import Clock
from kvlane.streams.records import EngineConfig, PassthroughDelta, Usage
from kvlane.streams.request import OpenAiBody, Request

log = logging.getLogger(__name__)

BodyKind = Literal["chat", "completion", "embedding"]

API_PATHS: Mapping[BodyKind, str] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "embedding": "/v1/embeddings",
}
_PROBES: Mapping[BodyKind, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "completion": {"prompt": "a", "max_tokens": 1},
    "embedding": {"input": "a"},
}


class PassthroughEngine(ServerEngine):
    """See the module. `context_length`: of a server that does not report it, if known;
    `served_name`: the model's name for clients; "" for the server's name. `media_hosts`: from which
    the server may fetch media for clients."""

    def __init__(
        self,
        clock: Clock,
        address: ServerAddress,
        kind: BodyKind,
        *,
        context_length: int | None = None,
        served_name: str = "",
        media_hosts: Collection[str] = (),
    ) -> None:
        super().__init__(clock, address)
        self._kind = kind
        self._media_hosts = media_hosts
        self._context_length = context_length
        self._serves_as = served_name

    async def start(self, worker_id: str) -> EngineConfig:
        """Wait for the server and check that it answers. Raises EngineError with advice."""
        introduction = await self._connect(worker_id)
        known = await introduction.look_up_model(self._where.model)
        dialect = self._dialect = known.dialect
        self._versions = known.versions
        await self._check_answers()
        await self._start_monitoring()
        log.info("%s: %s for %s requests", self._where.url, dialect.model, self._kind)
        return EngineConfig(
            model=dialect.model,
            served_model_name=self._serves_as or dialect.model,
            context_length=known.context_length or self._context_length,
            lora_names=tuple(sorted(dialect.adapters)) or None,
            gives_tokens=False,
            kind=self._kind,
        )

    async def _check_answers(self) -> None:
        """Send one trial request of this kind. Raises EngineError."""
        context = GenerateContext("introduction")
        try:
            async with aclosing(self.generate(Request(id="", is_probe=True), context)) as outputs:
                async for _ in outputs:
                    pass
        except EngineError as e:
            raise EngineError(
                f"KVLANE_ATTACH_KIND: the server at {self._where.url} does not answer POST "
                f"{API_PATHS[self._kind]} ({e}). Set the kind that it answers, or see its own log"
            ) from e

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """As `Engine.generate`. Raises ServerFailed and InvalidRequest, besides EngineDead."""
        reading = (
            EmbeddingsResponse()
            if self._kind == "embedding"
            else PassthroughStream(is_chat=self._kind == "chat")
        )
        body = self._body(request)
        form = form_key(request, body)
        answering = self._answer(
            API_PATHS[self._kind], body, MAX_EVENT_BYTES, reading, context, form
        )
        async with aclosing(answering) as outputs:
            async for output in outputs:
                yield output

    def _body(self, request: Request) -> dict[str, Any]:
        if request.is_probe:
            body = OpenAiBody(kind=self._kind, json=msgspec.json.encode(_PROBES[self._kind]))
            request = replace(request, body=body)
        if request.kind != self._kind:
            raise InvalidRequest(
                f"body: this model accepts OpenAI bodies of kind {self._kind} only"
            )
        return passthrough_body(request, self._dialect, self._media_hosts)


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
