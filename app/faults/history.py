"""What happened in a simulation: who appended what, and what was done to whom, in order.

Recording costs a tuple a record; words are made only when somebody wants to read them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from app.faults.vtime import PROCESS, VirtualLoop
from streams.codecs import decode
from streams.errors import RecordError
from streams.memory.partition import MemoryRecord
from streams.ports import Entry, Partition
from streams.records import Heartbeat, Probe


class History:
    """One simulation's."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.over = False
        """Set when the story is over: what follows is only clearing up."""
        self._events: list[
            tuple[float, str, str | tuple[int, Partition, int, Sequence[Entry]]]
        ] = []

    def happened(self, what: str) -> None:
        """Something was done to the world."""
        if self.over:
            return
        self._events.append((self._loop.time(), PROCESS.get(), what))

    def appended(
        self, timestamp_ms: int, source: Partition, offset: int, entries: Sequence[Entry]
    ) -> None:
        """The process that is running now appended these."""
        if self.over:
            return
        event = (timestamp_ms, source, offset, entries)
        self._events.append((self._loop.time(), PROCESS.get(), event))

    def digest(self) -> str:
        """A hash of all of it: equal for equal runs."""
        return hashlib.blake2b(repr(self._events).encode(), digest_size=16).hexdigest()

    def lines(self, about: str = "") -> Iterator[str]:
        """One line an event; records that name a request other than `about` are left out, if given.

        Heartbeats and probes are left out: they are most of it and say the same.
        """
        for now, who, event in self._events:
            if isinstance(event, str):
                yield f"{now:9.3f}  {event}"
                continue
            timestamp_ms, source, first, entries = event
            for i, entry in enumerate(entries):
                text, subject = _describe(source, first + i, timestamp_ms, entry)
                if text and about in ("", subject):
                    place = f"{source.topic}[{source.partition}]@{first + i}"
                    yield f"{now:9.3f}  {who or 'late':<12} {place} {text}"


def _describe(source: Partition, offset: int, timestamp_ms: int, entry: Entry) -> tuple[str, str]:
    """An entry in words, and the request id it is about."""
    raw = MemoryRecord(*source, offset, timestamp_ms, entry.key, entry.value, entry.headers)
    try:
        record = decode(raw)
    except RecordError as e:
        return f"unreadable: {e}", ""
    if isinstance(record, Heartbeat | Probe):
        return "", ""
    fields = {
        name: value
        for name in record.__struct_fields__
        if name not in _TOO_LONG and (value := getattr(record, name)) not in (None, "", 0, ())
    }
    request = getattr(record, "request", None)
    subject = request.id if request is not None else fields.get("id", "")
    if request is not None:
        fields["id"] = request.id
    words = " ".join(f"{name}={_short(value)}" for name, value in fields.items())
    return f"{type(record).__name__} {words}", subject


_TOO_LONG = {"request", "candidates", "config", "sampling", "stop", "hints", "usage", "policy"}


def _short(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return "/".join(str(v) for v in msgspec.structs.astuple(value))
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
