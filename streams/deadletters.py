"""Records that nobody can read, put aside so that reading goes on.

A dead letter keeps the key and the type of the record it was; headers say why it is here
(`reason`), where it stood (`origin_topic`, `origin_partition`, `origin_offset`) and how often it
was tried (`tries`). Its value and its other headers (`header_…`) are kept only on request, because
they may hold prompt text; otherwise `value_bytes` and `value_sha256` stand for the value, enough to
recognise it where it came from. No process reads this topic; people do (`app/letters.py`).
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from streams.codecs import TYPE, type_of
from streams.errors import RecordTooLarge
from streams.outbox import Outbox
from streams.ports import Appended, Entry, Record
from streams.topics import DEAD_LETTERS

LONGEST_REASON = 500
LONGEST_TYPE = 100
"""Bytes, so that a bad record cannot make a dead letter that is too large to write."""
KEPT = "header_"
"""What the names of kept headers begin with."""


class DeadLetters:
    """Writes dead letters, each acknowledged before its writer goes on."""

    def __init__(self, outbox: Outbox, *, keep_prompts: bool = False) -> None:
        self._outbox = outbox
        self._keep_prompts = keep_prompts

    async def persist(self, topic: str, record: Record, reason: str, tries: int = 1) -> Appended:
        """Put a record of `topic` aside; repeats until acknowledged, so it may stand twice.

        A letter that is too large gives up its value, then its key too.
        """
        partition = None if record.key is not None else 0
        letter = letter_of(topic, record, reason, tries, keep_value=self._keep_prompts)
        try:
            return await self._outbox.persist_entry(DEAD_LETTERS, letter, partition)
        except RecordTooLarge:
            letter = letter_of(topic, record, reason, tries, keep_value=False)
        try:
            return await self._outbox.persist_entry(DEAD_LETTERS, letter, partition)
        except RecordTooLarge:
            return await self._outbox.persist_entry(DEAD_LETTERS, letter._replace(key=None), 0)


def letter_of(topic: str, record: Record, reason: str, tries: int, *, keep_value: bool) -> Entry:
    """The dead letter of a record."""
    value = record.value
    headers = [
        (TYPE, type_of(record)[:LONGEST_TYPE]),
        ("reason", reason.encode(errors="replace")[:LONGEST_REASON]),
        ("origin_topic", topic.encode()),
        ("origin_partition", b"%d" % record.partition),
        ("origin_offset", b"%d" % record.offset),
        ("tries", b"%d" % tries),
    ]
    if keep_value:
        headers += [(KEPT + name, said) for name, said in record.headers if name != TYPE]
    elif value is not None:
        headers += [
            ("value_bytes", b"%d" % len(value)),
            ("value_sha256", sha256(value).hexdigest().encode()),
        ]
        value = b""
    return Entry(record.key, value, tuple(headers))


class Letter(NamedTuple):
    """A dead letter as it was read: where it stands, and what it says of the record it was."""

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
    """None for a tombstone, and when it was not kept (`is_kept`)."""
    value_bytes: int
    value_sha256: str
    """"" when the value is kept."""
    headers: tuple[tuple[str, bytes], ...]
    """Those that the record had, as far as they are kept, its type among them."""

    @property
    def is_kept(self) -> bool:
        """Whether its value is all there."""
        return not self.value_sha256

    @property
    def name(self) -> str:
        """What people call it: partition and offset in dead-letters."""
        return f"{self.partition}:{self.offset}"

    def is_of(self, value: bytes | None) -> bool:
        """Whether this is the value of the record that was put aside."""
        return value is not None and sha256(value).hexdigest() == self.value_sha256


def letter_in(record: Record) -> Letter:
    """Read a dead letter. What is missing or broken in it is empty, 0 or -1; never raises."""
    said = dict(record.headers)
    text = {name: (value or b"").decode(errors="replace") for name, value in said.items()}
    digest = text.get("value_sha256", "")
    kept = [(k.removeprefix(KEPT), v) for k, v in record.headers if k.startswith(KEPT)]
    return Letter(
        partition=record.partition,
        offset=record.offset,
        at_ms=record.timestamp,
        key=record.key,
        type=said.get(TYPE) or b"",
        reason=text.get("reason", ""),
        origin_topic=text.get("origin_topic", ""),
        origin_partition=_number(text.get("origin_partition", "")),
        origin_offset=_number(text.get("origin_offset", "")),
        tries=max(_number(text.get("tries", "")), 0),
        value=None if digest else record.value,
        value_bytes=_number(text.get("value_bytes", "")) if digest else len(record.value or b""),
        value_sha256=digest,
        headers=((TYPE, said[TYPE]), *kept) if said.get(TYPE) else tuple(kept),
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
