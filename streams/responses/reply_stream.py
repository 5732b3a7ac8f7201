"""The reply stream of one request, between the reader and the task that consumes it.

A `Reply` applies the stream reconstruction rule and buffers the visible pieces. While the task
waits, its sink may take each piece in the reader's call. It never blocks its reader.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvlane.streams.codecs import decode
from kvlane.streams.errors import Malformed, NewerRecord
from kvlane.streams.ports import Record
from kvlane.streams.records import Chunk, End, LogProb
from kvlane.streams.responses.transcript import VISIBLE, Position, Transcript
from kvlane.streams.responses.unreadable import ChunkPlace, UnknownPlace, describe, place_of

log = logging.getLogger(__name__)

MAX_PENDING_PIECES = 256
"""Buffered pieces before they are merged: a slow consumer gets fewer and larger ones."""

NO_OFFSET = sys.maxsize
"""An offset that no partition reaches."""


PieceSink = Callable[[Chunk | End], bool]
"""Takes a piece at once, without waiting; False leaves it, unchanged, to the waiting task."""


class UnconfirmedEnd(NamedTuple):
    """An End, and its append time in ms of the broker."""

    at_ms: int
    end: End


class AttachPoint(NamedTuple):
    """The oldest offset of a reply's lane; whether part of it was visible; whether its id is
    younger."""

    oldest: int
    has_begun: bool
    is_later: bool


class Reply:
    """The visible pieces of one request, from the offset `start` on: Chunks, and the End.

    Merged Chunks have the `index` of the first and all other fields of the last: for display, not
    for a `Transcript`. One never contains the position that its reader resumes after, and has
    tokens in all its parts or in none.
    """

    def __init__(
        self,
        request_id: str,
        start: int = 0,
        expected_before: int = NO_OFFSET,
        *,
        lane: int = 0,
        doubts: bool = False,
        may_begin_until: float = -math.inf,
        attached: AttachPoint | None = None,
        after: int = 0,
    ) -> None:
        """`doubts`: the beginning may have been deleted (see `unconfirmed_end`). `after`: the
        position that the reader has; Chunks up to it are left out, and `rest_after` cuts the
        others."""
        self.request_id = request_id
        self.lane = lane
        """Kept, since a lane is found by a hash in Python."""
        self.key = request_id.encode()
        self.start = start
        self.expected_before = expected_before
        """Below this offset a record of it is expected, unless it may still begin."""
        self.may_begin_until = may_begin_until
        """A point on the clock."""
        self.attached = attached
        """Set for a reply that may have begun before it was attached to."""
        self.malformed = 0
        self._next = start
        self.has_begun = False
        self.unconfirmed_end: UnconfirmedEnd | None = None
        """An End without earlier records, held back until it is confirmed."""
        self._doubts = doubts
        self._lacks_earlier = False
        """Whether a record has shown that earlier ones of the request were not read."""
        self._is_held = False
        """Whether nothing more is applied until the reader has found the earlier records."""
        self._transcript = Transcript(request_id, keep=False)
        self._after = after
        self._position = Position()
        self._model = ""
        self._left_out: Chunk | None = None
        """The last of the Chunks that were left out, while no other one was put."""
        self._pieces: deque[Chunk | End] = deque()
        self._merge_at = 0
        """Twice the pieces that the last merge left: the next one has to be worth its time."""
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: PieceSink | None = None
        self._wake_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        """No further piece will become visible; buffered pieces may remain."""
        ended = self._transcript.is_over and self.unconfirmed_end is None
        return ended or self._error is not None

    @property
    def is_missing_start(self) -> bool:
        """A Chunk arrived that is not the first of the request, or is of an attempt without a
        Fence."""
        return not self.has_begun and (self._transcript.gaps > 0 or self._lacks_earlier)

    @property
    def is_broken(self) -> bool:
        """Records are missing before or among the visible pieces, which may be of an abandoned
        attempt."""
        return self.has_begun and self._is_held

    @property
    def gaps(self) -> int:
        """Runs that lost a Chunk; above 0 only if a writer violated the protocol."""
        return self._transcript.gaps

    @property
    def skipped_chunks(self) -> int:
        """Chunks that were not shown: duplicates, and chunks of abandoned runs."""
        return self._transcript.skipped_chunks

    def restart(self, start: int) -> None:
        """Restart at an earlier offset. Only before anything was visible."""
        assert not self.has_begun, "visible pieces cannot be withdrawn"
        self.start = self._next = start
        self._lacks_earlier = self._is_held = False
        self.unconfirmed_end = None
        self._transcript = Transcript(self.request_id, keep=False)
        self._position = Position()

    def restart_truncated(self, start: int) -> None:
        """Restart at the new start of the log. Only before anything was visible."""
        assert self.attached is not None, "others begin at the live position"
        self.attached = AttachPoint(start, self.attached.has_begun, is_later=False)
        self._doubts = True
        self.restart(start)

    def accept_end(self) -> None:
        """Confirm that no text was deleted before the End that was held back."""
        bare, self.unconfirmed_end = self.unconfirmed_end, None
        if bare is not None and self._error is None:
            self._put(bare.end)

    def apply(self, record: Record) -> bool:
        """Apply a record of this request; whether its reader must act: over, held back, or no
        start."""
        transcript = self._transcript
        is_done = transcript.is_over or self._is_held or self._error is not None
        if record.offset < self._next or is_done:
            return True
        self._next = record.offset + 1
        try:
            decoded = decode(record)
        except Malformed as e:
            return self._apply_unreadable(record, e)
        except NewerRecord as e:
            self.fail(e)
            return True
        if not isinstance(decoded, VISIBLE):
            self.malformed += 1
            return False
        if (piece := transcript.apply(decoded)) is not None:
            return self._show(piece, record)
        if type(decoded) is Chunk:
            self._look_for_loss(decoded)
        return True

    def _look_for_loss(self, chunk: Chunk | ChunkPlace) -> None:
        """See whether a Chunk that is not shown proves that earlier records were not read: it has
        an attempt without a Fence, or begins a run further on than the visible text."""
        transcript = self._transcript
        if chunk.attempt > transcript.attempt or (
            chunk.attempt == transcript.attempt
            and chunk.seq == 0
            and chunk.index > transcript.shown_tokens
        ):
            self._lacks_earlier = True
        may_lack = self.attached is not None and self.start > 0
        self._is_held = may_lack and (self._lacks_earlier or self.is_missing_start)

    def suspect(self, record: Record) -> None:
        """Note a record that may be of any reply of its lane, and cannot be read."""
        if record.offset >= self._next:
            self._transcript.apply_unreadable(UnknownPlace(), describe(record))

    def _apply_unreadable(self, record: Record, error: Malformed) -> bool:
        """Apply a record that cannot be decoded. Returns as `apply`."""
        self.malformed += 1
        place = place_of(record, self.request_id)
        end = self._transcript.apply_unreadable(place, describe(record, error))
        if end is not None:
            log.error("%s: its reply ends: %s", self.request_id, end.message)
            return self._show(end, record)
        if isinstance(place, ChunkPlace):
            self._look_for_loss(place)
        return True

    def _show(self, piece: Chunk | End, record: Record) -> bool:
        if self._doubts and not self.has_begun and isinstance(piece, End):
            self.unconfirmed_end = UnconfirmedEnd(record.timestamp, piece)
        else:
            self._put(piece)
        return self.is_over or self.unconfirmed_end is not None

    def fail(self, error: Exception) -> None:
        """Fail the reply: `next_piece` raises the error after the buffered pieces."""
        if not self.is_over:
            self._error = error
            self._wake()

    async def next_piece(self, timeout_s: float | None) -> Chunk | End:
        """Take the next piece. Raises the error of the reply, or TimeoutError. None leaves the
        deadline to the caller. Not to be called after the End or a finish reason."""
        if not self._pieces:
            await self._awaited(timeout_s)
        return self._pieces.popleft()

    async def next_pieces(
        self, timeout_s: float | None, sink: PieceSink | None = None
    ) -> list[Chunk | End]:
        """Take all buffered pieces, at least one; otherwise as `next_piece`. `sink` gets the pieces
        that arrive meanwhile; the first that it leaves ends the wait. Its error fails the reply."""
        if not self._pieces:
            await self._awaited(timeout_s, sink)
        pieces = list(self._pieces)
        self._pieces.clear()
        return pieces

    def cancel_timer(self) -> None:
        if self._timer is not None and self._waiter is None:
            self._timer.cancel()
            self._timer = None

    def _put(self, piece: Chunk | End) -> None:
        self.has_begun = True
        if self._after and isinstance(piece, Chunk):
            if self._is_known(piece):
                self._model = self._model or piece.model
                self._left_out = piece
                return
            self._left_out = None
            if self._model:
                piece, self._model = replace(piece, model=piece.model or self._model), ""
        if self._left_out is not None:  # an End has no position: this Chunk shows it
            known, self._left_out, self._after = self._left_out, None, 0
            self._put(known)
        if self._sink is not None and self._pass_on(self._sink, piece):
            return
        if len(self._pieces) >= max(MAX_PENDING_PIECES, self._merge_at):
            self._merge()
        self._pieces.append(piece)
        self._wake()

    def _is_known(self, piece: Chunk) -> bool:
        """True if the reader has all tokens of a Chunk, and more follow."""
        end = self._position.pass_over(piece)
        return bool(piece.token_ids) and piece.finish_reason is None and end <= self._after

    def _merge(self) -> None:
        """Merge buffered pieces that follow each other, if all have tokens or none has."""
        groups: list[list[Chunk]] = []
        tokens = -1
        for piece in self._pieces:
            assert isinstance(piece, Chunk), "nothing follows an End"
            if piece.index == tokens and bool(piece.token_ids) == bool(groups[-1][0].token_ids):
                groups[-1].append(piece)
            else:
                groups.append([piece])
            tokens = piece.index + len(piece.token_ids)
        self._pieces = deque(map(merge_chunks, groups))
        self._merge_at = 2 * len(self._pieces)

    def _pass_on(self, sink: PieceSink, piece: Chunk | End) -> bool:
        """Offer a piece to the sink, unless the task is about to run."""
        if self._waiter is None or self._waiter.done():
            return False
        try:
            return sink(piece)
        except Exception as e:  # noqa: BLE001 - of one client; the reader serves all
            self.fail(e)
            return True

    async def _awaited(self, timeout_s: float | None, sink: PieceSink | None = None) -> None:
        """Wait for a piece. Raises as `next_piece`. One timer for many waits, since it is
        cheaper."""
        assert self._waiter is None, "only one task may await the pieces of a reply"
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        self._waiter, self._sink = loop.create_future(), sink
        self._wake_at = math.inf if timeout_s is None else loop.time() + timeout_s
        if self._timer is None or self._wake_at < self._timer.when():
            self._set_alarm(loop)
        try:
            await self._waiter
        finally:
            self._waiter = self._sink = None
        if not self._pieces:
            raise self._reason()

    def _reason(self) -> Exception:
        """The error to raise without a piece."""
        return self._error or TimeoutError()

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            None if math.isinf(self._wake_at) else loop.call_at(self._wake_at, self._on_timer)
        )

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return  # the next wait sets it anew
        loop = asyncio.get_running_loop()
        if loop.time() < self._wake_at:
            self._set_alarm(loop)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge_chunks(chunks: Sequence[Chunk]) -> Chunk:
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
        invalid=last.invalid,
        data=tuple(aside for chunk in chunks for aside in chunk.data),
        model=chunks[0].model,
        invalid_status=last.invalid_status,
        token_chars=_token_chars(chunks),
    )


def _token_chars(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """One count per token, or none if a worker gave none."""
    counts = tuple(count for chunk in chunks for count in chunk.token_chars)
    return counts if len(counts) == sum(len(chunk.token_ids) for chunk in chunks) else ()


def _log_probs(chunks: Sequence[Chunk]) -> tuple[tuple[LogProb, ...], ...] | None:
    """One entry per token, or None if none were requested."""
    if all(chunk.log_probs is None for chunk in chunks):
        return None
    return tuple(
        entry for chunk in chunks for entry in chunk.log_probs or ((),) * len(chunk.token_ids)
    )
