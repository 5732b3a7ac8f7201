"""An answer as it goes out over HTTP: as events while it is made, or whole when it is there.

The status is decided by the first thing that happens. Until then a failure has its own status;
afterwards it is an error event in OpenAI's form: a stream never ends in silence. Silence in between
is filled with comments, so that nobody on the way takes the connection for dead.
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

from app.http import answers, sse
from app.http.answers import Choice, Heading, Words
from app.http.asides import parts_of
from app.http.errors import ApiError, failure_of, of_error, overdue, stopping
from app.http.joined import Joined, Piece
from app.http.metrics import Metrics, Pace
from streams.clock import Clock
from streams.errors import LogClosed, StreamError
from streams.records import Chunk

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""Silence that proxies and clients bear. A stream that has told nothing for so long begins without
knowing how it will go: what fails later fails with an event."""
ID_HEADER = "x-kvlane-id"
"""Names the streams behind an answer, as URLs take them, separated by commas."""
LAST_WORDS_S = 15.0
"""What a client gets, past the end of everything, to read what was sent to it."""

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", sse.MEDIA_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of nginx's kind would collect events
]


class Manner(NamedTuple):
    """How answers are told. `ids`: of their requests, for URLs; `n` successive share a prompt.

    `attached`: the request is somebody else's; what lies before `from_token` is known already.
    """

    heading: Heading
    ids: Sequence[str]
    stream: bool
    include_usage: bool = False
    n: int = 1
    attached: bool = False
    from_token: int = 0


class Telling(Response):
    """Tells answers to one client. Ends when that one leaves, and with it what `joining` holds."""

    def __init__(
        self,
        manner: Manner,
        choices: Sequence[Choice],
        joining: AbstractAsyncContextManager[Joined],
        clock: Clock,
        metrics: Metrics,
        within_s: float,
        began_at: float,
    ) -> None:
        """`within_s`: how long it may take; `began_at`: when the request came, on the clock."""
        super().__init__()
        self._manner = manner
        self._choices = choices
        self._joining = joining
        self._clock = clock
        self._metrics = metrics
        self._within_s = within_s
        self._until = clock.now() + within_s
        self._paces = [Pace(clock, began_at) for _ in choices]
        heading, with_usage = manner.heading, manner.include_usage
        self._words = [Words(heading, n, with_usage=with_usage) for n in range(len(choices))]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell it all."""
        try:
            await while_there(receive, self._tell(send), self._within_s + LAST_WORDS_S)
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
                    self._metrics.answered(choice, reply, choice.finish_reason or outcome)
                    if not self._manner.attached:
                        pace.report(self._metrics, choice.position, choice.counted_tokens)

    async def _tell_whole(self, joined: Joined, send: Send) -> None:
        while joined.goes_on:
            with suppress(TimeoutError):
                index, pieces = await self._take(joined, self._left_s)
                for piece in pieces:
                    self._enter(index, piece)
        told = answers.whole(self._manner.heading, self._choices, self._manner.n)
        body = msgspec.json.encode(told)
        await self._start(send, [*_JSON, (b"content-length", b"%d" % len(body))])
        await _send(send, body, more=False)

    async def _tell_events(self, joined: Joined, send: Send) -> None:
        """Everything that came together goes out in one write: writing costs more than the rest."""
        begun = False
        failure: ApiError | None = None
        while joined.goes_on and failure is None:
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
            told = sse.error_event(failure.body()) + sse.DONE
        else:
            raise failure
        if not begun:
            await self._start(send, _EVENTS)
        await _send(send, told)
        await _send(send, b"", more=False)

    def _event(self, index: int, piece: Piece) -> bytes:
        """What is told of a piece: events, or nothing. Raises ApiError when it is a failure."""
        if isinstance(piece, Chunk) and piece.data:
            return b"".join(
                self._event_of(index, each)
                for part in parts_of(piece)
                for each in self._told_as(index, part)
            )
        return self._event_of(index, piece)

    def _told_as(self, index: int, part: Chunk) -> Iterable[Chunk]:
        """A part as it is told: who knows some of it gets the rest."""
        if self._choices[index].position >= self._manner.from_token:
            return (part,)
        return parts_of(part, apart=True)

    def _event_of(self, index: int, piece: Piece) -> bytes:
        choice = self._choices[index]
        self._enter(index, piece)
        if 0 < choice.position <= self._manner.from_token and choice.finish_reason is None:
            return b""  # all of it is known
        told = self._words[index].encode(choice, self._unknown(choice, piece))
        if told is None:
            return b""
        # A position in several answers has no name.
        return sse.event(told, choice.position if len(self._choices) == 1 else None)

    def _unknown(self, choice: Choice, piece: Piece) -> Piece:
        """What of a piece is not known yet; one with tokens is told whole, since they count."""
        if not isinstance(piece, Chunk) or choice.tokens or not self._manner.from_token:
            return piece
        known = self._manner.from_token - (choice.position - len(piece.text))
        return replace(piece, text=piece.text[known:]) if known > 0 else piece

    def _ending(self) -> bytes:
        manner = self._manner
        if not manner.include_usage:
            return sse.DONE
        total = answers.last_chunk(manner.heading, self._choices, manner.n)
        return sse.event(msgspec.json.encode(total)) + sse.DONE

    async def _take(self, joined: Joined, timeout_s: float) -> tuple[int, list[Piece]]:
        """The next pieces of a choice.

        Raises TimeoutError when none comes in time, ApiError when they cannot be had or none came
        in the time of the whole.
        """
        try:
            return await joined.take(timeout_s)
        except TimeoutError:
            if self._left_s <= 0:
                raise overdue(self._within_s) from None
            raise
        except Exception as e:
            raise self._broken(e, joined) from e

    def _enter(self, index: int, piece: Piece) -> None:
        """Enter a piece into its choice. Raises ApiError when it is a failure."""
        if (failure := failure_of(piece)) is not None:
            raise failure
        choice = self._choices[index]
        choice.take(piece)
        self._paces[index].seen(choice.position)

    def _broken(self, error: Exception, joined: Joined) -> ApiError:
        """What it means to the client that the reading has failed."""
        if not isinstance(error, StreamError):
            log.error("%s cannot be read on", self._manner.ids, exc_info=error)
        elif isinstance(error, LogClosed) and self._manner.stream:
            joined.run_on = True  # another gateway can go on telling
            ways = (
                f"GET /v1/streams/{stream_id}?from={choice.position}"
                for stream_id, choice in zip(self._manner.ids, self._choices, strict=True)
            )
            return stopping(f"this gateway is stopping; another one goes on: {', '.join(ways)}")
        return of_error(error)

    @property
    def _left_s(self) -> float:
        return max(0.0, self._until - self._clock.now())

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (ID_HEADER.encode(), ",".join(self._manner.ids).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def while_there(receive: Receive, work: Coroutine[Any, Any, None], within_s: float) -> None:
    """Do work for a client: until it is done, its client has left, or it took too long."""
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
