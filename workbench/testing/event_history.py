"""Event history of a simulation: appended records and injected faults, in order.

Recording costs one tuple per record; text is formatted only when the history is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from kvlane.streams.codecs import decode
from kvlane.streams.errors import RecordError
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.records import Heartbeat, Probe
from workbench.testing.virtual_time import PROCESS, VirtualLoop


class EventHistory:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.is_closed = False
        """Set when the simulation is over: later events are only cleanup."""
        self._events: list[
            tuple[float, str, str | tuple[int, Partition, int, Sequence[Entry]]]
        ] = []

    def add_event(self, event: str) -> None:
        """Add an event that is no append."""
        if self.is_closed:
            return
        self._events.append((self._loop.time(), PROCESS.get(), event))

    def add_append(
        self, timestamp_ms: int, source: Partition, offset: int, entries: Sequence[Entry]
    ) -> None:
        """Add an append of the process that is running now."""
        if self.is_closed:
            return
        event = (timestamp_ms, source, offset, entries)
        self._events.append((self._loop.time(), PROCESS.get(), event))

    def appended(self, topic: str) -> Iterator[MemoryRecord]:
        """The records of a topic in the order of their appends, over all its partitions."""
        for _, _, event in self._events:
            if not isinstance(event, str) and event[1].topic == topic:
                timestamp_ms, source, first, entries = event
                for offset, entry in enumerate(entries, first):
                    yield MemoryRecord(
                        *source, offset, timestamp_ms, entry.key, entry.value, entry.headers
                    )

    def digest(self) -> str:
        """A hash of the whole history: equal for equal runs."""
        return hashlib.blake2b(repr(self._events).encode(), digest_size=16).hexdigest()

    def lines(self, about: str = "") -> Iterator[str]:
        """One line an event; with `about`, records of other requests are left out.

        Heartbeats and probes are left out: they are most of it and are all alike.
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
    """An entry as text, and the request id it is about."""
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


_TOO_LONG = {
    "request", "listed", "candidate_rows", "config", "sampling", "stop", "hints", "usage", "policy",
}  # fmt: skip


def _short(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return "/".join(str(v) for v in msgspec.structs.astuple(value))
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
