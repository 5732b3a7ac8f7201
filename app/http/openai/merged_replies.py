"""Merged replies: the pieces of several answers as one sequence, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from kvlane.app.http.api_errors import error_of_stream
from kvlane.app.http.openai.active_streams import ActiveStreams
from kvlane.streams.errors import StreamError
from kvlane.streams.records import Chunk, End
from kvlane.streams.request import Request
from kvlane.streams.responses.reply_stream import PieceSink, Reply

ReplyPiece = Chunk | End

FIRST_CHUNK_TIMEOUT_S = 5.0
"""Wait for the first piece of a resumed stream before the response starts: a failure within this
time gets its own HTTP status."""


class MergedReplies:
    """Replies that are read together. `detached`: closing early does not cancel their requests."""

    def __init__(self, replies: Sequence[Reply], *, detached: bool) -> None:
        self.replies = replies
        self.detached = detached
        self._open = dict(enumerate(replies))
        self._queue: asyncio.Queue[tuple[int, list[ReplyPiece] | Exception]] | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._first: tuple[int, list[ReplyPiece]] | None = None

    @property
    def has_more(self) -> bool:
        return bool(self._open)

    @property
    def first_pieces(self) -> Sequence[ReplyPiece]:
        """The pieces that `wait_for_first` has waited for, until they are taken."""
        return () if self._first is None else self._first[1]

    @property
    def unfinished(self) -> list[Reply]:
        return list(self._open.values())

    async def next_pieces(
        self, timeout_s: float, sink: PieceSink | None = None
    ) -> tuple[int, list[ReplyPiece]]:
        """The next pieces of a reply, one at least, and the number of the reply.

        `sink`: as `Reply.next_pieces`; without effect if there are several replies.
        Raises TimeoutError when none comes in time, and the error of a failed reply.
        """
        first, self._first = self._first, None
        number, pieces = first or await self._next(timeout_s, sink)
        if is_last(pieces[-1]):
            del self._open[number]
        return number, pieces

    async def wait_for_first(self, within_s: float) -> None:
        """Wait for the first piece. Raises the errors of `next_pieces`."""
        with suppress(TimeoutError):
            self._first = await self._next(within_s)

    async def _next(
        self, timeout_s: float, sink: PieceSink | None = None
    ) -> tuple[int, list[ReplyPiece]]:
        if len(self.replies) == 1:
            return 0, await self.replies[0].next_pieces(timeout_s, sink)
        async with asyncio.timeout(timeout_s):
            number, pieces = await self._pumped().get()
        if isinstance(pieces, Exception):
            raise pieces
        return number, pieces

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _pumped(self) -> asyncio.Queue[tuple[int, list[ReplyPiece] | Exception]]:
        """The queue of pieces of all replies. Bound: one batch of each reply."""
        if self._queue is None:
            self._queue = asyncio.Queue(len(self.replies))
            self._pumps = [
                asyncio.create_task(self._pump(self._queue, number, reply))
                for number, reply in enumerate(self.replies)
            ]
        return self._queue

    async def _pump(
        self,
        queue: asyncio.Queue[tuple[int, list[ReplyPiece] | Exception]],
        number: int,
        reply: Reply,
    ) -> None:
        try:
            while True:
                pieces = await reply.next_pieces(None)
                await queue.put((number, pieces))
                if is_last(pieces[-1]):
                    return
        except Exception as e:  # noqa: BLE001 - raised where pieces are taken
            await queue.put((number, e))


def is_last(piece: ReplyPiece) -> bool:
    return isinstance(piece, End) or piece.finish_reason is not None


@asynccontextmanager
async def publish_and_read(
    streams: ActiveStreams, requests: Sequence[Request], *, detached: bool
) -> AsyncGenerator[MergedReplies, None]:
    """Publish requests and read their replies. On exit, cancel unfinished ones unless detached.
    Raises ApiError."""
    answers = len(requests)
    streams.reserve(answers)
    try:
        replies = MergedReplies(await streams.publish(requests), detached=detached)
        del requests  # their prompts need not be in memory for as long as the answers take
        try:
            yield replies
        finally:
            await _left(streams, replies)
            if not replies.detached:
                for reply in replies.unfinished:
                    streams.cancel(reply.request_id, "its client left")
    finally:
        streams.release(answers)


class ResumedReply(NamedTuple):
    """The reply of an existing request, to be read from its beginning.

    `begun`: the client has received part of it; `after`: position up to which pieces may be left
    out (`Reply`). `may_begin_s`: time within which it must start.
    """

    id: str
    begun: bool
    after: int
    may_begin_s: float


@asynccontextmanager
async def resume_replies(
    streams: ActiveStreams, resumed: Sequence[ResumedReply]
) -> AsyncGenerator[MergedReplies, None]:
    """Read the replies of existing requests, without cancelling them on exit. Raises ApiError."""
    streams.reserve(len(resumed))
    attached: list[Reply] = []
    try:
        for each in resumed:
            reply = await streams.attach(
                each.id, begun=each.begun, after=each.after, may_begin_s=each.may_begin_s
            )
            attached.append(reply)
        replies = MergedReplies(attached, detached=True)
        try:
            await _await_beginning(replies)
            yield replies
        finally:
            await replies.close()
    finally:
        for reply in attached:
            streams.unsubscribe(reply)
        streams.release(len(resumed))


async def _await_beginning(replies: MergedReplies) -> None:
    try:
        await replies.wait_for_first(FIRST_CHUNK_TIMEOUT_S)
    except StreamError as e:
        raise error_of_stream(e) from e


async def _left(streams: ActiveStreams, replies: MergedReplies) -> None:
    await replies.close()
    for reply in replies.replies:
        streams.unsubscribe(reply)
