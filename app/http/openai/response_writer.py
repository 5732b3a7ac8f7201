"""HTTP responses of completions: server-sent events while tokens arrive, or one JSON object.

The first piece decides the status. A failure before it has its own status, a later one is an error
event in OpenAI's form: a stream never ends without an event. Comments are sent during pauses, so
that proxies do not close the connection as idle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.http.api_errors import (
    ApiError,
    deadline_exceeded,
    error_of_piece,
    error_of_stream,
    gateway_stopping,
    invalid_request,
)
from app.http.openai import openai_responses, sse
from app.http.openai.merged_replies import MergedReplies, ReplyPiece
from app.http.openai.openai_responses import Choice, ChunkEncoder, ResponseHeader
from app.http.openai.passthrough_fields import split_chunk
from app.metrics.gateway_metrics import GatewayMetrics, TokenTimes
from streams.clock import Clock
from streams.errors import LogClosed, StreamError
from streams.records import Chunk

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""Pause that proxies and clients tolerate. A stream without a piece for this long starts with
status 200; later failures are events."""
ID_HEADER = "x-kvlane-id"
"""Header with the URL-quoted ids of the streams of a response, separated by commas."""
FLUSH_TIMEOUT_S = 15.0
"""Time after the deadline for the client to read the rest of the response."""

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", sse.MEDIA_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of nginx's kind would collect events
]


class ResponseOptions(NamedTuple):
    """Options of a response. `ids`: of its requests, URL-quoted; `n` successive share a prompt.

    `is_resumed`: an existing stream is resumed after position `from_token`. `reads_to_end`: the
    stream is read to its end after a disconnect, since it counts towards limits until then.
    """

    header: ResponseHeader
    ids: Sequence[str]
    stream: bool
    include_usage: bool = False
    n: int = 1
    is_resumed: bool = False
    from_token: int = 0
    reads_to_end: bool = False


