"""Records to bytes and back.

`encode` gives a log entry, `decode` a record; the header `t` decides the type. Nothing else in
kvlane knows how a record looks on the wire. Golden bytes for every type stand in
`tests/unit/test_codecs.py`; they may gain fields, never change meaning.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from streams import records
from streams.errors import Malformed, UnknownType
from streams.ports import Entry, Record

TYPE = "t"
"""Name of the header that carries the record type."""

TOMBSTONE = b"Tombstone"
"""Type of a tombstone; a null value without any header is one, too."""

EPOCH = "epoch"
"""Header of a tombstone: the epoch it ends, in decimals."""

AnyRecord = records.Inner | records.Public
R = TypeVar("R", bound=AnyRecord)

TOKEN_BYTES = 4
"""Size of a packed token."""

_INNER: tuple[type[records.Inner], ...] = (
    records.Request,
    records.Cancel,
    records.Refused,
    records.Assigned,
    records.Started,
    records.PrefillDone,
    records.Finished,
    records.Fencing,
    records.Ended,
    records.Assignment,
    records.CancelRun,
    records.Lost,
    records.Blocks,
    records.Heartbeat,
    records.Probe,
    records.WorkerCard,
    records.ModelCard,
    records.SnapshotPointer,
    records.Deployment,
)
_PUBLIC: tuple[type[records.Public], ...] = (records.Chunk, records.Fence, records.End)

_msgpack = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()
_decoders: dict[bytes, Any] = {
    **{t.__name__.encode(): msgspec.msgpack.Decoder(t) for t in _INNER},
    **{t.__name__.encode(): msgspec.json.Decoder(t) for t in _PUBLIC},
}
_types: tuple[type[AnyRecord], ...] = (*_INNER, *_PUBLIC)
_headers = {t: ((TYPE, t.__name__.encode()),) for t in _types}


def encode(record: AnyRecord, key: str) -> Entry:
    """The log entry of a record under a key."""
    if isinstance(record, records.Tombstone):
        epoch = () if record.epoch is None else ((EPOCH, b"%d" % record.epoch),)
        return Entry(key.encode(), None, ((TYPE, TOMBSTONE), *epoch))
    encoder = _json if isinstance(record, records.Public) else _msgpack
    return Entry(key.encode(), encoder.encode(record), _headers[type(record)])


def decode(record: Record) -> AnyRecord:
    """The record in a log entry.

    Raises UnknownType for a type of a newer version, Malformed for anything else that is not a
    record of ours.
    """
    name = type_of(record)
    if record.value is None:
        return _tombstone(record)
    decoder = _decoders.get(name)
    if decoder is None:
        if not name:
            raise Malformed(f"no header {TYPE!r}")
        if name == TOMBSTONE:
            raise Malformed("a tombstone with a value")
        raise UnknownType(name.decode(errors="replace"))
    try:
        decoded: AnyRecord = decoder.decode(record.value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed(f"not a {name.decode()}: {e}") from e
    return decoded


def type_of(record: Record) -> bytes:
    """The type name in the header, b"" without one; cheap, decodes nothing."""
    for name, value in record.headers:
        if name == TYPE:
            return value
    return b""


def _tombstone(record: Record) -> records.Tombstone:
    if record.key is None:
        raise Malformed("a tombstone without a key")
    try:
        epoch = next((int(v) for k, v in record.headers if k == EPOCH), None)
        return records.Tombstone(key=record.key.decode(), epoch=epoch)
    except (TypeError, ValueError) as e:  # TypeError: Kafka knows headers whose value is null
        raise Malformed(f"tombstone: {e}") from e


def token_count(packed: bytes) -> int:
    """How many tokens pack_tokens made this of."""
    return len(packed) // TOKEN_BYTES


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as u32, little endian. Raises OverflowError for ids outside u32."""
    column = array("I", token_ids)
    if sys.byteorder == "big":  # the wire is little endian everywhere
        column.byteswap()
    return column.tobytes()


def unpack_tokens(data: bytes) -> Sequence[int]:
    """The inverse of pack_tokens. Raises Malformed when the length is no multiple of 4."""
    if len(data) % TOKEN_BYTES:
        raise Malformed(f"token ids of {len(data)} bytes: not a multiple of 4")
    column = array("I")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
