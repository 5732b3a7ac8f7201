"""The wire format of records, and that of content in numbered parts: encoding and decoding.

The header `t` decides the type; golden bytes of every type are in
`tests/harness/golden_records.py`. An undecodable record is `Malformed` and skipped, as is an
unknown type. One that must not be skipped has the header `r`, the least record version of a reader,
in decimals: others refuse it (`NewerRecord`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvlane.streams import record_base, records, request
from kvlane.streams.errors import Malformed, NewerRecord, UnknownType
from kvlane.streams.ports import Entry, Headers, Record, Unreadable
from kvlane.streams.record_types import batch_records

TYPE_HEADER = "t"

READER_VERSION_HEADER = "r"
"""Name of the header with the least record version that a reader must have."""

RECORD_VERSION = 1
"""Incremented with each change of records that older readers must not skip."""

TOMBSTONE_TYPE = b"Tombstone"
"""Type of a tombstone; so is a null value without headers."""

EPOCH_HEADER = "epoch"
"""Header of a tombstone: the epoch it ends, in decimals."""

_EPOCH_DIGITS = 18
"""Digits of a valid epoch: one that does not fit into 64 bits could not be stored in a snapshot."""

AnyRecord = record_base.InternalRecord | record_base.PublicRecord

TOKEN_BYTES = 4

_INNER: tuple[type[record_base.InternalRecord], ...] = (
    request.Request,
    records.Cancel,
    records.Refused,
    records.Assigned,
    records.Started,
    records.PrefillDone,
    records.Finished,
    records.Fencing,
    records.Ended,
    records.EndedIds,
    records.Assignment,
    records.CancelRun,
    records.Lost,
    records.Blocks,
    records.Heartbeat,
    records.Probe,
    records.RouterCapacity,
    records.LimitClaims,
    records.WorkerCard,
    records.ModelCard,
    records.SnapshotPointer,
    records.Deployment,
    records.Skip,
    records.Cordon,
    records.ModelAlias,
    records.RoutingOrder,
    batch_records.FileCard,
    batch_records.BatchJob,
    batch_records.BatchCancel,
    batch_records.ResponseDeletion,
)
_PUBLIC: tuple[type[record_base.PublicRecord], ...] = (
    records.Chunk,
    records.Fence,
    records.End,
    records.Result,
    records.RequestUsage,
)

_msgpack = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()
_decoders: dict[bytes, Any] = {
    **{t.__name__.encode(): msgspec.msgpack.Decoder(t) for t in _INNER},
    **{t.__name__.encode(): msgspec.json.Decoder(t) for t in _PUBLIC},
}
_types: tuple[type[AnyRecord], ...] = (*_INNER, *_PUBLIC)
_headers = {t: ((TYPE_HEADER, t.__name__.encode()),) for t in _types}


def encode(record: AnyRecord, key: str) -> Entry:
    if isinstance(record, records.Tombstone):
        epoch = () if record.epoch is None else ((EPOCH_HEADER, b"%d" % record.epoch),)
        return Entry(key.encode(), None, ((TYPE_HEADER, TOMBSTONE_TYPE), *epoch))
    encoder = _json if isinstance(record, record_base.PublicRecord) else _msgpack
    return Entry(key.encode(), encoder.encode(record), _headers[type(record)])


def decode(record: Record) -> AnyRecord:
    """The record in a log entry. Raises NewerRecord, UnknownType, Malformed."""
    headers = record.headers
    if len(headers) > 1:  # kvlane's have one, tombstones two
        _check_version(headers)
    name = type_of(record)
    if record.value is None:
        return _tombstone(record)
    decoder = _decoders.get(name)
    if decoder is None:
        if isinstance(record.value, Unreadable):
            raise Malformed(record.value.reason)
        if not name:
            raise Malformed(f"no header {TYPE_HEADER!r}")
        if name == TOMBSTONE_TYPE:
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
        if name == TYPE_HEADER:
            return value or b""
    return b""


def _check_version(headers: Sequence[tuple[str, bytes | None]]) -> None:
    """Raises NewerRecord. A mark that is not a number is ignored: no version writes that."""
    for name, value in headers:
        if name == READER_VERSION_HEADER and value and len(value) < 10 and value.isdigit():
            required = int(value)
            if required > RECORD_VERSION:
                raise NewerRecord(required, RECORD_VERSION)


def _tombstone(record: Record) -> records.Tombstone:
    if record.key is None:
        raise Malformed("a tombstone without a key")
    try:
        epoch = next(
            (int((v or b"")[:_EPOCH_DIGITS]) for k, v in record.headers if k == EPOCH_HEADER), None
        )
        return records.Tombstone(key=record.key.decode(), epoch=epoch)
    except ValueError as e:
        raise Malformed(f"tombstone: {e}") from e


def token_count(packed: bytes) -> int:
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


PART_BYTES = 1_000_000
"""Content bytes of each part: with key and headers a record stays below 1 MiB."""
_MOST_ATTEMPTS = 32


def numbered_part(
    type_name: bytes,
    name: str,
    number: int,
    content: bytes,
    headers: Headers = (),
    attempt: int = 0,
) -> Entry:
    """The record of a part. `type_name`: of its header. `attempt`: from 0; keys repeat after 32."""
    key = f"{name}/{'0' * (attempt % _MOST_ATTEMPTS)}{number}"
    return Entry(key.encode(), content, ((TYPE_HEADER, type_name), *headers))


def part_number(record: Record, name: str) -> int | None:
    """Number of a part of `name`, from 0; None for any other record."""
    prefix = f"{name}/".encode()
    key = record.key or b""
    number = key.removeprefix(prefix)
    if not key.startswith(prefix) or record.value is None or not number.isdigit():
        return None
    digits = number.lstrip(b"0")
    return int(digits or b"0") if len(digits) < 10 else None
