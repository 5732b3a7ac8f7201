"""The store of snapshots of views, which spare a new process reading the whole log.

When all records of a snapshot are acknowledged, on one partition of `snapshots`, a
`SnapshotPointer` in the registry points to the first. A reader uses the newest pointer whose
snapshot is complete, with its checksum and, after restoring, the expected state hash; else the log
itself, with a warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from hashlib import sha256
from typing import NamedTuple

from kvlane.streams.clock import Clock
from kvlane.streams.codecs import decode
from kvlane.streams.errors import PositionLost, RecordError
from kvlane.streams.ports import Log, Partition, Record
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import SnapshotPointer, Tombstone
from kvlane.streams.topics import REGISTRY, SNAPSHOTS
from kvlane.streams.views.snapshot_parts import (
    SNAPSHOT_FORMAT,
    SnapshotAssembler,
    SnapshotHeader,
    UnusableSnapshotError,
    encode_header,
    encode_parts,
    part_entry,
    part_id,
    split_slices,
)
from kvlane.streams.views.view import MaterializedView

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
