"""A view for tests that keeps the offsets of all its records, in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord


@dataclass
class PartitionRecords:
    """The records of one partition, from `begin` on."""

    begin: int
    position: int
    seen: list[tuple[int, str]] = field(default_factory=list)  # offset, what the record was


class RecordingView:
    """A view for tests; `limit` lets it reject larger snapshots, as a view may."""

    name = "tally"

    def __init__(self, name: str = "tally") -> None:
        self.name = name
        self.shares: dict[Partition, PartitionRecords] = {}
        self.forgotten = 0

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        share = self.shares.setdefault(
            source,
            PartitionRecords(position, position) if not log_records else PartitionRecords(0, 0),
        )
        assert position >= share.position, "positions never go back"
        for log_record in log_records:
            assert share.position <= log_record.offset < position, "a record twice, or out of order"
            share.seen.append((log_record.offset, repr(log_record.record)))
        share.position = position

    def position(self, source: Partition) -> int | None:
        share = self.shares.get(source)
        return None if share is None else share.position

    def forget(self, source: Partition) -> None:
        self.forgotten += 1
        self.shares.pop(source, None)

    def snapshot(self, source: Partition) -> bytes:
        share = self.shares[source]
        return json.dumps([share.begin, share.seen]).encode()

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        begin, seen = json.loads(data)
        self.shares[source] = PartitionRecords(begin, position, [(o, r) for o, r in seen])

    def state_hash(self, source: Partition) -> str:
        return sha256(self.snapshot(source)).hexdigest()

    def offsets(self, source: Partition) -> list[int]:
        share = self.shares.get(source)
        return [] if share is None else [offset for offset, _ in share.seen]
