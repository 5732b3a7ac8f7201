"""Format of content that is larger than a record: numbered parts under `<name>/<number>`.

Model artifacts are named by their checksum, files by their id and the run that wrote them. Leading
zeros of a number distinguish attempts to append the same part under keys of their own.
"""

from __future__ import annotations

from kvlane.streams.codecs import TYPE_HEADER
from kvlane.streams.ports import Entry, Headers, Record

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
    """The record of a part. `type_name`: value of its type header. `attempt`: from 0; keys repeat
    after 32 attempts, far later than an abandoned one can arrive."""
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
