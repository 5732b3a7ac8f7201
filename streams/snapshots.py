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
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from streams.clock import Clock
from streams.codecs import decode
from streams.errors import PositionLost, RecordError
from streams.outbox import Outbox
from streams.parts import (
    FORMAT,
    Cover,
    Pieces,
    UnusableError,
    cover_bytes,
    entry_of,
    parts_of,
    place_of,
    slices_of,
)
from streams.ports import Log, Partition, Record
from streams.records import SnapshotPointer, Tombstone
from streams.stretch import stretch
from streams.topics import REGISTRY, SNAPSHOTS

if TYPE_CHECKING:
    from streams.follow import Fold

log = logging.getLogger(__name__)

POINTERS_KEPT = 3
"""Pointers remembered for each partition of a fold: the newest, and what to fall back to."""


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
        for part in parts_of(cover, data):
            if not is_wanted():
                return None
            entry = entry_of(cover.fold, source, checksum, parts, part)
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
        loaded: set[Partition] = set()
        for age in range(POINTERS_KEPT):
            wanted: dict[Partition, SnapshotPointer] = {}
            for source in sources:
                known = self._pointers.get(pointer_key(fold.name, source), ())
                if source not in loaded and age < len(known):
                    wanted[source] = known[-1 - age].pointer
            if wanted:
                loaded |= await self._restore_all(fold, wanted)
        return frozenset(loaded)

    async def refresh(self) -> None:
        """Read the pointers that were added since the last time. Raises BrokerUnavailable."""
        try:
            await self._read_pointers()
        except UnusableError as e:
            log.warning("the registry could not be read for snapshots: %s", e)

    def newest(self, fold: str, source: Partition) -> Pointed | None:
        """The newest pointer of a partition that was read, whether its snapshot is whole or not."""
        known = self._pointers.get(pointer_key(fold, source))
        return known[-1] if known else None

    # --- writing ---

    async def _checksum(self, cover: Cover, data: bytes) -> str:
        digest = sha256(cover_bytes(cover))
        for part in slices_of(data):
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
                async with aclosing(self._read({registry: start}, {registry: end}, 500)) as records:
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

    async def _restore_all(
        self, fold: Fold, wanted: Mapping[Partition, SnapshotPointer]
    ) -> set[Partition]:
        """The partitions that could be restored; the fold has no state of the others."""
        restored = set()
        pieces = {source: Pieces(pointer) for source, pointer in wanted.items()}
        async with aclosing(self._collect(pieces)) as collected:
            async for source in collected:
                whole = pieces.pop(source)  # it holds all of the bytes
                try:
                    _restore(fold, source, whole)
                    restored.add(source)
                except UnusableError as e:
                    log.warning(
                        "snapshot of %s, %s[%d], at %d is not used: %s",
                        fold.name, *source, whole.pointer.position, e,
                    )  # fmt: skip
        return restored

    async def _collect(self, pieces: Mapping[Partition, Pieces]) -> AsyncGenerator[Partition, None]:
        """Read snapshots together; each partition as soon as there is no more to read of it.

        Those of one partition of `snapshots` mostly follow each other there, and a reader of their
        own for each would take longer than reading.
        """
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
                    checksum, number = place_of(record) or ("", 0)
                    of = left.get(checksum)
                    if of is not None and pieces[of].take(number, record.value):
                        del left[checksum]
                        yield of
                        if not left:
                            return
        except UnusableError as e:
            log.warning("snapshots could not be read: %s", e)
        for of in left.values():
            yield of

    async def _read(
        self, starts: Mapping[Partition, int], ends: Mapping[Partition, int], at_once: int
    ) -> AsyncGenerator[Record, None]:
        """The records of partitions from a start to an end each. Raises UnusableError."""
        timeout_s = self._load_timeout_s
        pieces = stretch(self._log, self._clock, starts, ends, timeout_s=timeout_s, at_once=at_once)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    for record in piece.records:
                        yield record
        except (PositionLost, TimeoutError) as e:
            raise UnusableError(str(e)) from e


def _restore(fold: Fold, source: Partition, pieces: Pieces) -> None:
    """Raises UnusableError; the fold has no state of this partition then."""
    pointer = pieces.pointer
    if pointer.format != FORMAT:
        raise UnusableError(f"its format is {pointer.format}")
    cover, data = pieces.whole()
    expected = (FORMAT, fold.name, *source, pointer.position)
    found = (cover.format, cover.fold, cover.topic, cover.partition, cover.position)
    if found != expected:
        raise UnusableError(f"it is of {found}")
    try:
        fold.restore(source, data, pointer.position)
    except Exception as e:  # the log is still there, whatever is wrong with these bytes
        fold.forget(source)
        raise UnusableError(f"the fold cannot read it: {e!r}") from e
    if fold.state_hash(source) != pointer.state_hash:
        fold.forget(source)
        raise UnusableError("the restored state has another hash")


def pointer_key(fold: str, source: Partition) -> str:
    """The registry key of a snapshot."""
    return f"snapshot/{fold}/{source.partition}"
