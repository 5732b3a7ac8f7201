"""Dead letters: copies of unprocessable records, so that consumers can continue.

One keeps key and type of the record, with headers for `reason`, original position and number of
attempts (`tries`). Value and other headers (`header_…`) may contain prompts and are kept only on
request; else there are `value_bytes` and `value_sha256`. `unreadable`: the log could not return the
record.
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from kvlane.streams.codecs import TYPE_HEADER, type_of
from kvlane.streams.errors import RecordTooLarge
from kvlane.streams.ports import Appended, Entry, Headers, Record, Unreadable
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.topics import DEAD_LETTERS

MAX_REASON_BYTES = 500
MAX_TYPE_BYTES = 100
"""In bytes: bounds a dead letter, so that it can be written for any record."""
UNREADABLE_HEADER = "unreadable"
KEPT_HEADER_PREFIX = "header_"
"""Prefix of the names of kept headers."""


class DeadLetterWriter:
    """Writes dead letters and waits for their acknowledgements."""

    def __init__(self, publisher: RecordPublisher, *, keep_prompts: bool = False) -> None:
        self._publisher = publisher
        self._keep_prompts = keep_prompts

    async def write(self, topic: str, record: Record, reason: str, tries: int = 1) -> Appended:
        """Write the dead letter of a record, until acknowledged. One too large loses value, then
        key."""
        partition = None if record.key is not None else 0
        letter = to_dead_letter(topic, record, reason, tries, keep_value=self._keep_prompts)
        try:
            return await self._publisher.publish_entry(DEAD_LETTERS, letter, partition)
        except RecordTooLarge:
            letter = to_dead_letter(topic, record, reason, tries, keep_value=False)
        try:
            return await self._publisher.publish_entry(DEAD_LETTERS, letter, partition)
        except RecordTooLarge:
            return await self._publisher.publish_entry(DEAD_LETTERS, letter._replace(key=None), 0)


def to_dead_letter(
    topic: str, record: Record, reason: str, tries: int, *, keep_value: bool
) -> Entry:
    value = record.value
    headers: list[tuple[str, bytes | None]] = [
        (TYPE_HEADER, type_of(record)[:MAX_TYPE_BYTES]),
        ("reason", reason.encode(errors="replace")[:MAX_REASON_BYTES]),
        ("origin_topic", topic.encode()),
        ("origin_partition", b"%d" % record.partition),
        ("origin_offset", b"%d" % record.offset),
        ("tries", b"%d" % tries),
    ]
    if record.key is None and value is None:
        value = b""  # the client appends nothing without both
    if isinstance(value, Unreadable):
        headers.append((UNREADABLE_HEADER, b"true"))
        value = b""
    elif keep_value:
        headers += [
            (KEPT_HEADER_PREFIX + name, value)
            for name, value in record.headers
            if name != TYPE_HEADER
        ]
    elif value is not None:
        headers += [
            ("value_bytes", b"%d" % len(value)),
            ("value_sha256", sha256(value).hexdigest().encode()),
        ]
        value = b""
    return Entry(record.key, value, tuple(headers))


class DeadLetter(NamedTuple):
    """A dead letter as it was read: its position, and the description of the original record."""

    partition: int
    offset: int
    at_ms: int
    key: bytes | None
    type: bytes
    reason: str
    origin_topic: str
    origin_partition: int
    origin_offset: int
    tries: int
    value: bytes | None
    """None for a tombstone, or if it was not kept (`has_whole_value`)."""
    value_bytes: int
    value_sha256: str
    """"" when the value is kept."""
    headers: Headers
    """The kept headers of the original record, including its type."""
    unreadable: bool = False
    """The log could not return the record: it is not kept, and cannot be read again."""

    @property
    def has_whole_value(self) -> bool:
        return not self.value_sha256

    @property
    def name(self) -> str:
        """Its id for operators: partition and offset in dead-letters."""
        return f"{self.partition}:{self.offset}"

    def has_value(self, value: bytes | None) -> bool:
        """Whether this is the value of the original record."""
        return value is not None and sha256(value).hexdigest() == self.value_sha256


def parse_dead_letter(record: Record) -> DeadLetter:
    """Parse a dead letter. Missing or invalid fields are empty, 0 or -1; never raises."""
    headers = dict(record.headers)
    text = {name: (value or b"").decode(errors="replace") for name, value in headers.items()}
    digest = text.get("value_sha256", "")
    kept: list[tuple[str, bytes | None]]
    kept = [
        (k.removeprefix(KEPT_HEADER_PREFIX), v)
        for k, v in record.headers
        if k.startswith(KEPT_HEADER_PREFIX)
    ]
    return DeadLetter(
        partition=record.partition,
        offset=record.offset,
        at_ms=record.timestamp,
        key=record.key,
        type=headers.get(TYPE_HEADER) or b"",
        reason=text.get("reason", ""),
        origin_topic=text.get("origin_topic", ""),
        origin_partition=_number(text.get("origin_partition", "")),
        origin_offset=_number(text.get("origin_offset", "")),
        tries=max(_number(text.get("tries", "")), 0),
        value=None if digest else record.value,
        value_bytes=_number(text.get("value_bytes", "")) if digest else len(record.value or b""),
        value_sha256=digest,
        headers=((TYPE_HEADER, headers[TYPE_HEADER]), *kept)
        if headers.get(TYPE_HEADER)
        else tuple(kept),
        unreadable=UNREADABLE_HEADER in headers,
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
