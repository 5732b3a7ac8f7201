"""The store of snapshots of views, which spare a new process reading the whole log.

Part 0 of a snapshot is the header, which identifies the state, the others are compressed slices.
Their headers hold number and checksum over all, which distinguishes two snapshots. When all records
of a snapshot are acknowledged, on one partition of `snapshots`, a
`SnapshotPointer` in the registry points to the first. A reader uses the newest pointer whose
snapshot is complete, with its checksum and, after restoring, the expected state hash; else the log
itself, with a warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from hashlib import sha256
from typing import NamedTuple

import msgspec
import zstandard

from kvlane.streams.clock import Clock
from kvlane.streams.codecs import TYPE_HEADER, decode
from kvlane.streams.errors import PositionLost, RecordError
from kvlane.streams.ports import Entry, Log, Partition, Record
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import SnapshotPointer, Tombstone
from kvlane.streams.topics import REGISTRY, SNAPSHOTS
from kvlane.streams.views.view import MaterializedView

SNAPSHOT_FORMAT = 1
SLICE_BYTES = 1_000_000
"""Bytes of serialized state per part, before compression: a part stays below 1 MiB."""
COMPRESSION_LEVEL = 3

_PART = b"SnapshotPart"
_SNAPSHOT = "snapshot"  # header: the checksum, which distinguishes the parts of two snapshots
_NUMBER = "part"  # header: from 0


class UnusableSnapshotError(Exception):
    """A snapshot that cannot be used: the log is read instead."""


class SnapshotHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Part 0 of a snapshot. `size`: bytes of the serialized state."""

    format: int
    view: str = msgspec.field(name="fold")  # the name in the stored bytes
    topic: str
    partition: int
    position: int
    size: int
    state_hash: str


class SnapshotAssembler:
    """Assembles one snapshot from its parts, in order."""

    def __init__(self, pointer: SnapshotPointer) -> None:
        self.pointer = pointer
        self.data = bytearray()
        self.header: SnapshotHeader | None = None
        self.problem = ""
        self._digest = sha256()
        self._next = 0  # a part may be duplicated

    def add_part(self, number: int, value: bytes | None) -> bool:
        """Add a part; true when no more parts are needed."""
        if number != self._next or value is None:
            return False
        try:
            part = value if number == 0 else _decompress(value)
            self._digest.update(part)
            if number == 0:
                self.header = _decode(part)
            else:
                self.data += part
        except UnusableSnapshotError as e:
            self.problem = str(e)
            return True
        self._next += 1
        return self._next == self.pointer.parts

    def assemble(self) -> tuple[SnapshotHeader, bytes]:
        """The header and the serialized state. Raises UnusableSnapshotError."""
        if self.problem:
            raise UnusableSnapshotError(self.problem)
        if self.header is None or self._next != self.pointer.parts:
            raise UnusableSnapshotError(f"only {self._next} of {self.pointer.parts} parts exist")
        if self._digest.hexdigest() != self.pointer.checksum or len(self.data) != self.header.size:
            raise UnusableSnapshotError("checksum mismatch")
        return self.header, bytes(self.data)


def part_entry(view: str, source: Partition, checksum: str, number: int, part: bytes) -> Entry:
    headers = ((TYPE_HEADER, _PART), (_SNAPSHOT, checksum.encode()), (_NUMBER, b"%d" % number))
    return Entry(f"{view}/{source.partition}/{number}".encode(), part, headers)


def part_id(record: Record) -> tuple[str, int] | None:
    """Checksum and number in the headers of a part; None for any other record."""
    headers = dict(record.headers)
    try:
        return (headers.get(_SNAPSHOT) or b"").decode(), int(headers.get(_NUMBER) or b"")
    except ValueError:
        return None


def encode_parts(cover: SnapshotHeader, data: bytes) -> Iterator[bytes]:
    yield encode_header(cover)
    compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
    for part in split_slices(data):
        yield compressor.compress(part)


def split_slices(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(data), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]


def encode_header(cover: SnapshotHeader) -> bytes:
    return msgspec.msgpack.encode(cover)


def _decode(data: bytes) -> SnapshotHeader:
    try:
        return msgspec.msgpack.decode(data, type=SnapshotHeader)
    except msgspec.MsgspecError as e:
        raise UnusableSnapshotError(f"invalid header: {e}") from e


def _decompress(data: bytes) -> bytes:
    try:
        if zstandard.frame_content_size(data) > SLICE_BYTES:  # it would be allocated at once
            raise UnusableSnapshotError("a part declares more bytes than a slice has")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=SLICE_BYTES)
    except zstandard.ZstdError as e:
        raise UnusableSnapshotError(f"cannot decompress a part: {e}") from e


