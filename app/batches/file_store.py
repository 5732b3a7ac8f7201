"""Content of files in the log: written and read part by part, never whole in memory.

A file is the sequence of its parts in one partition of `file-parts`, under `<file>/<run>/<number>`.
A *run* is one writer's share. A new owner of an output file begins its run with a fence, a record
under `<file>/<run>/fence`: later parts of other runs do not count.

Compaction must not change which parts count, so no key is written twice: each attempt to append a
part has its own, and a repeated fence a new run.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Container, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import count
from typing import NamedTuple

from kvlane.streams.clock import Clock
from kvlane.streams.codecs import PART_BYTES, TYPE_HEADER, numbered_part, part_number
from kvlane.streams.errors import PositionLost, StreamError
from kvlane.streams.ports import Appended, Entry, Headers, Log, Partition, Record
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.record_types.batch_records import FileCard
from kvlane.streams.topics import FILE_PARTS, partition_of

_PART = b"FilePart"
_FENCE = b"FileFence"
_FENCE_KEY = b"fence"
PARTS_PER_POLL = 4
TOMBSTONES_PER_BATCH = 500


class FileDamaged(Exception):
    """The log has not all parts of a file, or other ones. Upload the file again."""


class WrittenFile(NamedTuple):
    """The content of a file that is completely in the log; the fields are those of a FileCard."""

    partition: int
    first: int
    end: int
    size: int
    sha256: str


class FileKeys(Container[bytes | None]):
    """The keys of all parts and fences of some files, as a filter for readers."""

    def __init__(self, *file_ids: str) -> None:
        self._prefixes = tuple(f"{file_id}/".encode() for file_id in file_ids)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key.startswith(self._prefixes)


class PartOrder:
    """Selects the parts of a file that count, from the records of its partition in log order. The
    last fence, or else the first part, names the run; of that run each number counts once."""

    def __init__(self, file_id: str) -> None:
        self._prefix = f"{file_id}/".encode()
        self._run: bytes | None = None
        self._complete_to = 0
        """All lower numbers have come."""
        self._beyond: set[int] = set()
        self.number = -1

    @property
    def next_number(self) -> int:
        return max(self._beyond, default=self._complete_to - 1) + 1

    def accept(self, record: Record) -> bool:
        """Take in the next record; whether it is a part that counts."""
        key = record.key or b""
        if not key.startswith(self._prefix) or record.value is None:
            return False
        run, _, last = key.removeprefix(self._prefix).rpartition(b"/")
        if last == _FENCE_KEY:
            self._run = run
            return False
        if self._run is None:
            self._run = run
        number = part_number(record, (self._prefix + run).decode(errors="replace"))
        if number is None or run != self._run:
            return False
        if number < self._complete_to or number in self._beyond:
            return False
        self.number = number
        self._beyond.add(number)
        while self._complete_to in self._beyond:
            self._beyond.remove(self._complete_to)
            self._complete_to += 1
        return True


class FileStore:
    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._publisher = RecordPublisher(log, clock)

    async def partition_of(self, entity_id: str) -> int:
        return partition_of(entity_id.encode(), await self._log.partitions(FILE_PARTS))

    async def end_of(self, partition: int) -> int:
        return (await self._log.end_offsets(FILE_PARTS, [partition]))[partition]

    async def fence(self, partition: int, run: str, file_ids: Sequence[str]) -> int:
        """Begin a run of these files; returns the offset from which parts of other runs do not
        count. Raises AppendFailed: begin another run, since this fence may arrive late."""
        entries = [
            Entry(f"{file_id}/{run}/".encode() + _FENCE_KEY, b"\0", ((TYPE_HEADER, _FENCE),))
            for file_id in file_ids
        ]
        return (await self._log.append_batch(FILE_PARTS, partition, entries)).offset

    async def append_part(
        self, file_id: str, run: str, number: int, content: bytes, partition: int,
        headers: Headers = (),
    ) -> Appended:  # fmt: skip
        """Append a part; repeated until acknowledged. Raises RecordTooLarge above 8 MiB."""
        attempts = _attempts(f"{file_id}/{run}", number, content, headers)
        return await self._publisher.publish_renamed(FILE_PARTS, attempts, partition)

    async def write(self, file_id: str, content: AsyncIterator[bytes]) -> WrittenFile:
        """Write a file as its content arrives. If it fails, the written part is deleted. Raises the
        errors of `content`."""
        partition = await self.partition_of(file_id)
        digest, held = hashlib.sha256(), bytearray()
        keys: list[bytes] = []
        size = number = 0
        first = -1

        def noted(attempts: Iterator[Entry]) -> Iterator[Entry]:
            for entry in attempts:
                keys.append(entry.key or b"")
                yield entry

        async def append(part: bytes) -> None:
            nonlocal number, first
            digest.update(part)
            entries = noted(_attempts(f"{file_id}/0", number, part))
            appended = await self._publisher.publish_renamed(FILE_PARTS, entries, partition)
            first = appended.offset if first < 0 else first
            number += 1

        try:
            async for piece in content:
                size += len(piece)
                held += piece
                while len(held) >= PART_BYTES:
                    await append(bytes(held[:PART_BYTES]))
                    del held[:PART_BYTES]
            if held or not number:
                await append(bytes(held))
            end = await self.end_of(partition)
        except BaseException:
            with suppress(StreamError):  # they expire like all parts
                await self._bury(partition, keys, until=self._clock.now())
            raise
        return WrittenFile(partition, first, end, size, digest.hexdigest())

    async def read(self, card: FileCard) -> AsyncGenerator[bytes, None]:
        """The content of a file, piece by piece. Close it (`aclosing`) when leaving it early.
        Raises FileDamaged, if need be after the last piece; BrokerUnavailable."""
        digest, size, number, before = hashlib.sha256(), 0, 0, -1
        while size <= card.size and number > before:
            order, before = PartOrder(card.id), number
            records = self.records(card.partition, card.first, card.end, card.id)
            async with aclosing(records):
                async for record in records:
                    if order.accept(record) and order.number == number:
                        part = record.value or b""
                        number += 1
                        size += len(part)
                        digest.update(part)
                        yield part
            if order.next_number == number:
                break
        if size != card.size or digest.hexdigest() != card.sha256:
            raise FileDamaged(f"{card.id}: {size} of {card.size} bytes are kept, or other ones")

    async def records(
        self, partition: int, first: int, end: int, *file_ids: str
    ) -> AsyncGenerator[Record, None]:
        """Records of some files in a range of offsets. Raises FileDamaged if they are deleted
        meanwhile, BrokerUnavailable."""
        source = Partition(FILE_PARTS, partition)
        starts = await self._log.start_offsets(FILE_PARTS, [partition])
        first = max(first, starts[partition])
        batches = read_range(
            self._log, self._clock, {source: first}, {source: end},
            batch_size=PARTS_PER_POLL, keys=FileKeys(*file_ids),
        )  # fmt: skip
        try:
            async with aclosing(batches):
                async for batch in batches:
                    for record in batch.records:
                        yield record
        except PositionLost as e:
            raise FileDamaged(f"{file_ids[0]}: {e}") from e

    async def delete(self, card: FileCard) -> None:
        """Delete the content of a file: its space is free after the next compaction."""
        async with aclosing(self.records(card.partition, card.first, card.end, card.id)) as records:
            keys = [record.key async for record in records if record.key and record.value]
        await self._bury(card.partition, keys)

    async def _bury(
        self, partition: int, keys: Sequence[bytes], *, until: float | None = None
    ) -> None:
        """Append tombstones; `until` as in `RecordPublisher.publish`."""
        for start in range(0, len(keys), TOMBSTONES_PER_BATCH):
            some = keys[start : start + TOMBSTONES_PER_BATCH]
            entries = [Entry(key, None, ((TYPE_HEADER, _PART),)) for key in some]
            await self._publisher.publish_entries(FILE_PARTS, partition, entries, until=until)


def _attempts(name: str, number: int, content: bytes, headers: Headers = ()) -> Iterator[Entry]:
    return (numbered_part(_PART, name, number, content, headers, n) for n in count())
