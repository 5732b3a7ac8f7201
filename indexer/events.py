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
from typing import NamedTuple

import numpy as np

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


class Event(NamedTuple):
    """One change. Keys are u64 and never 0."""

    kind: Kind
    tier: Tier = Tier.DEVICE
    position: int = 0
    keys: tuple[int, ...] = ()


CLEARED = Event(Kind.CLEARED)


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
    return Columns(
        kinds=bytes(event.kind for event in rows),
        tiers=bytes(event.tier for event in rows),
        positions=np.array([event.position for event in rows], "<u4").tobytes(),
        counts=np.array([len(event.keys) for event in rows], "<u4").tobytes(),
        keys=np.array([key for event in rows for key in event.keys], "<u8").tobytes(),
    )


def decode(columns: Columns) -> list[Event]:
    """The inverse of `encode`. Raises MalformedColumns."""
    rows = len(columns.kinds)
    lengths = (len(columns.tiers), len(columns.positions), len(columns.counts))
    if lengths != (rows, 4 * rows, 4 * rows) or len(columns.keys) % 8:
        raise MalformedColumns(f"columns of {lengths} bytes for {rows} rows")
    counts = np.frombuffer(columns.counts, "<u4").tolist()
    keys = np.frombuffer(columns.keys, "<u8").tolist()
    if sum(counts) != len(keys):
        raise MalformedColumns(f"{len(keys)} keys where {sum(counts)} are counted")
    if 0 in keys:
        raise MalformedColumns("0 is no key")
    positions = np.frombuffer(columns.positions, "<u4").tolist()
    events = []
    start = 0
    for kind, tier, position, count in zip(
        columns.kinds, columns.tiers, positions, counts, strict=True
    ):
        events.append(_event(kind, tier, position, tuple(keys[start : start + count])))
        start += count
    return events


def _event(kind: int, tier: int, position: int, keys: tuple[int, ...]) -> Event:
    if kind > max(Kind) or tier > max(Tier):
        raise MalformedColumns(f"kind {kind}, tier {tier}")
    if kind == Kind.CLEARED and keys:
        raise MalformedColumns("cleared, with keys")
    if position + len(keys) - 1 > LARGEST_POSITION:
        raise MalformedColumns(f"{len(keys)} keys from position {position}")
    return Event(Kind(kind), Tier(tier), position, keys)
