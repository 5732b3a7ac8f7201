"""The stream reconstruction rule, and positions in the answer from which a reader resumes it.

A view over the records of one request, in log order, the same for all readers of `responses`.
Duplicates (a producer's retry, a request delivered twice, two routers at once, a worker that was
declared dead and still writes) are shown once.

1. The attempt is the highest Fence seen, 0 before any. Chunks of other attempts are skipped.
2. The first Chunk of an attempt determines its run. Chunks of other runs are skipped.
3. Within the run `seq` must be the next one and `index` the number of tokens shown so far. A lower
   `seq` is a producer's retry and skipped. Anything else is a gap: this and every later Chunk of
   the run is skipped, even one with a finish reason, since the text before it is incomplete.
4. A shown Chunk with a finish reason, or an End, ends the request. Later records are ignored.
5. A Chunk that would be shown, but cannot be decoded, ends the request (`apply_unreadable`).

`streams/vectors` has the rule as test vectors for other languages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from kvlane.streams.records import Chunk, End, Fence, Usage
from kvlane.streams.responses.unreadable import (
    UNREADABLE,
    ChunkPlace,
    RecordPlace,
    UnknownPlace,
    UnreadableEnd,
)

VISIBLE = (Chunk, Fence, End)


class Transcript:
    """The visible answer of one request. Feed it the records of that request only.

    `keep=False`: tokens and text are counted, not stored. `until_attempt`: the answer that was
    visible when that attempt began (then `is_closed`), the same for all routers that fence it.
    `shown_piece`: the answer before its attempt, if its records are not fed (`Request.shown`).
    """

    __slots__ = (
        "_keep",
        "_next",
        "_parts",
        "_run",
        "_suspicion",
        "_until",
        "attempt",
        "chars",
        "data_chars",
        "end",
        "finish_reason",
        "gaps",
        "is_closed",
        "is_over",
        "passthrough_count",
        "request_id",
        "shown_tokens",
        "skipped_chunks",
        "tokens",
        "usage",
    )

    def __init__(
        self,
        request_id: str = "",
        *,
        keep: bool = True,
        until_attempt: int | None = None,
        shown_piece: Chunk | None = None,
    ) -> None:
        self.request_id = request_id
        self.attempt = 0
        """The attempt that is shown; unchanged after the end."""
        self.tokens: list[int] = []
        self.shown_tokens = 0
        """Number of tokens shown: the `index` that the next Chunk must have."""
        self.chars = 0
        """Length of the shown text in Unicode code points."""
        self.passthrough_count = 0
        """Number of shown `PassthroughDelta` items, which are not text."""
        self.data_chars = 0
        """Characters of these items, the same for all divisions of them; 0 without `keep`."""
        self.finish_reason: str | None = None
        self.end: End | None = None
        self.is_over = False
        self.usage: Usage | None = None
        self.gaps = 0
        self.skipped_chunks = 0
        self.is_closed = False
        self._keep = keep
        self._until = until_attempt
        self._parts: list[str] = []
        self._run: str | None = None
        self._next: int | None = 0
        """The next `seq` to be shown; None if no further Chunk of this attempt can be."""
        self._suspicion = ""
        """Why a record that may be of the run cannot be read; empty if there is none."""
        if shown_piece is not None:
            self.attempt = shown_piece.attempt
            self._show(shown_piece)

    @property
    def awaits_run(self) -> bool:
        """Whether no Chunk of the present attempt was applied."""
        return self._run is None and not self.is_over

    @property
    def text(self) -> str:
        parts = self._parts
        if len(parts) > 1:
            parts[:] = ["".join(parts)]
        return parts[0] if parts else ""

    def apply(self, record: Chunk | Fence | End) -> Chunk | End | None:
        """Apply the next record; returns the piece that becomes visible, if any."""
        if type(record) is not Chunk:
            return self._turn(record)
        if not self._is_next(record):
            return self._end_suspicion(record) if self._suspicion else None
        assert self._next is not None, "the next Chunk has a number"
        self._next += 1
        self._show(record)
        if record.finish_reason is not None:
            self.finish_reason = record.finish_reason
            self._finish()
        return record

    def _show(self, chunk: Chunk) -> None:
        self.shown_tokens += len(chunk.token_ids)
        self.chars += len(chunk.text)
        self.passthrough_count += len(chunk.data)
        if self._keep:
            self.tokens += chunk.token_ids
            self._parts.append(chunk.text)
            if chunk.data:
                self.data_chars += data_chars(item.delta for item in chunk.data)
        if chunk.usage is not None:
            self.usage = chunk.usage

    def apply_unreadable(self, place: RecordPlace, reason: str) -> End | None:
        """Apply a record that cannot be decoded, named by `reason`; returns the End that becomes
        visible, if any. One of an unknown place matters only if a Chunk is missing later."""
        if self.is_over or self.is_closed:
            return None
        if isinstance(place, Fence):
            return self._turn(place)
        if isinstance(place, UnknownPlace):
            self._suspicion = self._suspicion or reason
            return None
        if isinstance(place, UnreadableEnd) or self._is_next(place):
            return self._turn(End(id=self.request_id, code=UNREADABLE, message=reason))
        return None

    def _is_next(self, chunk: Chunk | ChunkPlace) -> bool:
        """True for the next Chunk of the run that is shown; counts the others."""
        if chunk.attempt != self.attempt or self._next is None:
            self.skipped_chunks += 1
            return False
        if chunk.run != self._run:
            if self._run is not None:
                self.skipped_chunks += 1
                return False
            self._run = chunk.run
        if chunk.seq == self._next and chunk.index == self.shown_tokens:
            return True
        self.skipped_chunks += 1
        if chunk.seq >= self._next:
            self._next = None
            self.gaps += 1
        return False

    def _end_suspicion(self, chunk: Chunk) -> End | None:
        """End the request if the run lacks a Chunk, which is the one that could not be read."""
        if self.is_over or self._next is not None or chunk.run != self._run:
            return None
        return self._turn(End(id=self.request_id, code=UNREADABLE, message=self._suspicion))

    def _turn(self, record: Chunk | Fence | End) -> End | None:
        if self.is_over or self.is_closed:
            return None
        if type(record) is Fence:
            if self._until is not None and record.attempt >= self._until:
                self.is_closed, self._next = True, None
            elif record.attempt > self.attempt:
                self.attempt, self._run, self._next = record.attempt, None, 0
                self._suspicion = ""
        elif type(record) is End:
            self.end = record
            if record.usage is not None:
                self.usage = record.usage
            self._finish()
            return record
        return None

    def _finish(self) -> None:
        self.is_over = True
        self._next = None


def data_chars(deltas: Iterable[Mapping[str, Any]]) -> int:
    """Characters in the deltas of `Chunk.data`, however their texts are divided among them."""
    count, values = 0, list[Any](deltas)
    while values:
        value = values.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
    return count


class Position:
    """The position after the pieces so far, in order. Pieces with token ids may be left out."""

    __slots__ = ("_other_units",)

    def __init__(self) -> None:
        self._other_units = 0

    def pass_over(self, piece: Chunk) -> int:
        """Count the next piece; returns the position after it."""
        if not piece.token_ids:
            self._other_units += len(piece.text) + len(piece.data)
        return piece.index + len(piece.token_ids) + self._other_units

    def end_of(self, piece: Chunk) -> int:
        """The position after the next piece, which is not counted yet."""
        return self._other_units + piece.index + (len(piece.token_ids) or _units(piece))

    def skip_known(self, piece: Chunk, rest_piece: Chunk) -> None:
        """Count the part of the next piece that is not in its rest (`rest_after`)."""
        if not piece.token_ids:
            self._other_units += _units(piece) - _units(rest_piece)


def rest_after(piece: Chunk, end: int, position: int) -> Chunk | None:
    """The part of a piece, which ends at `end`, behind a position; None if nothing is. A piece with
    token ids remains whole, and of the last piece its end."""
    units = len(piece.token_ids) or _units(piece)
    known = position - (end - units)
    if known <= 0 or (known < units and piece.token_ids):
        return piece
    if known < units:
        return _without_units(piece, known)
    if piece.finish_reason is None:
        return None
    index = piece.index + len(piece.token_ids)
    return replace(piece, index=index, token_ids=(), text="", log_probs=None, data=())


def _units(piece: Chunk) -> int:
    return len(piece.text) + len(piece.data)


def _without_units(piece: Chunk, count: int) -> Chunk:
    """A piece without token ids, without its first `count` units."""
    begins_at = piece.chars - len(piece.text)
    skipped = 0
    for item in piece.data:
        before = min(max(item.at - begins_at, 0), len(piece.text)) + skipped
        if before >= count:
            break
        skipped += 1
    return replace(piece, text=piece.text[count - skipped :], data=piece.data[skipped:])
