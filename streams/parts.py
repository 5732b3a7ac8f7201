"""The parts of one snapshot, as they lie on the log.

Part 0 is the cover, which says of what the snapshot is; the others are slices of the fold's bytes,
each compressed by itself. The header of each has its number, and the checksum over the cover and
all slices, which tells the parts of two snapshots apart.

Never here: where the parts lie, or what becomes of the bytes (`streams/snapshots.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import msgspec
import zstandard

from streams.codecs import TYPE
from streams.ports import Entry, Partition, Record
from streams.records import SnapshotPointer

FORMAT = 1
SLICE_BYTES = 1_000_000
"""Of the fold's bytes, before compression: a part stays below 1 MiB even where zstd gains nothing.
One slice is hashed or compressed in 2-5 ms; the loop runs in between."""
LEVEL = 3

_PART = b"SnapshotPart"
_SNAPSHOT = "snapshot"  # header: the checksum, which tells the parts of two snapshots apart
_NUMBER = "part"  # header: from 0


class UnusableError(Exception):
    """A snapshot that cannot be used. Never leaves `streams/snapshots.py`: the log is read."""


class Cover(msgspec.Struct, frozen=True, kw_only=True):
    """Part 0 of a snapshot: what it is of. `size` is that of the fold's bytes."""

    format: int
    fold: str
    topic: str
    partition: int
    position: int
    size: int
    state_hash: str


class Pieces:
    """The parts of one snapshot, as far as they were read."""

    def __init__(self, pointer: SnapshotPointer) -> None:
        self.pointer = pointer
        self.data = bytearray()
        self.cover: Cover | None = None
        self.problem = ""
        self._digest = sha256()
        self._next = 0  # a part may stand twice

    def take(self, number: int, value: bytes | None) -> bool:
        """Take a part in; true when there is nothing more to wait for."""
        if number != self._next or value is None:
            return False
        try:
            part = value if number == 0 else _decompress(value)
            self._digest.update(part)
            if number == 0:
                self.cover = _decode(part)
            else:
                self.data += part
        except UnusableError as e:
            self.problem = str(e)
            return True
        self._next += 1
        return self._next == self.pointer.parts

    def whole(self) -> tuple[Cover, bytes]:
        """What was written. Raises UnusableError."""
        if self.problem:
            raise UnusableError(self.problem)
        if self.cover is None or self._next != self.pointer.parts:
            raise UnusableError(f"{self._next} of {self.pointer.parts} parts are there")
        if self._digest.hexdigest() != self.pointer.checksum or len(self.data) != self.cover.size:
            raise UnusableError("its checksum differs")
        return self.cover, bytes(self.data)


def entry_of(fold: str, source: Partition, checksum: str, number: int, part: bytes) -> Entry:
    """The record of a part."""
    headers = ((TYPE, _PART), (_SNAPSHOT, checksum.encode()), (_NUMBER, b"%d" % number))
    return Entry(f"{fold}/{source.partition}/{number}".encode(), part, headers)


def place_of(record: Record) -> tuple[str, int] | None:
    """Checksum and number in the headers of a part; None for any other record."""
    headers = dict(record.headers)
    try:
        return headers[_SNAPSHOT].decode(), int(headers[_NUMBER])
    except (KeyError, ValueError):
        return None


def parts_of(cover: Cover, data: bytes) -> Iterator[bytes]:
    """The values of all parts, in their order."""
    yield cover_bytes(cover)
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    for part in slices_of(data):
        yield compressor.compress(part)


def slices_of(data: bytes) -> Iterator[memoryview]:
    """What goes into one part each."""
    view = memoryview(data)
    for start in range(0, len(data), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]


def cover_bytes(cover: Cover) -> bytes:
    """The value of part 0."""
    return msgspec.msgpack.encode(cover)


def _decode(data: bytes) -> Cover:
    try:
        return msgspec.msgpack.decode(data, type=Cover)
    except msgspec.MsgspecError as e:
        raise UnusableError(f"its cover: {e}") from e


def _decompress(data: bytes) -> bytes:
    try:
        if zstandard.frame_content_size(data) > SLICE_BYTES:  # it would be allocated at once
            raise UnusableError("a part says that it is larger than a slice")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=SLICE_BYTES)
    except zstandard.ZstdError as e:
        raise UnusableError(f"a part does not decompress: {e}") from e
