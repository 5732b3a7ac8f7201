"""Records of a reply that cannot be decoded, and their places in it.

In the place of the next Chunk of its run, one ends the reply with the code `unreadable` for all
readers alike; this End is not in the log. A record of unknown place ends nothing, unless the shown
run lacks a Chunk.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from kvlane.streams.codecs import type_of
from kvlane.streams.ports import Record, Unreadable
from kvlane.streams.records import Fence
from kvlane.streams.topics import RESPONSES

UNREADABLE = "unreadable"
"""Code of the End that a reader makes."""


class ChunkPlace(msgspec.Struct, frozen=True):
    attempt: int
    run: str
    seq: int
    index: int


class UnreadableEnd(NamedTuple):
    """An End whose fields cannot be read: the reply has ended, the reason is unknown."""


class UnknownPlace(NamedTuple):
    """A record that may be any of the reply, or none."""


RecordPlace = ChunkPlace | UnreadableEnd | UnknownPlace | Fence


class _ChunkPlace(msgspec.Struct):
    id: str
    attempt: int
    run: str
    seq: int
    index: int


class _Fence(msgspec.Struct):
    id: str
    attempt: int


class _Record(msgspec.Struct):
    id: str


_HEAD = re.compile(
    rb'\s*\{\s*"t"\s*:\s*"Chunk"\s*,\s*"id"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"attempt"\s*:\s*(\d{1,18})'
    rb'\s*,\s*"run"\s*:\s*"(\d{1,20})"\s*,\s*"seq"\s*:\s*(\d{1,18})\s*,\s*"index"\s*:\s*(\d{1,18})\s*[,}]'
)
"""The beginning of a Chunk, in the order in which it is written."""
_types = {"Chunk": _ChunkPlace, "Fence": _Fence, "End": _Record}


def place_of(record: Record, request_id: str) -> RecordPlace:
    """The place of a malformed record in the reply of a request, as far as it can be read."""
    value, name = record.value, type_of(record).decode(errors="replace")
    if value is None or isinstance(value, Unreadable) or name not in _types:
        return UnknownPlace()
    try:
        read = msgspec.json.decode(value, type=_types[name])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _from_head(value, request_id) if name == "Chunk" else UnknownPlace()
    if read.id != request_id:
        return UnknownPlace()
    if isinstance(read, _ChunkPlace):
        return ChunkPlace(read.attempt, read.run, read.seq, read.index)
    if isinstance(read, _Fence):
        return Fence(id=read.id, attempt=read.attempt)
    return UnreadableEnd()


def describe(record: Record, error: Exception | None = None) -> str:
    """The reason of the End: names the record of `responses`, and why it cannot be read."""
    value = record.value
    reason = value.reason if isinstance(value, Unreadable) else str(error)
    return f"record {RESPONSES}[{record.partition}]@{record.offset} cannot be read: {reason}"


def _from_head(value: bytes, request_id: str) -> RecordPlace:
    head = _HEAD.match(value)
    if head is None:
        return UnknownPlace()
    name, attempt, run, seq, index = head.groups()
    try:
        if msgspec.json.decode(name, type=str) != request_id:
            return UnknownPlace()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UnknownPlace()
    return ChunkPlace(int(attempt), run.decode(), int(seq), int(index))
