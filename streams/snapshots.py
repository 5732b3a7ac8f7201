"""Snapshots of folds: so that a fresh process need not read the whole log.

A snapshot is a cover and slices of the fold's bytes, one record each on `snapshots`, all in one
partition; when every one of them is acknowledged, a `SnapshotPointer` in the registry says where
they begin. A reader takes the newest pointer whose snapshot is whole: complete, of this format,
fold and partition, with the checksum that the pointer names, and with the state hash after
restoring. Anything else is left alone with a line in the log, in favour of an older snapshot or
of the log itself: a snapshot saves time, it is never the only copy of anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zstandard

from streams.clock import Clock
from streams.codecs import TYPE, decode
from streams.errors import PositionLost, RecordError
from streams.outbox import Outbox
from streams.ports import Entry, Log, Partition, Record
from streams.records import SnapshotPointer, Tombstone
from streams.stretch import stretch
from streams.topics import REGISTRY, SNAPSHOTS

if TYPE_CHECKING:
    from streams.follow import Fold

log = logging.getLogger(__name__)

FORMAT = 1
SLICE_BYTES = 1_000_000
"""Of the fold's bytes, before compression: a part stays below 1 MiB even where zstd gains nothing.
One slice is hashed or compressed in 2-5 ms; the loop runs in between."""
LEVEL = 3
POINTERS_KEPT = 3
"""Pointers remembered for each partition of a fold: the newest, and what to fall back to."""

_PART = b"SnapshotPart"
_SNAPSHOT = "snapshot"  # header: the checksum, which tells the parts of two snapshots apart
_NUMBER = "part"  # header: from 0


class _UnusableError(Exception):
    """A snapshot that cannot be used. Never leaves this module: the log is read instead."""


class Cover(msgspec.Struct, frozen=True, kw_only=True):
    """Part 0 of a snapshot: what it is of. `size` is that of the fold's bytes."""

    format: int
    fold: str
    topic: str
    partition: int
    position: int
    size: int
    state_hash: str


class Taken(NamedTuple):
    """What a fold knew from one partition, at one position."""

    cover: Cover
    data: bytes


class Pointed(NamedTuple):
    """A pointer that was read, and when it was appended (broker ms)."""

    pointer: SnapshotPointer
    written_ms: int


def take(fold: Fold, source: Partition) -> Taken:
    """State, hash and position of a partition, in one step: nothing may be applied meanwhile.

    Raises ValueError when the fold has no position there.
    """
    position = fold.position(source)
    if position is None:
        raise ValueError(f"{fold.name} has no state of {source.topic}[{source.partition}]")
    data = fold.snapshot(source)
    cover = Cover(
        format=FORMAT,
        fold=fold.name,
        topic=source.topic,
        partition=source.partition,
        position=position,
        size=len(data),
        state_hash=fold.state_hash(source),
    )
    return Taken(cover, data)


