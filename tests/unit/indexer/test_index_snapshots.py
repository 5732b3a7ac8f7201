"""Tests of snapshots of the index: many caches, a table that grows, and bytes that no index
wrote."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from kvlane.indexer.blocks import snapshot_format
from kvlane.indexer.epochs import CacheId, Overlap
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, Tier
from tests.harness.keyed_index import KeyedIndex

CELL = {"epoch": 1, "lost": False, "ranks": [(0, 5, True, False)]}
EMPTY = np.empty(0, np.uint32)
NONE = snapshot_format.TierPart(np.empty(0, np.uint64), EMPTY, EMPTY, np.zeros((0, 1), np.uint64))


def written(
    keys: list[int], numbers: list[int], rows: list[list[int]], workers: Any = None
) -> bytes:
    """A snapshot of blocks in the device tier, whether or not there is such an index."""
    part = snapshot_format.TierPart(
        np.array(keys, np.uint64),
        np.zeros(len(keys), np.uint32),
        np.array(numbers, np.uint32),
        np.array(rows, np.uint64),
    )
    return snapshot_format.encode_snapshot(
        "", {"w": CELL} if workers is None else workers, [part] + [NONE] * 3
    )


def ranks(count: int) -> dict[str, Any]:
    return {"w": CELL | {"ranks": [(rank, 5, True, False) for rank in range(count)]}}


@pytest.mark.parametrize("caches", [64, 65, 200])
def test_snapshot_holds_any_number_of_caches(caches: int) -> None:
    index = KeyedIndex()
    for cache in range(caches):
        events = [CLEARED, CacheEvent(EventKind.STORED, keys=(1, 2, 100 + cache))]
        index.apply_events(0, CacheId(f"w{cache}", 0), 1, 0, events)
    index.apply_events(
        0, CacheId("w3", 0), 1, 2, [CacheEvent(EventKind.STORED, Tier.HOST, keys=(1, 7))]
    )
    restored = KeyedIndex()
    restored.restore(0, index.snapshot(0))
    assert restored.state_hash(0) == index.state_hash(0)
    assert restored.match_prefix([1, 2, 100]) == index.match_prefix([1, 2, 100])
    assert len(restored.match_prefix([1])) == caches


def test_snapshot_beside_growth_has_the_blocks_of_both_tables() -> None:
    rng = random.Random(1)
    index, known, events = KeyedIndex(), 0, 1
    index.apply_events(0, CacheId("w", 0), 1, 0, [CLEARED])
    while not index._views[Tier.DEVICE].table.is_growing or known < 150_000:
        keys = tuple(rng.randrange(1, 1 << 64) for _ in range(500))
        index.apply_events(
            0, CacheId("w", 0), 1, events, [CacheEvent(EventKind.STORED, position=known, keys=keys)]
        )
        known, events = known + 500, events + 1
        assert known < 400_000
    restored = KeyedIndex()
    restored.restore(0, index.snapshot(0))
    assert restored.state_hash(0) == index.state_hash(0)
    assert restored.block_count(CacheId("w", 0)) == known


def test_restored_cache_is_not_complete_by_that_alone() -> None:
    index = KeyedIndex()
    index.apply_events(
        0, CacheId("w", 0), 1, 700, [CacheEvent(EventKind.STORED, position=5, keys=(5, 6))]
    )
    restored = KeyedIndex()
    restored.restore(0, index.snapshot(0))
    assert not restored.is_complete(CacheId("w", 0))


LAST_HOME = 0xFFFFFFFF << 32
NO_INDEX_WROTE = {
    "a rank twice": written([7], [0], [[1]], {"w": CELL | {"ranks": CELL["ranks"] * 2}}),
    "blocks of nobody": written([7, 8], [0, 0], [[0]], {}),
    "blocks of a cache that is none": written([7], [0], [[2]]),
    "a block twice": written([7, 7], [0, 0], [[1]]),
    "a block twice, of others": written([7, 7], [0, 1], [[1], [2]], ranks(2)),
    "a set that is none": written([7], [1], [[1]]),
    "no key": written([0], [0], [[1]]),
    "thousands of keys in one place": written(
        [LAST_HOME | n for n in range(1, 6000)], [0] * 5999, [[1]]
    ),
    "a worker that is none": written([], [], [[1]], {"w": CELL, "x": {}}),
    "workers that are none": written([], [], [[1]], [1]),
    "an epoch that is none": written([], [], [[1]], {"w": CELL | {"epoch": "x"}}),
    "a rank below zero": written([], [], [[1]], {"w": CELL | {"ranks": [(-1, 5, True, False)]}}),
    "a rank too many": written([], [], [[1]], {"w": CELL | {"ranks": [(0, 5, True, False, 1)]}}),
    "a name that is no text": written([], [], [[1]], {"\ud800": CELL}),
    "another header": snapshot_format.MAGIC + (2).to_bytes(4, "little") + b"[]",
    "a deep header": snapshot_format.MAGIC + (200_000).to_bytes(4, "little") + b"[" * 200_000,
    "a header that is none": snapshot_format.MAGIC + (9).to_bytes(4, "little") + b"{",
}


@pytest.mark.parametrize("data", NO_INDEX_WROTE.values(), ids=NO_INDEX_WROTE)
def test_foreign_bytes_leave_nothing_behind(data: bytes) -> None:
    index, other = KeyedIndex(), CacheId("other", 0)
    index.apply_events(1, other, 1, 0, [CLEARED, CacheEvent(EventKind.STORED, keys=(7, 8))])
    before = index.state_hash(1)
    with pytest.raises(ValueError, match=r"."):
        index.restore(0, data)
    index.maintain_fully()
    assert index.cache_sizes().keys() == {other}
    assert index.match_prefix([7, 8]) == {other: Overlap(2)}
    assert (index.state_hash(0), index.state_hash(1)) == (0, before)
    assert index._views[Tier.DEVICE].table.used == 2


@pytest.mark.parametrize("sizes", [[-1, 2, 1], [0.5, 1, 1], [True, True, True], [0, 0, 10**18], 5])
def test_headers_with_invalid_sizes_are_refused(sizes: Any) -> None:
    header = {"fingerprint": "", "workers": {}, "tiers": [sizes] + [[0, 0, 0]] * 3}
    head = json.dumps(header).encode()
    data = snapshot_format.MAGIC + len(head).to_bytes(4, "little") + head + b"\1" * 64
    with pytest.raises(ValueError, match=r"."):
        KeyedIndex().restore(0, data)


def test_torn_snapshots_are_refused_at_any_byte() -> None:
    index = KeyedIndex()
    index.apply_events(
        0, CacheId("w", 0), 1, 0, [CLEARED, CacheEvent(EventKind.STORED, keys=(7, 8, 9))]
    )
    data = index.snapshot(0)
    for size in range(len(data)):
        with pytest.raises(ValueError, match=r"."):
            KeyedIndex().restore(0, data[:size])
