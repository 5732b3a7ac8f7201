"""Decompression of record batches, with a bound on the output size, since brokers bound compressed
sizes only. A declared size is checked first."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import cache
from mmap import mmap

import cramjam
import zstandard

Decompressor = Callable[[bytes, int], bytes]

_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16  # the magic and two versions
_LZ4_FRAME = 0x184D2204
_LZ4_BLOCK_BYTES = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 1 << 22}
_PIECE_BYTES = 256 * 1024
_GZIP = 31  # for zlib: a header and a trailer of gzip
_MOST_MEMBERS = 100
"""Bound of gzip members; producers write one. The rest of the data is copied for each member."""


class DecompressionError(Exception):
    """A batch that does not decompress, or becomes larger than the bound."""


def decompress(codec: int, data: bytes, max_bytes: int) -> bytes:
    """The content of a batch of Kafka's codec 1 to 4. Raises DecompressionError."""
    known = _CODECS.get(codec)
    if known is None:
        raise DecompressionError(f"an unknown compression codec ({codec})")
    name, work = known
    try:
        content = work(data, max_bytes)
    except (cramjam.DecompressionError, zstandard.ZstdError, zlib.error, struct.error) as e:
        raise DecompressionError(f"{name} does not decompress: {e}") from e
    if len(content) > max_bytes:
        raise DecompressionError(f"{name}: more than {max_bytes} bytes uncompressed")
    return content


def _gzip(data: bytes, most: int) -> bytes:
    member, left, members = zlib.decompressobj(_GZIP), data, 1

    def read(room: memoryview) -> int:
        nonlocal member, left, members
        while True:
            if member.eof:
                if not member.unused_data:
                    return 0
                member, left = zlib.decompressobj(_GZIP), member.unused_data  # another one follows
                members += 1
                if members > _MOST_MEMBERS:
                    raise DecompressionError(f"gzip: more than {_MOST_MEMBERS} members")
            piece = member.decompress(left, min(len(room), _PIECE_BYTES))
            left = member.unconsumed_tail
            if piece:
                room[: len(piece)] = piece
                return len(piece)
            if not member.eof:
                raise zlib.error("it is cut off")

    return _read(read, most)


def _snappy(data: bytes, most: int) -> bytes:
    blocks = _xerial_blocks(data) if data.startswith(_XERIAL) else [data]
    size = sum(cramjam.snappy.decompress_raw_len(block) for block in blocks)
    if size > most:
        raise DecompressionError(f"snappy: {size} bytes uncompressed, above {most}")
    return b"".join(bytes(cramjam.snappy.decompress_raw(block)) for block in blocks)


def _xerial_blocks(data: bytes) -> list[bytes]:
    blocks, position = [], _XERIAL_HEADER_BYTES
    while position < len(data):
        (size,) = struct.unpack_from(">I", data, position)
        blocks.append(data[position + 4 : position + 4 + size])
        position += 4 + size
    return blocks


def _lz4(data: bytes, most: int) -> bytes:
    if _lz4_bound(data, most) <= most:
        return bytes(cramjam.lz4.decompress(data))

    def read(room: memoryview) -> int:  # the blocks may hold less than their size allows
        return 0 if len(room) <= most else int(cramjam.lz4.decompress_into(data, room))

    try:
        return _read(read, most)
    except cramjam.DecompressionError as e:
        raise DecompressionError(
            f"lz4: more than {most} bytes uncompressed, or damaged: {e}"
        ) from e


def _lz4_bound(data: bytes, most: int) -> int:
    """The most that the blocks of a frame can hold; more than `most` for several frames."""
    magic, flags, sizes = struct.unpack_from("<IBB", data)
    largest = _LZ4_BLOCK_BYTES.get(sizes >> 4 & 7, 0)
    if magic != _LZ4_FRAME or not largest:
        raise DecompressionError("lz4 does not decompress: no frame of lz4")
    position = 7 + 8 * (flags >> 3 & 1) + 4 * (flags & 1)
    checksum = 4 * (flags >> 4 & 1)
    bound = 0
    while bound <= most:
        (size,) = struct.unpack_from("<I", data, position)
        position += 4
        if not size:
            end = position + 4 * (flags >> 2 & 1)
            return bound if end >= len(data) else most + 1
        position += (size & 0x7FFFFFFF) + checksum
        bound += largest
    return bound


def _zstd(data: bytes, most: int) -> bytes:
    size = zstandard.frame_content_size(data)  # -1: the frame does not declare it
    if size > most:
        raise DecompressionError(f"zstd: {size} bytes uncompressed, above {most}")
    reader = _decompressor(most).stream_reader(data, read_across_frames=True)
    if size > 0:
        content: bytes = reader.read(size)
        if not reader.read(1):  # no other frame follows
            return content
        reader = _decompressor(most).stream_reader(data, read_across_frames=True)
    return _read(reader.readinto, most)


def _read(read: Callable[[memoryview], int], most: int) -> bytes:
    """Read to the end, into memory that is returned to the system at once."""
    size = 0
    with mmap(-1, most + 1) as area, memoryview(area) as room:
        while size <= most:
            with room[size:] as rest:
                count = read(rest)
            if not count:
                break
            size += count
        if size > most:
            raise DecompressionError(f"more than {most} bytes uncompressed")
        return area[:size]


@cache
def _decompressor(most: int) -> zstandard.ZstdDecompressor:
    """Making one takes 20 us. A window is allocated before anything is decompressed: bounded."""
    return zstandard.ZstdDecompressor(max_window_size=max(most, 1 << 20))


_CODECS: dict[int, tuple[str, Decompressor]] = {
    1: ("gzip", _gzip),
    2: ("snappy", _snappy),
    3: ("lz4", _lz4),
    4: ("zstd", _zstd),
}
