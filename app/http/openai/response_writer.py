"""HTTP responses of completions: server-sent events while tokens arrive, or one JSON object.

The first piece decides the status; a later failure is an event. Comments during pauses keep proxies
from closing the connection.

    reader of the log ──piece──► sink: event ──► socket            while the task waits, and
                         └─────► task: events ──► ASGI ──► socket  if the sink leaves the piece

The task sends the head, the first event, the last one, and all that a full socket has delayed.
Between them the reader writes each event to the socket (`app/http/server/exchange.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any
from urllib.parse import quote

import msgspec
from opentelemetry.trace import Span
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvlane.app.http.api_errors import (
    ApiError,
    deadline_exceeded,
    error_of_stream,
    gateway_stopping,
)
from kvlane.app.http.openai.event_encoder import (
    MEDIA_TYPE,
    AnswerEncoder,
    EventEncoder,
    ResponseOptions,
)
from kvlane.app.http.openai.merged_replies import MergedReplies, ReplyPiece, is_last
from kvlane.app.http.openai.openai_responses import Choice
from kvlane.app.http.server.exchange import BodyWriter, body_writer_of
from kvlane.app.metrics.gateway_metrics import GatewayMetrics, TokenTimes
from kvlane.app.runtime.spans import NO_SPAN, set_error
from kvlane.streams.clock import Clock
from kvlane.streams.errors import LogClosed, StreamError
from kvlane.streams.responses.reply_stream import PieceSink

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""Pause that proxies and clients tolerate. A stream without a piece for this long starts with
status 200."""
ID_HEADER = "x-kvlane-id"
"""Header with the URL-quoted ids of the streams of a response, separated by commas."""
MODEL_HEADER = "x-kvlane-model"
"""Header with the URL-quoted name of the model that serves an alias."""
FLUSH_TIMEOUT_S = 15.0
"""Time after the deadline for the client to read the rest of the response."""

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", MEDIA_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of nginx's kind would collect events
]

EncoderFactory = Callable[[ResponseOptions, Sequence[Choice], Sequence[TokenTimes]], AnswerEncoder]


