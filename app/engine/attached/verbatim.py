"""What a server says of an answer, as it came: the events of a stream by OpenAI, to outputs.

Text is text; whatever else stands in an event becomes an aside, unread, so that nothing a server
has to say is lost on its way to the client. Read is only what the worker has to know: the end, the
counts, and errors, which are never passed on as if they were an answer. That it ends at all, the
request's deadline sees to.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec.structs import replace

from app.engine.attached import answer
from app.engine.attached.pieces import DONE, REASONS
from app.engine.attached.server import ServerFailed, Stream, TooMuch, failure
from app.engine.contract import (
    EngineOutput,
    GenerateContext,
    InvalidRequest,
    usage,
)
from streams.records import Aside, FinishReason, Usage

_REASONS: Mapping[str, FinishReason] = {
    **REASONS, "tool_calls": "tool_calls", "function_call": "function_call",
}  # fmt: skip
_OTHERS = frozenset({"id", "object", "created", "model"})
"""Fields of an event that its client gets from the gateway."""
EVENT_BYTES = 4 * 1024 * 1024
"""Of one event: what a server draws or says aloud comes in a few. Each becomes a Chunk at most."""
EMBEDDINGS_BYTES = 6 * 1024 * 1024
"""Of one answer, which is one Chunk: a record has 8 MiB at most."""
_events = msgspec.json.Decoder(dict[str, Any])


class Verbatim:
    """One answer, from the server's events to outputs. `is_chat`: else a completion."""

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._counts: Usage | None = None
        self._pieces = 0
        self._told: dict[str, Any] = {}
        """What events have said beside their choices: most say the same again and again."""
        self._begun = False
        self._kept: dict[str, Any] = {}
        """What was said before the first word, and goes with it: until then another server can
        give the answer."""

    async def read(
        self, stream: Stream, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """The outputs, the terminal one last.

        Raises ServerFailed for an answer without an end, and InvalidRequest for what no record can
        hold.
        """
        tail: list[Aside] = []
        async with aclosing(_events_of(stream)) as events:
            async for event in events:
                if event == DONE:
                    break
                if context.stopped:
                    yield self.cancelled()
                    return
                output = self._output(event)
                if output.finish_reason is not None:
                    await answer.read_tail(events, lambda e: tail.extend(self._output(e).data))
                    behind = (replace(aside, at=len(output.text)) for aside in tail)
                    data = (*output.data, *behind)
                    yield replace(output, data=data, usage=self._usage())
                    return
                if not output.is_empty:
                    yield output
        raise ServerFailed("the server broke its answer off before the end")

    def cancelled(self) -> EngineOutput:
        """The end of an answer that nobody wants any more."""
        return EngineOutput.cancelled().with_usage(self._usage())

    def _usage(self) -> Usage:
        """What was counted, by the server where it says so."""
        return self._counts or usage(0, self._pieces)

    def _output(self, event: bytes) -> EngineOutput:
        fields = _read(event)
        if counts := _object(fields.pop("usage", None), "usage"):
            self._counts = counts_of(counts)
        choice = _choice(fields.pop("choices", None))
        delta = _object(choice.pop("delta", None), "delta") if self._is_chat else {}
        text = (delta if self._is_chat else choice).pop("content" if self._is_chat else "text", "")
        if not isinstance(text, str | None):
            raise ServerFailed(f"the server sent {type(text).__name__} for text")
        if delta.get("role") == "assistant":
            del delta["role"]
        reason = _reason(choice.pop("finish_reason", None))
        stop_reason = choice.get("stop_reason")
        more, beside = _said(delta), _said(choice)
        self._kept |= self._news(_said(fields))
        self._begun = self._begun or bool(text or more or beside or reason)
        if not self._begun:
            return EngineOutput()
        aside = Aside(delta=more, choice=beside, event=self._kept)
        self._kept = {}
        output = EngineOutput(
            text=text or "",
            finish_reason=reason,
            stop_reason=stop_reason if isinstance(stop_reason, int | str) else None,
            data=(aside,) if aside != Aside() else (),
        )
        self._pieces += bool(text or aside.delta)
        return output

    def _news(self, fields: dict[str, Any]) -> dict[str, Any]:
        """What of an event's own fields was not said before."""
        told = self._told
        news = {
            name: value
            for name, value in fields.items()
            if name not in _OTHERS and (name not in told or told[name] != value)
        }
        told |= news
        return news


async def _events_of(stream: Stream) -> AsyncGenerator[bytes, None]:
    """The events of an answer; what is too large would be so at every server."""
    try:
        async with aclosing(stream.events()) as events:
            async for event in events:
                yield event
    except TooMuch as e:
        raise InvalidRequest(f"the answer cannot be passed on: {e}") from e


class Embeddings:
    """An answer that is no stream and no text: all of it is an aside."""

    async def read(
        self, stream: Stream, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """The only output. Raises ServerFailed, and InvalidRequest for what no record can hold."""
        try:
            body = await stream.whole(EMBEDDINGS_BYTES)
        except TooMuch as e:
            raise InvalidRequest(
                f"input: the embeddings have more than the {EMBEDDINGS_BYTES} bytes that are "
                "passed on: give fewer texts at a time, or encoding_format base64"
            ) from e
        if context.stopped:
            yield self.cancelled()
            return
        # Not in a thread: decoding holds the interpreter anyhow, 30 ms for as much as there may be.
        fields = _read(body)
        counts = counts_of(_object(fields.pop("usage", None), "usage"))
        if not isinstance(fields.get("data"), list):
            raise ServerFailed("the server sent no list of embeddings")
        said = {name: value for name, value in _said(fields).items() if name not in _OTHERS}
        yield EngineOutput(data=(Aside(event=said),), finish_reason="stop", usage=counts)

    def cancelled(self) -> EngineOutput:
        """The end of an answer that nobody wants any more."""
        return EngineOutput.cancelled()


def counts_of(said: Mapping[str, Any]) -> Usage:
    """What a server counted."""
    details = {name: value for name, value in said.items() if name not in _COUNTS}
    of_prompt = dict(_object(said.get("prompt_tokens_details"), "usage"))
    cached = of_prompt.pop("cached_tokens", 0)
    if of_prompt := _said(of_prompt):
        details["prompt_tokens_details"] = of_prompt
    counts = usage(
        _number(said.get("prompt_tokens")), _number(said.get("completion_tokens")), _number(cached)
    )
    return replace(counts, details=_said(details) or None)


_COUNTS = frozenset({
    "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details",
})  # fmt: skip


def _number(said: Any) -> int:
    return max(said, 0) if isinstance(said, int) else 0


def _read(event: bytes) -> dict[str, Any]:
    """An event. Raises ServerFailed or Rejected for one that says what failed."""
    try:
        fields = _events.decode(event)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise ServerFailed(f"the server sent what is no event: {e}") from e
    if fields.get("object") == "error":  # older servers have no field for it
        fields = {"error": fields}
    match fields.get("error"):
        case None:
            return fields
        case {"message": str(message), **rest}:
            code = rest.get("code")
            raise failure(code if isinstance(code, int) else 500, message)
        case error:
            raise failure(500, str(error)[:2000])


def _choice(said: Any) -> dict[str, Any]:
    """The fields of the only choice; none in an event that is about something else."""
    if not said:
        return {}
    if isinstance(said, list) and len(said) == 1 and isinstance(said[0], dict):
        choice = dict(said[0])
        if choice.pop("index", None) in (0, None):
            return choice
    raise ServerFailed("the server sent other choices than the one it was asked for")


def _object(said: Any, name: str) -> dict[str, Any]:
    if said is None or isinstance(said, dict):
        return said or {}
    raise ServerFailed(f"the server sent a {name} that is no object")


def _reason(said: Any) -> FinishReason | None:
    if said in (None, ""):
        return None
    # `abort`, `error`: the server gave it up, not the model
    if not isinstance(said, str) or said not in _REASONS:
        raise ServerFailed(f"the server ended the answer with {said!r:.200}")
    return _REASONS[said]


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields without those that say nothing."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}
