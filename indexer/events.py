"""Canonical cache events, and their columnar encoding.

An event states for one rank of a worker that blocks are in a tier, that they are not, or that the
cache is empty, by keys of prefixes (`indexer/block_hashes.py`). A record has one row per event, as
little-endian columns:

    kinds u8 | tiers u8 | positions u32 | counts u32 | keys u64, concatenated over all rows

`workbench/reference_index.py` defines the effect of an event.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from itertools import chain
from struct import pack
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.kernels import kernel

MAX_POSITION = 2**32 - 1


class EventKind(IntEnum):
    """Kind of an event; the values are those on the wire."""

    STORED = 0
    """The keys are at consecutive positions, starting at the event's position."""
    REMOVED = 1
    """The keys are in any order, at any positions; the event's position has no meaning."""
    CLEARED = 2
    """The rank holds no block in any tier; the event has no keys."""


class Tier(IntEnum):
    """Storage tier of a block, nearest first; the values are those on the wire."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


class CacheEvent(msgspec.Struct, frozen=True, gc=False):
    """One change. Keys are u64 and never 0."""

    kind: EventKind
    tier: Tier = Tier.DEVICE
    position: int = 0
    keys: tuple[int, ...] = ()


CLEARED = CacheEvent(EventKind.CLEARED)
U32, U64 = np.dtype("<u4"), np.dtype("<u8")
MAX_KIND, MAX_TIER = int(max(EventKind)), int(max(Tier))


class EventColumns(NamedTuple):
    """Encoded events; the fields are those of the `Blocks` record."""

    kinds: bytes
    tiers: bytes
    positions: bytes
    counts: bytes
    keys: bytes


class MalformedColumns(ValueError):
    """Columns that do not decode. Permanent, so the record is skipped and counted."""


def encode_events(events: Iterable[CacheEvent]) -> EventColumns:
    """Encode events as columns."""
    rows = list(events)
    size, keys = len(rows), list(chain.from_iterable([event.keys for event in rows]))
    return EventColumns(
        kinds=bytes([event.kind for event in rows]),
        tiers=bytes([event.tier for event in rows]),
        positions=pack(f"<{size}I", *[event.position for event in rows]),
        counts=pack(f"<{size}I", *[len(event.keys) for event in rows]),
        keys=pack(f"<{len(keys)}Q", *keys),
    )


class EventRows(NamedTuple):
    """Columns as arrays: read-only views of the bytes, one element per event except in `keys`.
    `kinds`, `tiers`: u8 (n). `positions`, `counts`: u32 (n). `keys`: u64, concatenated."""

    kinds: NDArray[np.uint8]
    tiers: NDArray[np.uint8]
    positions: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    keys: NDArray[np.uint64]


def parse_columns(columns: EventColumns) -> EventRows:
    """Validate columns and view them as arrays. Raises MalformedColumns."""
    rows = len(columns.kinds)
    lengths = (len(columns.tiers), len(columns.positions), len(columns.counts))
    if lengths != (rows, 4 * rows, 4 * rows) or len(columns.keys) % 8:
        raise MalformedColumns(
            f"column lengths {lengths} do not match {rows} rows, or the keys are no whole u64"
        )
    arrays = (
        np.frombuffer(columns.kinds, np.uint8),
        np.frombuffer(columns.tiers, np.uint8),
        np.frombuffer(columns.positions, U32),
        np.frombuffer(columns.counts, U32),
        np.frombuffer(columns.keys, U64),
    )
    fault = _first_fault(*arrays)
    if fault != VALID:
        raise MalformedColumns(f"{rows} rows with {len(arrays[-1])} keys: {FAULT_MESSAGES[fault]}")
    return EventRows(*arrays)


VALID, BAD_KEY, BAD_KIND, BAD_CLEARED, BAD_POSITION, BAD_COUNT = range(6)
FAULT_MESSAGES = (
    "",
    "a key is 0",
    "unknown kind or tier",
    "a cleared event has keys",
    "a position is beyond 2^32 - 1",
    "the counts do not add up to the number of keys",
)


@kernel()
def _first_fault(
    kinds: NDArray[np.uint8],
    tiers: NDArray[np.uint8],
    positions: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    keys: NDArray[np.uint64],
) -> int:
    """The first fault of the rows, or VALID."""
    total = np.int64(0)
    for row in range(len(kinds)):
        count, position = np.int64(counts[row]), np.int64(positions[row])
        if kinds[row] > MAX_KIND or tiers[row] > MAX_TIER:
            return BAD_KIND
        if kinds[row] == MAX_KIND and count:
            return BAD_CLEARED
        if position + count - 1 > MAX_POSITION:
            return BAD_POSITION
        total += count
    if total != len(keys):
        return BAD_COUNT
    zeros = 0
    for key in keys:
        zeros += key == 0
    return BAD_KEY if zeros else VALID