class CompletionResponse(Response):
    """Streams completions to one client; releases `joining` when the client disconnects."""

    def __init__(
        self,
        manner: ResponseOptions,
        choices: Sequence[Choice],
        joining: AbstractAsyncContextManager[MergedReplies],
        clock: Clock,
        metrics: GatewayMetrics,
        within_s: float,
        began_at: float,
    ) -> None:
        """`within_s`: time limit of the response; `began_at`: arrival of the request."""
        super().__init__()
        self._manner = manner
        self._choices = choices
        self._joining = joining
        self._clock = clock
        self._metrics = metrics
        self._within_s = within_s
        self._until = clock.now() + within_s
        self._paces = [TokenTimes(clock, began_at) for _ in choices]
        heading, with_usage = manner.header, manner.include_usage
        self._words = [ChunkEncoder(heading, n, with_usage=with_usage) for n in range(len(choices))]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole response."""
        try:
            work, within_s = self._tell(send), self._within_s + FLUSH_TIMEOUT_S
            if self._manner.reads_to_end:  # data for a disconnected client is dropped
                with suppress(TimeoutError):
                    await asyncio.wait_for(work, within_s)
            else:
                await run_until_disconnect(receive, work, within_s)
        except ApiError as e:  # nothing was sent yet
            await e.response({ID_HEADER: ",".join(self._manner.ids)})(scope, receive, send)

    async def _tell(self, send: Send) -> None:
        outcome = "left"
        async with self._joining as joined:
            try:
                if self._manner.stream:
                    await self._tell_events(joined, send)
                else:
                    await self._tell_whole(joined, send)
            except ApiError as e:
                outcome = e.code
                raise
            finally:
                told = zip(self._choices, joined.replies, self._paces, strict=True)
                for choice, reply, pace in told:
                    tokens = choice.counted_tokens
                    reason = choice.finish_reason or outcome
                    self._metrics.observe_response(reason, tokens, reply.gaps, reply.skipped_chunks)
                    if not self._manner.is_resumed:
                        pace.report(self._metrics, choice.position, tokens)

    async def _tell_whole(self, joined: MergedReplies, send: Send) -> None:
        while joined.has_more:
            with suppress(TimeoutError):
                index, pieces = await self._take(joined, self._left_s)
                for piece in pieces:
                    self._enter(index, piece)
        told = openai_responses.full_response(self._manner.header, self._choices, self._manner.n)
        body = msgspec.json.encode(told)
        await self._start(send, [*_JSON, (b"content-length", b"%d" % len(body))])
        await _send(send, body, more=False)

    async def _tell_events(self, joined: MergedReplies, send: Send) -> None:
        """All pieces that arrive together are sent in one write, which costs more than the rest."""
        begun = False
        failure: ApiError | None = None
        while joined.has_more and failure is None:
            told = b""
            try:
                index, pieces = await self._take(joined, min(KEEP_ALIVE_S, self._left_s))
                for piece in pieces:
                    told += self._event(index, piece)
            except TimeoutError:
                told = sse.KEEP_ALIVE
            except ApiError as e:
                failure = e
            if told:
                if not begun:
                    await self._start(send, _EVENTS)
                    begun = True
                await _send(send, told)
        if failure is None:
            told = self._ending()
        elif begun:
            told = sse.encode_error(failure.body()) + sse.DONE
        else:
            raise failure
        if not begun:
            await self._start(send, _EVENTS)
        await _send(send, told)
        await _send(send, b"", more=False)

    def _event(self, index: int, piece: ReplyPiece) -> bytes:
        """The events for a piece, possibly none. Raises ApiError for a failed piece."""
        if isinstance(piece, Chunk) and piece.data:
            return b"".join(
                self._event_of(index, each)
                for part in split_chunk(piece)
                for each in self._told_as(index, part)
            )
        return self._event_of(index, piece)

    def _told_as(self, index: int, part: Chunk) -> Iterable[Chunk]:
        """The sub-parts of a part that a resuming client may lack."""
        if self._choices[index].position >= self._manner.from_token:
            return (part,)
        return split_chunk(part, apart=True)

    def _event_of(self, index: int, piece: ReplyPiece) -> bytes:
        choice = self._choices[index]
        self._enter(index, piece)
        if 0 < choice.position <= self._manner.from_token and choice.finish_reason is None:
            return b""  # the client has it already
        told = self._words[index].encode(choice, self._unknown(choice, piece))
        if told is None:
            return b""
        # A response with several answers has no single position.
        return sse.encode_event(told, choice.position if len(self._choices) == 1 else None)

    def _unknown(self, choice: Choice, piece: ReplyPiece) -> ReplyPiece:
        """The rest of a piece after the resume position; a piece with token ids is sent whole."""
        if not isinstance(piece, Chunk) or not self._manner.from_token:
            return piece
        if choice.position <= self._manner.from_token:  # the client lacks only its end
            return replace(piece, text="")
        if choice.shown_tokens:
            return piece
        known = self._manner.from_token - (choice.position - len(piece.text))
        return replace(piece, text=piece.text[known:]) if known > 0 else piece

    def _ending(self) -> bytes:
        manner = self._manner
        if not manner.include_usage:
            return sse.DONE
        total = openai_responses.usage_chunk(manner.header, self._choices, manner.n)
        return sse.encode_event(msgspec.json.encode(total)) + sse.DONE

    async def _take(self, joined: MergedReplies, timeout_s: float) -> tuple[int, list[ReplyPiece]]:
        """The next pieces of a choice.

        Raises TimeoutError when none comes in time, ApiError when they cannot be had or none came
        in the time of the whole.
        """
        try:
            return await joined.next_pieces(timeout_s)
        except TimeoutError:
            if self._left_s <= 0:
                raise deadline_exceeded(self._within_s) from None
            raise
        except Exception as e:
            raise self._broken(e, joined) from e

    def _enter(self, index: int, piece: ReplyPiece) -> None:
        """Add a piece to its choice. Raises ApiError for a failed piece."""
        if (failure := error_of_piece(piece)) is not None:
            raise failure
        if isinstance(piece, Chunk) and piece.model and not self._manner.header.model:
            self._name(piece.model)
        choice = self._choices[index]
        choice.add(piece)
        if choice.finish_reason is not None and choice.position < self._manner.from_token:
            raise invalid_request(
                f"the stream has ended at position {choice.position}, before the one to go on from",
                "from",
            )
        self._paces[index].on_tokens(choice.position)

    def _name(self, model: str) -> None:
        """Set the model of later objects: a resuming client does not name it."""
        heading = self._manner.header._replace(model=model)
        self._manner = self._manner._replace(header=heading)
        with_usage = self._manner.include_usage
        self._words = [
            ChunkEncoder(heading, n, with_usage=with_usage) for n in range(len(self._choices))
        ]

    def _broken(self, error: Exception, joined: MergedReplies) -> ApiError:
        """The HTTP error for a failed read."""
        if not isinstance(error, StreamError):
            log.error("%s cannot be read on", self._manner.ids, exc_info=error)
        elif isinstance(error, LogClosed) and self._manner.stream:
            joined.detached = True  # the client can resume at another gateway
            ways = (
                f"GET /v1/streams/{stream_id}?from={choice.position}"
                for stream_id, choice in zip(self._manner.ids, self._choices, strict=True)
            )
            return gateway_stopping(
                f"this gateway is stopping; another one goes on: {', '.join(ways)}"
            )
        return error_of_stream(error)

    @property
    def _left_s(self) -> float:
        return max(0.0, self._until - self._clock.now())

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (ID_HEADER.encode(), ",".join(self._manner.ids).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def run_until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], within_s: float
) -> None:
    """Run work until it is done, its client disconnects, or the time limit is reached."""
    tasks = [asyncio.create_task(work), asyncio.create_task(_departure(receive))]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
