"""Canonical cache events, and the columns they travel in.

An event says of one worker's rank that blocks are in a tier, that they are not, or that none is
any more. It names prefixes by keys (`indexer/keys.py`), the same for engines of any kind. Many
events share one record of columns, one row each, all little endian:

    kinds u8 | tiers u8 | positions u32 | counts u32 | keys u64, those of all rows end to end

Owns these shapes and their bytes. What events mean is `indexer/reference.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from itertools import accumulate, chain
from struct import pack
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer.kernels import kernel

LARGEST_POSITION = 2**32 - 1


class Kind(IntEnum):
    """What happened; numbers as on the wire."""

    STORED = 0
    """The keys are at consecutive positions, the first one at the event's."""
    REMOVED = 1
    """The keys are in any order, of any positions; the event's says nothing."""
    CLEARED = 2
    """The rank holds nothing, in any tier; there are no keys."""


class Tier(IntEnum):
    """Where blocks lie, nearest first; numbers as on the wire."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


class Event(msgspec.Struct, frozen=True, gc=False):
    """One change. Keys are u64 and never 0."""

    kind: Kind
    tier: Tier = Tier.DEVICE
    position: int = 0
    keys: tuple[int, ...] = ()


CLEARED = Event(Kind.CLEARED)
U32, U64 = np.dtype("<u4"), np.dtype("<u8")
LAST_KIND, LAST_TIER = int(max(Kind)), int(max(Tier))


class Columns(NamedTuple):
    """Events as bytes; the fields are those of the record that carries them."""

    kinds: bytes
    tiers: bytes
    positions: bytes
    counts: bytes
    keys: bytes


class MalformedColumns(ValueError):
    """Columns that no event gives; they never will be right, so skip and count the record."""


def encode(events: Iterable[Event]) -> Columns:
    """The columns of some events."""
    rows = list(events)
    size, keys = len(rows), list(chain.from_iterable([event.keys for event in rows]))
    return Columns(
        kinds=bytes([event.kind for event in rows]),
        tiers=bytes([event.tier for event in rows]),
        positions=pack(f"<{size}I", *[event.position for event in rows]),
        counts=pack(f"<{size}I", *[len(event.keys) for event in rows]),
        keys=pack(f"<{len(keys)}Q", *keys),
    )


class Rows(NamedTuple):
    """Columns as arrays, read-only views of the bytes; one element for each event, but for `keys`.

    `kinds`, `tiers`: u8 (n). `positions`, `counts`: u32 (n). `keys`: u64, of all rows end to end.
    """

    kinds: NDArray[np.uint8]
    tiers: NDArray[np.uint8]
    positions: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    keys: NDArray[np.uint64]


def rows_of(columns: Columns) -> Rows:
    """The rows, checked. Raises MalformedColumns."""
    rows = len(columns.kinds)
    lengths = (len(columns.tiers), len(columns.positions), len(columns.counts))
    if lengths != (rows, 4 * rows, 4 * rows) or len(columns.keys) % 8:
        raise MalformedColumns(f"columns of {lengths} bytes for {rows} rows")
    found = (
        np.frombuffer(columns.kinds, np.uint8), np.frombuffer(columns.tiers, np.uint8),
        np.frombuffer(columns.positions, U32), np.frombuffer(columns.counts, U32),
        np.frombuffer(columns.keys, U64),
    )  # fmt: skip
    fault = _first_fault(*found)
    if fault != SOUND:
        raise MalformedColumns(f"{rows} rows with {len(found[-1])} keys: {FAULTS[fault]}")
    return Rows(*found)


SOUND, BAD_KEY, BAD_KIND, BAD_CLEARED, BAD_POSITION, BAD_COUNT = range(6)
FAULTS = (
    "",
    "0 is no key",
    "a kind or a tier that is none",
    "cleared, with keys",
    "positions beyond the largest one",
    "another number of keys than is counted",
)


@kernel()
def _first_fault(
    kinds: NDArray[np.uint8],
    tiers: NDArray[np.uint8],
    positions: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    keys: NDArray[np.uint64],
) -> int:
    """What is wrong with rows, if anything is."""
    total = np.int64(0)
    for row in range(len(kinds)):
        count, position = np.int64(counts[row]), np.int64(positions[row])
        if kinds[row] > LAST_KIND or tiers[row] > LAST_TIER:
            return BAD_KIND
        if kinds[row] == LAST_KIND and count:
            return BAD_CLEARED
        if position + count - 1 > LARGEST_POSITION:
            return BAD_POSITION
        total += count
    if total != len(keys):
        return BAD_COUNT
    zeros = 0
    for key in keys:
        zeros += key == 0
    return BAD_KEY if zeros else SOUND


def decode(columns: Columns) -> list[Event]:
    """The inverse of `encode`. Raises MalformedColumns."""
    rows = rows_of(columns)
    counts, keys = rows.counts.tolist(), rows.keys.tolist()
    ends = list(accumulate(counts))
    return [
        Event(Kind(kind), Tier(tier), position, tuple(keys[end - count : end]))
        for kind, tier, position, count, end in zip(
            columns.kinds, columns.tiers, rows.positions.tolist(), counts, ends, strict=True
        )
    ]