log = logging.getLogger(__name__)

POINTERS_KEPT = 3
"""Pointers remembered for each partition of a view: the newest, and two to fall back to."""


class CapturedState(NamedTuple):
    """The state of a view that comes from one partition, at one position."""

    header: SnapshotHeader
    data: bytes


class KnownPointer(NamedTuple):
    """A pointer from the registry, and its append time (broker ms)."""

    pointer: SnapshotPointer
    written_ms: int


def capture(view: MaterializedView, source: Partition) -> CapturedState:
    """Capture state, hash and position of a partition. Raises ValueError without a position."""
    position = view.position(source)
    if position is None:
        raise ValueError(f"{view.name} has no state of {source.topic}[{source.partition}]")
    data = view.snapshot(source)
    cover = SnapshotHeader(
        format=SNAPSHOT_FORMAT,
        view=view.name,
        topic=source.topic,
        partition=source.partition,
        position=position,
        size=len(data),
        state_hash=view.state_hash(source),
    )
    return CapturedState(cover, data)


class SnapshotStore:
    """Writes and reads snapshots over one log. Caches the pointers read so far."""

    def __init__(self, log: Log, clock: Clock, *, load_timeout_s: float = 60.0) -> None:
        self._log = log
        self._clock = clock
        self._publisher = RecordPublisher(log, clock)
        self._load_timeout_s = load_timeout_s
        self._pointers: dict[str, list[KnownPointer]] = {}  # oldest first
        self._pointers_read_to = 0
        self._reading_pointers = asyncio.Lock()

    async def save(self, view: MaterializedView, source: Partition) -> SnapshotPointer:
        """Write a snapshot of one partition of a view, now. Raises as `take`."""
        pointer = await self.write(capture(view, source))
        assert pointer is not None
        return pointer

    async def write(
        self, taken: CapturedState, is_wanted: Callable[[], bool] = lambda: True
    ) -> SnapshotPointer | None:
        """Write a snapshot, until acknowledged; None as soon as `is_wanted` is false."""
        cover, data = taken
        source = Partition(cover.topic, cover.partition)
        checksum = await self._checksum(cover, data)
        partition = source.partition % await self._log.partitions(SNAPSHOTS)
        first, parts = -1, 0
        for part in encode_parts(cover, data):
            if not is_wanted():
                return None
            entry = part_entry(cover.view, source, checksum, parts, part)
            appended = await self._publisher.publish_entry(SNAPSHOTS, entry, partition)
            first, parts = (first if parts else appended.offset), parts + 1
        if not is_wanted():
            return None
        pointer = SnapshotPointer(
            view=cover.view,
            partition=source.partition,
            position=cover.position,
            first_part=first,
            parts=parts,
            checksum=checksum,
            state_hash=cover.state_hash,
            format=SNAPSHOT_FORMAT,
        )
        await self._publisher.publish(REGISTRY, pointer_key(cover.view, source), pointer)
        return pointer

    async def load(self, view: MaterializedView, *sources: Partition) -> frozenset[Partition]:
        """Restore the newest valid snapshots; returns the restored partitions. Raises
        BrokerUnavailable."""
        await self.refresh()
        loaded: set[Partition] = set()
        for age in range(POINTERS_KEPT):
            wanted: dict[Partition, SnapshotPointer] = {}
            for source in sources:
                known = self._pointers.get(pointer_key(view.name, source), ())
                if source not in loaded and age < len(known):
                    wanted[source] = known[-1 - age].pointer
            if wanted:
                loaded |= await self._restore_all(view, wanted)
        return frozenset(loaded)

    async def refresh(self) -> None:
        """Read the pointers added since the last call. Raises BrokerUnavailable."""
        try:
            await self._read_pointers()
        except UnusableSnapshotError as e:
            log.warning("cannot read snapshot pointers from the registry: %s", e)

    def newest(self, view: str, source: Partition) -> KnownPointer | None:
        """The newest known pointer of a partition, whether its snapshot is valid or not."""
        known = self._pointers.get(pointer_key(view, source))
        return known[-1] if known else None

    # --- writing ---

    async def _checksum(self, cover: SnapshotHeader, data: bytes) -> str:
        digest = sha256(encode_header(cover))
        for part in split_slices(data):
            digest.update(part)
            await self._clock.sleep(0)
        return digest.hexdigest()

    # --- reading ---

    async def _read_pointers(self) -> None:
        """Read the registry from where the last call stopped."""
        async with self._reading_pointers:
            registry = Partition(REGISTRY, 0)
            start = (await self._log.start_offsets(REGISTRY, [0]))[0]
            start = max(start, self._pointers_read_to)
            end = (await self._log.end_offsets(REGISTRY, [0]))[0]
            if start < end:
                async with aclosing(self._read({registry: start}, {registry: end}, 500)) as records:
                    async for record in records:
                        self._note(record)
                        self._pointers_read_to = record.offset + 1
                self._pointers_read_to = end

    def _note(self, record: Record) -> None:
        try:
            pointer = decode(record)
        except RecordError:
            return  # other readers of the registry log it
        if isinstance(pointer, Tombstone):
            self._pointers.pop(pointer.key, None)
        elif isinstance(pointer, SnapshotPointer) and record.key is not None:
            known = self._pointers.setdefault(record.key.decode(errors="replace"), [])
            known.append(KnownPointer(pointer, record.timestamp))
            del known[:-POINTERS_KEPT]

    async def _restore_all(
        self, view: MaterializedView, wanted: Mapping[Partition, SnapshotPointer]
    ) -> set[Partition]:
        """The restored partitions; the view has no state of the others."""
        restored = set()
        pieces = {source: SnapshotAssembler(pointer) for source, pointer in wanted.items()}
        async with aclosing(self._collect(pieces)) as collected:
            async for source in collected:
                whole = pieces.pop(source)  # frees its bytes after restoring
                try:
                    _restore(view, source, whole)
                    restored.add(source)
                except UnusableSnapshotError as e:
                    log.warning(
                        "ignoring snapshot of %s, %s[%d], at %d: %s",
                        view.name, *source, whole.pointer.position, e,
                    )  # fmt: skip
        return restored

    async def _collect(
        self, pieces: Mapping[Partition, SnapshotAssembler]
    ) -> AsyncGenerator[Partition, None]:
        """Read several snapshots in one pass; yields each partition when its parts are read."""
        count = await self._log.partitions(SNAPSHOTS)
        kept = await self._log.start_offsets(SNAPSHOTS, range(count))
        ends = await self._log.end_offsets(SNAPSHOTS, range(count))
        starts: dict[Partition, int] = {}
        for source, its in pieces.items():
            number = source.partition % count
            first = max(its.pointer.first_part, kept[number])
            place = Partition(SNAPSHOTS, number)
            starts[place] = min(first, starts.get(place, first))
        left = {its.pointer.checksum: source for source, its in pieces.items()}
        try:
            records = self._read(starts, {p: ends[p.partition] for p in starts}, 8)
            async with aclosing(records):
                async for record in records:
                    checksum, number = part_id(record) or ("", 0)
                    of = left.get(checksum)
                    if of is not None and pieces[of].add_part(number, record.value):
                        del left[checksum]
                        yield of
                        if not left:
                            return
        except UnusableSnapshotError as e:
            log.warning("cannot read snapshots: %s", e)
        for of in left.values():
            yield of

    async def _read(
        self, starts: Mapping[Partition, int], ends: Mapping[Partition, int], at_once: int
    ) -> AsyncGenerator[Record, None]:
        """The records of partitions, from start to end. Raises UnusableSnapshotError."""
        timeout_s = self._load_timeout_s
        pieces = read_range(
            self._log, self._clock, starts, ends, timeout_s=timeout_s, batch_size=at_once
        )
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    for record in piece.records:
                        yield record
        except (PositionLost, TimeoutError) as e:
            raise UnusableSnapshotError(str(e)) from e


def _restore(view: MaterializedView, source: Partition, pieces: SnapshotAssembler) -> None:
    """Raises UnusableSnapshotError; then the view has no state of this partition."""
    pointer = pieces.pointer
    if pointer.format != SNAPSHOT_FORMAT:
        raise UnusableSnapshotError(f"unknown format {pointer.format}")
    cover, data = pieces.assemble()
    expected = (SNAPSHOT_FORMAT, view.name, *source, pointer.position)
    found = (cover.format, cover.view, cover.topic, cover.partition, cover.position)
    if found != expected:
        raise UnusableSnapshotError(f"it belongs to {found}")
    try:
        view.restore(source, data, pointer.position)
    except Exception as e:  # any error: the log is the fallback
        view.forget(source)
        raise UnusableSnapshotError(f"the view cannot restore it: {e!r}") from e
    if view.state_hash(source) != pointer.state_hash:
        view.forget(source)
        raise UnusableSnapshotError("state hash mismatch after restoring")


def pointer_key(view: str, source: Partition) -> str:
    return f"snapshot/{view}/{source.partition}"
