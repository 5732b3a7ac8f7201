"""One request's reply on its way from the reader to the task that consumes it.

A `Reply` applies the reader's rule to the records it is fed and keeps what became visible until it
is taken. It never reads the log itself (`streams/replies.py` feeds it) and never blocks who feeds.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from streams.codecs import decode
from streams.errors import Malformed, UnknownType
from streams.ports import Record
from streams.records import Chunk, End, Fence, LogProb
from streams.transcript import Transcript

PIECES = 256
"""How many pieces wait for a consumer before they are joined into one. So a slow consumer gets
fewer and larger pieces; it delays no other, and what waits is at most one whole answer."""


NEVER = sys.maxsize
"""An offset that no partition comes to."""

_VISIBLE = (Chunk, Fence, End)


class BareEnd(NamedTuple):
    """An End, and its append time in ms of the broker."""

    at_ms: int
    end: End


class Reply:
    """The visible pieces of one request, from the offset `start` on.

    A piece is a Chunk or the End. Chunks that were joined have the `index` of the first and
    everything else of the last: they are made for showing, not for a `Transcript`.
    """

    def __init__(
        self, request_id: str, start: int = 0, due: int = NEVER, *, doubts: bool = False
    ) -> None:
        """`doubts`: its beginning may be gone from the log (see `bare_end`)."""
        self.request_id = request_id
        self.key = request_id.encode()
        self.start = start
        self.due = due
        """Something of it was visible below this offset, as is known from elsewhere."""
        self.malformed = 0
        self._next = start
        self.begun = False
        """Something of it has become visible."""
        self.bare_end: BareEnd | None = None
        """An End with nothing before it, kept back until it is believed: whether there was text
        before it, which is gone, cannot be seen from here."""
        self._doubts = doubts
        self._unfenced = False
        self._transcript = Transcript(request_id, keep=False)
        self._pieces: deque[Chunk | End] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._due = math.inf
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """Nothing will become visible any more; what is visible may still wait to be taken."""
        ended = self._transcript.over and self.bare_end is None
        return ended or self._error is not None

    @property
    def headless(self) -> bool:
        """A Chunk came that is not the first of the request, and nothing was visible before it.

        One of an attempt that no Fence began is not: its Fence stands before it in the log.
        """
        return not self.begun and (self._transcript.holes > 0 or self._unfenced)

    @property
    def holes(self) -> int:
        """Runs of it that lost a Chunk; not 0 means that a writer broke its promise."""
        return self._transcript.holes

    @property
    def skipped(self) -> int:
        """Chunks of it that were not shown: repeats, and what runs wrote that were given up."""
        return self._transcript.skipped

    def restart(self, start: int) -> None:
        """Begin again at an earlier offset. Only while nothing was visible."""
        assert not self.begun, "what was shown cannot be taken back"
        self.start = self._next = start
        self._unfenced = False
        self.bare_end = None
        self._transcript = Transcript(self.request_id, keep=False)

    def believe(self) -> None:
        """There was nothing before the End that was kept back."""
        bare, self.bare_end = self.bare_end, None
        if bare is not None and self._error is None:
            self._put(bare.end)

    def feed(self, record: Record) -> None:
        """Take a record of this request; those that were fed before are left out."""
        if record.offset < self._next or self.over or self.bare_end is not None:
            return
        self._next = record.offset + 1
        try:
            decoded = decode(record)
        except Malformed:
            self.malformed += 1
            return
        except UnknownType as e:
            self.fail(e)
            return
        if not isinstance(decoded, _VISIBLE):
            self.malformed += 1
            return
        if (piece := self._transcript.feed(decoded)) is not None:
            if self._doubts and not self.begun and isinstance(piece, End):
                self.bare_end = BareEnd(record.timestamp, piece)
            else:
                self._put(piece)
        elif type(decoded) is Chunk and decoded.attempt > self._transcript.attempt:
            self._unfenced = True

    def fail(self, error: Exception) -> None:
        """What is visible can still be taken; then `next` raises the error."""
        if not self.over:
            self._error = error
            self._wake()

    async def next(self, timeout_s: float | None) -> Chunk | End:
        """Take the next piece. Raises what the reply failed with, or TimeoutError.

        None leaves the deadline to the caller.

        Not to be called again after the End or a finish reason.
        """
        if not self._pieces:
            await self._awaited(timeout_s)
        return self._pieces.popleft()

    async def take(self, timeout_s: float | None) -> list[Chunk | End]:
        """Take all the pieces there are, one at least; otherwise as `next`."""
        if not self._pieces:
            await self._awaited(timeout_s)
        pieces = list(self._pieces)
        self._pieces.clear()
        return pieces

    def rest(self) -> None:
        """Leave no timer behind; for who feeds, when nobody takes pieces any more."""
        if self._alarm is not None and self._waiter is None:
            self._alarm.cancel()
            self._alarm = None

    def _put(self, piece: Chunk | End) -> None:
        if len(self._pieces) >= PIECES:
            chunks = [p for p in self._pieces if isinstance(p, Chunk)]
            assert len(chunks) == len(self._pieces), "nothing follows an End"
            self._pieces = deque([joined(chunks)])
        self._pieces.append(piece)
        self.begun = True
        self._wake()

    async def _awaited(self, timeout_s: float | None) -> None:
        """Return when there is a piece. Raises as `next`.

        A future, and one timer for many waits, which moves on when it rings too early:
        `asyncio.timeout` around an event takes 5 microseconds more, with every piece of every
        stream.
        """
        assert self._waiter is None, "one task takes the pieces of a reply"
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        self._due = math.inf if timeout_s is None else loop.time() + timeout_s
        if self._alarm is None or self._due < self._alarm.when():
            self._set_alarm(loop)
        try:
            await waiter
        finally:
            self._waiter = None
        if not self._pieces:
            raise self._reason()

    def _reason(self) -> Exception:
        """Why there is no piece."""
        return self._error or TimeoutError()

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if math.isinf(self._due) else loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._waiter is None:
            return  # the next wait sets it anew
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            self._set_alarm(loop)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Successive visible Chunks as one."""
    last = chunks[-1]
    return Chunk(
        id=last.id,
        attempt=last.attempt,
        run=last.run,
        seq=last.seq,
        index=chunks[0].index,
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        text="".join(chunk.text for chunk in chunks),
        chars=last.chars,
        finish_reason=last.finish_reason,
        usage=next((c.usage for c in reversed(chunks) if c.usage is not None), None),
        stop_reason=last.stop_reason,
        log_probs=_log_probs(chunks),
        data=tuple(aside for chunk in chunks for aside in chunk.data),
    )


def _log_probs(chunks: Sequence[Chunk]) -> tuple[tuple[LogProb, ...], ...] | None:
    """One entry for each token, or None where nobody asked for any."""
    if all(chunk.log_probs is None for chunk in chunks):
        return None
    return tuple(
        entry for chunk in chunks for entry in chunk.log_probs or ((),) * len(chunk.token_ids)
    )