class CompletionResponse(Response):
    """Streams completions to one client; releases `joining` when the client disconnects."""

    def __init__(
        self,
        options: ResponseOptions,
        choices: Sequence[Choice],
        joining: AbstractAsyncContextManager[MergedReplies],
        clock: Clock,
        metrics: GatewayMetrics,
        within_s: float,
        began_at: float,
        span: Span = NO_SPAN,
        *,
        encoder: EncoderFactory = EventEncoder,
    ) -> None:
        """`within_s`: time limit of the response; `began_at`: arrival of the request. `span` ends
        with it."""
        super().__init__()
        self._span = span
        self._options = options
        self._choices = choices
        self._joining = joining
        self._clock = clock
        self._metrics = metrics
        self._within_s = within_s
        self._until = clock.now() + within_s
        self._paces = [TokenTimes(clock, began_at) for _ in choices]
        self._events = encoder(options, choices, self._paces)
        self._writer: BodyWriter | None = None
        self._outcome = "left"
        self._sent_at = clock.now()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = body_writer_of(scope)
        try:
            work, within_s = self._respond(send), self._within_s + FLUSH_TIMEOUT_S
            if self._options.reads_to_end:  # data for a disconnected client is dropped
                with suppress(TimeoutError):
                    await asyncio.wait_for(work, within_s)
            else:
                await run_until_disconnect(receive, work, within_s)
        except ApiError as e:  # nothing was sent yet
            await e.response(self._names())(scope, receive, send)
        finally:
            self._span.set_attribute("request_ids", self._options.ids)
            self._span.end()

    async def _respond(self, send: Send) -> None:
        async with self._joining as replies:
            try:
                if self._options.stream:
                    await self._send_events(replies, send)
                elif self._options.is_background:
                    await self._send_beginning(replies, send)
                else:
                    await self._add_all(replies)
                    await self._send_object(send)
            except ApiError as e:
                self._outcome = e.code
                set_error(self._span, e.code, is_server_error=e.status >= 500)
                raise
            finally:
                answers = zip(self._choices, replies.replies, self._paces, strict=True)
                for choice, reply, pace in answers:
                    tokens = choice.known_tokens
                    reason = choice.finish_reason or self._outcome
                    self._metrics.observe_response(reason, tokens, reply.gaps, reply.skipped_chunks)
                    if not self._options.is_resumed:
                        pace.report(self._metrics, choice.timed_tokens, tokens or 0)

    async def _send_beginning(self, replies: MergedReplies, send: Send) -> None:
        await self._send_object(send)
        if self._options.reads_to_end:
            with suppress(ApiError):  # the client asks for the reason
                await self._add_all(replies)

    async def _add_all(self, replies: MergedReplies) -> None:
        while replies.has_more:
            with suppress(TimeoutError):
                index, pieces = await self._take(replies, self._left_s)
                for piece in pieces:
                    self._events.add(index, piece)

    async def _send_object(self, send: Send) -> None:
        body = msgspec.json.encode(self._events.whole())
        await self._start(send, [*_JSON, (b"content-length", b"%d" % len(body))])
        await self._send(send, body, more=False)

    async def _send_events(self, replies: MergedReplies, send: Send) -> None:
        """All pieces that arrive together are sent in one write, which costs more than the rest."""
        begun = False
        failure: ApiError | None = None
        while replies.has_more and failure is None:
            sent_at = self._sent_at
            try:
                sink = self._push if begun and self._writer is not None else None
                index, pieces = await self._take(replies, self._quiet_left_s, sink)
                events, failure = self._encode(index, pieces)
            except TimeoutError:
                events = self._fill_silence(sent_at)
            except ApiError as e:
                events, failure = b"", e
            if events:
                if not begun:
                    await self._start(send, _EVENTS)
                    begun = True
                await self._send(send, events)
        if failure is None:
            events = self._events.encode_held() + self._events.encode_ending()
        elif begun:
            self._outcome = failure.code
            set_error(self._span, failure.code, is_server_error=failure.status >= 500)
            events = self._events.encode_held() + self._events.encode_failure(failure)
        else:
            raise failure
        if not begun:
            await self._start(send, _EVENTS)
        await self._send(send, events)
        await self._send(send, b"", more=False)

    def _encode(self, index: int, pieces: Sequence[ReplyPiece]) -> tuple[bytes, ApiError | None]:
        events = b""
        try:
            for piece in pieces:
                events += self._events.encode(index, piece)
        except ApiError as e:
            return events, e
        return events, None

    def _fill_silence(self, since: float) -> bytes:
        return (
            b"" if self._sent_at > since else self._events.encode_held() or self._events.keep_alive
        )

    def _push(self, piece: ReplyPiece) -> bool:
        """Write the event of a piece to the socket, as the sink of a stream with one choice. Leaves
        to the task the last piece, and all pieces while the socket is full."""
        if self._writer is None or not self._writer.is_ready or is_last(piece):
            return False
        if events := self._events.encode(0, piece):
            self._writer.write(events)
            self._sent_at = self._clock.now()
        return True

    async def _take(
        self, replies: MergedReplies, timeout_s: float, sink: PieceSink | None = None
    ) -> tuple[int, list[ReplyPiece]]:
        """The next pieces of a choice. Raises TimeoutError when none comes in time, ApiError when
        they cannot be had or none came in the time of the whole."""
        try:
            return await replies.next_pieces(timeout_s, sink)
        except TimeoutError:
            if self._left_s <= 0:
                raise deadline_exceeded(self._within_s) from None
            raise
        except Exception as e:
            raise self._broken(e, replies) from e

    def _broken(self, error: Exception, replies: MergedReplies) -> ApiError:
        if not isinstance(error, StreamError):
            log.error("reading %s failed", self._options.ids, exc_info=error)
        elif isinstance(error, LogClosed) and self._options.stream:
            replies.detached = True  # the client can resume at another gateway
            way = f"GET /v1/streams/{','.join(self._options.ids)}?{self._events.resume_query()}"
            return gateway_stopping(
                f"this gateway is stopping; another one continues the stream: {way}"
            )
        return error_of_stream(error)

    @property
    def _quiet_left_s(self) -> float:
        return max(0.0, min(self._sent_at + KEEP_ALIVE_S - self._clock.now(), self._left_s))

    @property
    def _left_s(self) -> float:
        return max(0.0, self._until - self._clock.now())

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        named = [(name.encode(), value.encode()) for name, value in self._names().items()]
        headers = [*headers, *named]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _names(self) -> dict[str, str]:
        headers, served = {ID_HEADER: ",".join(self._options.ids)}, self._options.served_model
        return headers | ({MODEL_HEADER: quote(served)} if served else {})

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sent_at = self._clock.now()


async def run_until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], within_s: float
) -> None:
    loop, limit, is_over = asyncio.get_running_loop(), asyncio.timeout(within_s), False

    def end(departed: asyncio.Task[None]) -> None:
        if departed.cancelled():
            return
        departed.exception()  # a connection that cannot be read is closed, too
        if not (is_over or limit.expired()):
            limit.reschedule(loop.time())

    departure = asyncio.create_task(_departure(receive))
    departure.add_done_callback(end)
    try:
        async with limit:
            await work
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        is_over = True
        departure.cancel()


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
