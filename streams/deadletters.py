"""Records that nobody can read, put aside so that reading goes on.

A dead letter keeps the key and the type of the record it was; headers say why it is here
(`reason`), where it stood (`origin_topic`, `origin_partition`, `origin_offset`) and how often it
was tried (`tries`). Its value is kept only on request, because it may hold prompt text; otherwise
`value_bytes` and `value_sha256` stand for it, enough to recognise it where it came from.
Nothing in kvlane reads this topic; `operator` does.
"""

from __future__ import annotations

from hashlib import sha256

from streams.codecs import TYPE, type_of
from streams.errors import RecordTooLarge
from streams.outbox import Outbox
from streams.ports import Appended, Entry, Record
from streams.topics import DEAD_LETTERS

LONGEST_REASON = 500
LONGEST_TYPE = 100
"""Bytes, so that a bad record cannot make a dead letter that is too large to write."""


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
    if not keep_value and value is not None:
        headers += [
            ("value_bytes", b"%d" % len(value)),
            ("value_sha256", sha256(value).hexdigest().encode()),
        ]
        value = b""
    return Entry(record.key, value, tuple(headers))