class Snapshots:
    """Writes and reads snapshots over one log. Remembers the pointers that it has read."""

    def __init__(self, log: Log, clock: Clock, *, load_timeout_s: float = 60.0) -> None:
        self._log = log
        self._clock = clock
        self._outbox = Outbox(log, clock)
        self._load_timeout_s = load_timeout_s
        self._pointers: dict[str, list[Pointed]] = {}  # oldest first
        self._pointers_read_to = 0
        self._reading_pointers = asyncio.Lock()

    async def save(self, fold: Fold, source: Partition) -> SnapshotPointer:
        """Write a snapshot of what `fold` knows from one partition, now. Raises as `take`."""
        pointer = await self.write(take(fold, source))
        assert pointer is not None
        return pointer

    async def write(
        self, taken: Taken, is_wanted: Callable[[], bool] = lambda: True
    ) -> SnapshotPointer | None:
        """Write a snapshot; None, and nothing points at it, once it is not wanted any more.

        Appends are repeated until acknowledged.
        """
        cover, data = taken
        source = Partition(cover.topic, cover.partition)
        checksum = await self._checksum(cover, data)
        partition = source.partition % await self._log.partitions(SNAPSHOTS)
        first, parts = -1, 0
        for part in _parts(cover, data):
            if not is_wanted():
                return None
            entry = _entry(cover.fold, source, checksum, parts, part)
            appended = await self._outbox.persist_entry(SNAPSHOTS, entry, partition)
            first, parts = (first if parts else appended.offset), parts + 1
        if not is_wanted():
            return None
        pointer = SnapshotPointer(
            fold=cover.fold,
            partition=source.partition,
            position=cover.position,
            first_part=first,
            parts=parts,
            checksum=checksum,
            state_hash=cover.state_hash,
            format=FORMAT,
        )
        await self._outbox.persist(REGISTRY, pointer_key(cover.fold, source), pointer)
        return pointer

    async def load(self, fold: Fold, *sources: Partition) -> frozenset[Partition]:
        """Restore the newest whole snapshot of each partition.

        Returns those that were; the fold has no state of the others. Raises BrokerUnavailable.
        """
        await self.refresh()
        loaded = set()
        for source in sources:
            for pointer, _ in reversed(self._pointers.get(pointer_key(fold.name, source), ())):
                try:
                    await self._restore(fold, source, pointer)
                except _UnusableError as e:
                    log.warning(
                        "snapshot of %s, %s[%d], at %d is not used: %s",
                        fold.name, *source, pointer.position, e,
                    )  # fmt: skip
                    continue
                loaded.add(source)
                break
        return frozenset(loaded)

    async def refresh(self) -> None:
        """Read the pointers that were added since the last time. Raises BrokerUnavailable."""
        try:
            await self._read_pointers()
        except _UnusableError as e:
            log.warning("the registry could not be read for snapshots: %s", e)

    def newest(self, fold: str, source: Partition) -> Pointed | None:
        """The newest pointer of a partition that was read, whether its snapshot is whole or not."""
        known = self._pointers.get(pointer_key(fold, source))
        return known[-1] if known else None

    # --- writing ---

    async def _checksum(self, cover: Cover, data: bytes) -> str:
        digest = sha256(_encode(cover))
        for part in _slices(data):
            digest.update(part)
            await self._clock.sleep(0)
        return digest.hexdigest()

    # --- reading ---

    async def _read_pointers(self) -> None:
        """Take in what was added to the registry since the last time."""
        async with self._reading_pointers:
            registry = Partition(REGISTRY, 0)
            start = (await self._log.start_offsets(REGISTRY, [0]))[0]
            start = max(start, self._pointers_read_to)
            end = (await self._log.end_offsets(REGISTRY, [0]))[0]
            if start < end:
                async with aclosing(self._read(registry, start, end, 500)) as records:
                    async for record in records:
                        self._note(record)
                        self._pointers_read_to = record.offset + 1
                self._pointers_read_to = end

    def _note(self, record: Record) -> None:
        try:
            pointer = decode(record)
        except RecordError:
            return  # other readers of the registry say so
        if isinstance(pointer, Tombstone):
            self._pointers.pop(pointer.key, None)
        elif isinstance(pointer, SnapshotPointer) and record.key is not None:
            known = self._pointers.setdefault(record.key.decode(errors="replace"), [])
            known.append(Pointed(pointer, record.timestamp))
            del known[:-POINTERS_KEPT]

    async def _restore(self, fold: Fold, source: Partition, pointer: SnapshotPointer) -> None:
        """Raises _UnusableError; the fold has no state of this partition then."""
        if pointer.format != FORMAT:
            raise _UnusableError(f"its format is {pointer.format}")
        cover, data = await self._assemble(source, pointer)
        expected = (FORMAT, fold.name, *source, pointer.position)
        found = (cover.format, cover.fold, cover.topic, cover.partition, cover.position)
        if found != expected:
            raise _UnusableError(f"it is of {found}")
        try:
            fold.restore(source, data, pointer.position)
        except (ValueError, msgspec.MsgspecError) as e:
            fold.forget(source)
            raise _UnusableError(f"the fold cannot read it: {e}") from e
        if fold.state_hash(source) != pointer.state_hash:
            fold.forget(source)
            raise _UnusableError("the restored state has another hash")

    async def _assemble(self, source: Partition, pointer: SnapshotPointer) -> tuple[Cover, bytes]:
        partition = source.partition % await self._log.partitions(SNAPSHOTS)
        end = (await self._log.end_offsets(SNAPSHOTS, [partition]))[partition]
        cover: Cover | None = None
        data = bytearray()
        digest = sha256()
        expected = 0  # a part may stand twice, or beside those of another snapshot
        snapshots = Partition(SNAPSHOTS, partition)
        async with aclosing(self._read(snapshots, pointer.first_part, end, 8)) as records:
            async for record in records:
                if _place(record) != (pointer.checksum, expected) or record.value is None:
                    continue
                part = record.value if expected == 0 else _decompress(record.value)
                digest.update(part)
                if expected == 0:
                    cover = _decode(part)
                else:
                    data += part
                expected += 1
                if expected == pointer.parts:
                    break
        if cover is None or expected != pointer.parts:
            raise _UnusableError(f"{expected} of {pointer.parts} parts are there")
        if digest.hexdigest() != pointer.checksum or len(data) != cover.size:
            raise _UnusableError("its checksum differs")
        return cover, bytes(data)

    async def _read(
        self, source: Partition, position: int, end: int, at_once: int
    ) -> AsyncGenerator[Record, None]:
        """The records of a partition from `position` to `end`. Raises _UnusableError."""
        timeout_s, starts, ends = self._load_timeout_s, {source: position}, {source: end}
        pieces = stretch(self._log, self._clock, starts, ends, timeout_s=timeout_s, at_once=at_once)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    for record in piece.records:
                        yield record
        except (PositionLost, TimeoutError) as e:
            raise _UnusableError(str(e)) from e


def pointer_key(fold: str, source: Partition) -> str:
    """The registry key of a snapshot."""
    return f"snapshot/{fold}/{source.partition}"


def _entry(fold: str, source: Partition, checksum: str, number: int, part: bytes) -> Entry:
    headers = ((TYPE, _PART), (_SNAPSHOT, checksum.encode()), (_NUMBER, b"%d" % number))
    return Entry(f"{fold}/{source.partition}/{number}".encode(), part, headers)


def _place(record: Record) -> tuple[str, int] | None:
    """Checksum and number in the headers of a part; None for any other record."""
    headers = dict(record.headers)
    try:
        return headers[_SNAPSHOT].decode(), int(headers[_NUMBER])
    except (KeyError, ValueError):
        return None


def _parts(cover: Cover, data: bytes) -> Iterator[bytes]:
    yield _encode(cover)
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    for part in _slices(data):
        yield compressor.compress(part)


def _slices(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(data), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]


def _encode(cover: Cover) -> bytes:
    return msgspec.msgpack.encode(cover)


def _decode(data: bytes) -> Cover:
    try:
        return msgspec.msgpack.decode(data, type=Cover)
    except msgspec.MsgspecError as e:
        raise _UnusableError(f"its cover: {e}") from e


def _decompress(data: bytes) -> bytes:
    try:
        if zstandard.frame_content_size(data) > SLICE_BYTES:  # it would be allocated at once
            raise _UnusableError("a part says that it is larger than a slice")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=SLICE_BYTES)
    except zstandard.ZstdError as e:
        raise _UnusableError(f"a part does not decompress: {e}") from e
