"""The pieces of several answers as one sequence, in the order in which they come.

Owns what an HTTP request holds of the streams: entered, listened to, left, and cancelled if nobody
else is to have it. Knows nothing of how pieces are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from app.http.errors import of_error, unknown_stream
from app.http.streams import Streams
from streams.errors import StreamError
from streams.records import Chunk, End, Request
from streams.reply import Reply

Piece = Chunk | End

FIND_S = 5.0
"""What the beginning of a stream gets to be found: an hour of its lane is read in less."""


class Joined:
    """Replies that are read together. `run_on`: leaving them early does not end their requests."""

    def __init__(self, replies: Sequence[Reply], *, run_on: bool) -> None:
        self.replies = replies
        self.run_on = run_on
        self._open = dict(enumerate(replies))
        self._queue: asyncio.Queue[tuple[int, list[Piece] | Exception]] | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._first: list[Piece] = []

    @property
    def goes_on(self) -> bool:
        """Whether there is more to take."""
        return bool(self._open)

    @property
    def unfinished(self) -> list[Reply]:
        """The replies whose last piece was not taken."""
        return list(self._open.values())

    async def take(self, timeout_s: float) -> tuple[int, list[Piece]]:
        """The next pieces of a reply, one at least, and the number of the reply.

        Raises TimeoutError when none comes in time, and what a reply has failed with.
        """
        number = 0
        if self._first:
            pieces, self._first = self._first, []
        elif len(self.replies) == 1:
            pieces = await self.replies[0].take(timeout_s)
        else:
            async with asyncio.timeout(timeout_s):
                number, came = await self._pumped().get()
            if isinstance(came, Exception):
                raise came
            pieces = came
        if is_last(pieces[-1]):
            del self._open[number]
        return number, pieces

    async def has_begun(self, within_s: float) -> bool:
        """Whether there is a first piece within that time; of a single reply. Raises as `take`."""
        try:
            self._first = await self.replies[0].take(within_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Take nothing more."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _pumped(self) -> asyncio.Queue[tuple[int, list[Piece] | Exception]]:
        """The queue that all replies go into.

        Bound: what one taking brings of each. While it is full, pieces wait in their replies,
        which join them.
        """
        if self._queue is None:
            self._queue = asyncio.Queue(len(self.replies))
            self._pumps = [
                asyncio.create_task(self._pump(self._queue, number, reply))
                for number, reply in enumerate(self.replies)
            ]
        return self._queue

    async def _pump(
        self, queue: asyncio.Queue[tuple[int, list[Piece] | Exception]], number: int, reply: Reply
    ) -> None:
        try:
            while True:
                pieces = await reply.take(None)
                await queue.put((number, pieces))
                if is_last(pieces[-1]):
                    return
        except Exception as e:  # noqa: BLE001 - raised where pieces are taken
            await queue.put((number, e))


def is_last(piece: Piece) -> bool:
    """Whether nothing follows it."""
    return isinstance(piece, End) or piece.finish_reason is not None


@asynccontextmanager
async def asking(
    streams: Streams, requests: Sequence[Request], *, run_on: bool
) -> AsyncGenerator[Joined, None]:
    """Publish requests and read their replies. What is left unfinished is cancelled, or runs on.

    Raises ApiError.
    """
    answers = len(requests)
    streams.enter(answers)
    try:
        joined = Joined(await streams.publish(requests), run_on=run_on)
        del requests  # their prompts need not be in memory for as long as the answers take
        try:
            yield joined
        finally:
            await _left(streams, joined)
            if not joined.run_on:
                for reply in joined.unfinished:
                    streams.cancel(reply.request_id, "its client left")
    finally:
        streams.left(answers)


@asynccontextmanager
async def attaching(
    streams: Streams, request_id: str, *, begun: bool, may_begin: bool
) -> AsyncGenerator[Joined, None]:
    """Read the reply of a request from its beginning; it runs on in any case.

    `begun`: some of it was told before. `may_begin`: it may be there although nothing of it is.
    Raises ApiError.
    """
    streams.enter(1)
    try:
        joined = Joined([await streams.attach(request_id, begun=begun)], run_on=True)
        try:
            if not await _has_begun(joined) and not may_begin:
                raise unknown_stream()
            yield joined
        finally:
            await _left(streams, joined)
    finally:
        streams.left(1)


async def _has_begun(joined: Joined) -> bool:
    try:
        return await joined.has_begun(FIND_S)
    except StreamError as e:
        raise of_error(e) from e


async def _left(streams: Streams, joined: Joined) -> None:
    await joined.close()
    for reply in joined.replies:
        streams.leave(reply)
