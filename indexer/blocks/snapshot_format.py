"""Snapshot format of the index: the blocks of a partition as bytes, 16 a block, little endian.

    magic | u32 length of the header | header, JSON | for each tier: rows, keys, positions, numbers

The header has the fingerprint of the key secret, the workers with their ranks, of which the n-th is
column n of the rows (`EpochTracker.serialize`), and for each tier the number of blocks and sets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.blocks.holder_sets import WORD_BITS

MAGIC = b"kvlane blocks 2\n"


class TierPart(NamedTuple):
    """Blocks of a tier: u64, u32, u32 (n); `numbers` are indices into `rows`, u64 (sets, words)."""

    keys: NDArray[np.uint64]
    positions: NDArray[np.uint32]
    numbers: NDArray[np.uint32]
    rows: NDArray[np.uint64]


def encode_snapshot(fingerprint: str, workers: dict[str, Any], tiers: Sequence[TierPart]) -> bytes:
    header = {
        "fingerprint": fingerprint,
        "workers": workers,
        "tiers": [(len(part.keys), *part.rows.shape) for part in tiers],
    }
    head = json.dumps(header).encode()
    pieces = [MAGIC, len(head).to_bytes(4, "little"), head]
    for part in tiers:
        pieces += [part.rows.tobytes(), part.keys.tobytes()]
        pieces += [part.positions.tobytes(), part.numbers.tobytes()]
    return b"".join(pieces)


def decode_snapshot(
    data: bytes, fingerprint: str, tiers: int
) -> tuple[dict[str, Any], list[TierPart]]:
    """Decode workers and blocks, the inverse of `encode_snapshot`. Raises ValueError."""
    start = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC or len(data) < start:
        raise ValueError("not a snapshot of the index: unknown format")
    end = start + int.from_bytes(data[len(MAGIC) : start], "little")
    header = json.loads(data[start:end])
    if header["fingerprint"] != fingerprint:
        raise ValueError("the snapshot was written under another hash secret")
    sizes = header["tiers"]
    if not all(type(n) is int and 0 <= n < 1 << 40 for size in sizes for n in size):
        raise ValueError(f"the snapshot has invalid tier sizes: {sizes}")
    expected = end + sum(16 * blocks + 8 * sets * words for blocks, sets, words in sizes)
    if len(sizes) != tiers or len(data) != expected:
        raise ValueError(
            f"the snapshot has {len(data)} bytes and {len(sizes)} tiers; "
            f"expected {expected} bytes and {tiers} tiers"
        )
    parts = []
    for blocks, sets, words in sizes:
        rows, end = _array(data, "<u8", sets * words, end)
        keys, end = _array(data, "<u8", blocks, end)
        positions, end = _array(data, "<u4", blocks, end)
        numbers, end = _array(data, "<u4", blocks, end)
        if blocks and (not keys.all() or int(numbers.max()) >= sets):
            raise ValueError("the snapshot has blocks without a key or a set")
        parts.append(TierPart(keys, positions, numbers, rows.reshape(sets, words)))
    return header["workers"], parts


def _array(data: bytes, dtype: str, count: int, start: int) -> tuple[NDArray[Any], int]:
    """An aligned copy, as kernels require it."""
    array = np.frombuffer(data, dtype, count, start).copy()
    return array, start + array.nbytes


def renumber_sets(
    numbers: NDArray[np.uint32], sets: int
) -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
    """Renumber from 0 without gaps; also returns the numbers that occur."""
    present = np.flatnonzero(np.bincount(numbers, minlength=sets))
    renumbered = np.zeros(sets, np.uint32)
    renumbered[present] = np.arange(len(present), dtype=np.uint32)
    return renumbered[numbers], present


def gather_columns(rows: NDArray[np.uint64], columns: Sequence[int]) -> NDArray[np.uint64]:
    """Rows of only these columns, in this order; a negative column is empty."""
    gathered = np.zeros((len(rows), max(-(-len(columns) // WORD_BITS), 1)), np.uint64)
    known = rows.shape[1] * WORD_BITS  # newer columns have no bits in a tier that did not change
    for to, column in enumerate(columns):
        if 0 <= column < known:
            bits = (rows[:, column // WORD_BITS] >> np.uint64(column % WORD_BITS)) & np.uint64(1)
            gathered[:, to // WORD_BITS] |= bits << np.uint64(to % WORD_BITS)
    return gathered


def scatter_columns(
    rows: NDArray[np.uint64], columns: Sequence[int], words: int
) -> NDArray[np.uint64]:
    """The inverse of `gather_columns`, into rows of `words` words."""
    scattered = np.zeros((len(rows), words), np.uint64)
    for start, column in enumerate(columns):
        bits = (rows[:, start // WORD_BITS] >> np.uint64(start % WORD_BITS)) & np.uint64(1)
        scattered[:, column // WORD_BITS] |= bits << np.uint64(column % WORD_BITS)
    return scattered
