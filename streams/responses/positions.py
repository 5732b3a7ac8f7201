"""Positions in an answer, from which a reader resumes it.

A position counts the units up to the end of a piece: tokens, or in pieces without token ids
characters and items of `data`. Every merge of pieces gives the same units: an item of `data` comes
before the text at its place, and pieces with token ids are merged with such pieces only.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvlane.streams.records import Chunk


class Position:
    """The position after the pieces so far, of the pieces of an answer in order. Pieces with token
    ids may be left out."""

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
    """The part of a piece that ends at `end` behind a position; None if nothing is. Of the last
    piece at least its end remains. A piece with token ids remains whole."""
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
    """The units of a piece without token ids."""
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
