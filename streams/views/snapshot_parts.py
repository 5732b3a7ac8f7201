"""The records of a snapshot: part 0 is the header, which identifies the state, the others
compressed slices. Their headers hold number and checksum over all, which distinguishes two
snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import msgspec
import zstandard

from kvlane.streams.codecs import TYPE_HEADER
from kvlane.streams.ports import Entry, Partition, Record
from kvlane.streams.records import SnapshotPointer

SNAPSHOT_FORMAT = 1
SLICE_BYTES = 1_000_000
"""Bytes of serialized state per part, before compression: a part stays below 1 MiB."""
COMPRESSION_LEVEL = 3

_PART = b"SnapshotPart"
_SNAPSHOT = "snapshot"  # header: the checksum, which distinguishes the parts of two snapshots
_NUMBER = "part"  # header: from 0


class UnusableSnapshotError(Exception):
    """A snapshot that cannot be used: the log is read instead."""


class SnapshotHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Part 0 of a snapshot. `size`: bytes of the serialized state."""

    format: int
    view: str = msgspec.field(name="fold")  # the name in the stored bytes
    topic: str
    partition: int
    position: int
    size: int
    state_hash: str


class SnapshotAssembler:
    """Assembles one snapshot from its parts, in order."""

    def __init__(self, pointer: SnapshotPointer) -> None:
        self.pointer = pointer
        self.data = bytearray()
        self.header: SnapshotHeader | None = None
        self.problem = ""
        self._digest = sha256()
        self._next = 0  # a part may be duplicated

    def add_part(self, number: int, value: bytes | None) -> bool:
        """Add a part; true when no more parts are needed."""
        if number != self._next or value is None:
            return False
        try:
            part = value if number == 0 else _decompress(value)
            self._digest.update(part)
            if number == 0:
                self.header = _decode(part)
            else:
                self.data += part
        except UnusableSnapshotError as e:
            self.problem = str(e)
            return True
        self._next += 1
        return self._next == self.pointer.parts

    def assemble(self) -> tuple[SnapshotHeader, bytes]:
        """The header and the serialized state. Raises UnusableSnapshotError."""
        if self.problem:
            raise UnusableSnapshotError(self.problem)
        if self.header is None or self._next != self.pointer.parts:
            raise UnusableSnapshotError(f"only {self._next} of {self.pointer.parts} parts exist")
        if self._digest.hexdigest() != self.pointer.checksum or len(self.data) != self.header.size:
            raise UnusableSnapshotError("checksum mismatch")
        return self.header, bytes(self.data)


def part_entry(view: str, source: Partition, checksum: str, number: int, part: bytes) -> Entry:
    headers = ((TYPE_HEADER, _PART), (_SNAPSHOT, checksum.encode()), (_NUMBER, b"%d" % number))
    return Entry(f"{view}/{source.partition}/{number}".encode(), part, headers)


def part_id(record: Record) -> tuple[str, int] | None:
    """Checksum and number in the headers of a part; None for any other record."""
    headers = dict(record.headers)
    try:
        return (headers.get(_SNAPSHOT) or b"").decode(), int(headers.get(_NUMBER) or b"")
    except ValueError:
        return None


def encode_parts(cover: SnapshotHeader, data: bytes) -> Iterator[bytes]:
    yield encode_header(cover)
    compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
    for part in split_slices(data):
        yield compressor.compress(part)


def split_slices(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(data), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]


def encode_header(cover: SnapshotHeader) -> bytes:
    return msgspec.msgpack.encode(cover)


def _decode(data: bytes) -> SnapshotHeader:
    try:
        return msgspec.msgpack.decode(data, type=SnapshotHeader)
    except msgspec.MsgspecError as e:
        raise UnusableSnapshotError(f"invalid header: {e}") from e


def _decompress(data: bytes) -> bytes:
    try:
        if zstandard.frame_content_size(data) > SLICE_BYTES:  # it would be allocated at once
            raise UnusableSnapshotError("a part declares more bytes than a slice has")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=SLICE_BYTES)
    except zstandard.ZstdError as e:
        raise UnusableSnapshotError(f"cannot decompress a part: {e}") from e
