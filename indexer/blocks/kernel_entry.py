"""Entry points to the kernels that Python calls for every record and every prompt. They take the
addresses of `table`, `sets` and `scratch` (`KernelArrays`): passing 20 arrays takes several times
as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.blocks import prefix_search, updates
from kvlane.indexer.blocks.block_table import BlockTable
from kvlane.indexer.blocks.holder_sets import HolderSets
from kvlane.indexer.blocks.prefix_keys import KeyConstants, SearchScratch
from kvlane.indexer.blocks.updates import BLOCK_COUNT, REJECTED
from kvlane.indexer.events import EventRows
from kvlane.indexer.kernels import inlined, kernel
from kvlane.indexer.native.intrinsics import i64_array_at, u64_array_at

U64Array: TypeAlias = NDArray[np.uint64]
I64Array: TypeAlias = NDArray[np.int64]
KernelTuple: TypeAlias = tuple[Any, ...]
"""The fields of a named tuple, in order."""
NO_ROOM = -1


class KernelArrays:
    """Arrays for kernels, which get only `places`: i64, the address and the length of each array,
    or an integer and 0. Callers keep this object for the time of a call."""

    def __init__(self, arrays: Iterable[NDArray[Any] | int]) -> None:
        self._arrays = tuple(arrays)
        self.places = np.array(
            [
                (one, 0) if isinstance(one, int) else (one.ctypes.data, len(one))
                for one in self._arrays
            ],
            np.int64,
        ).reshape(-1)


@inlined
def _table(p: I64Array) -> BlockTable:
    return BlockTable(
        u64_array_at(p, 0), u64_array_at(p, 1), u64_array_at(p, 2), u64_array_at(p, 3),
        i64_array_at(p, 4),
    )  # fmt: skip


@inlined
def _sets(p: I64Array) -> HolderSets:
    return HolderSets(
        u64_array_at(p, 0), p[2], u64_array_at(p, 2), i64_array_at(p, 3), i64_array_at(p, 4),
        i64_array_at(p, 5), i64_array_at(p, 6), u64_array_at(p, 7), u64_array_at(p, 8),
        i64_array_at(p, 9),
    )  # fmt: skip


@inlined
def _constants(m: U64Array) -> KeyConstants:
    return KeyConstants(m[0], m[1], m[2], m[3])


@inlined
def _scratch(p: I64Array) -> SearchScratch:
    return SearchScratch(
        u64_array_at(p, 0), u64_array_at(p, 1), u64_array_at(p, 2), u64_array_at(p, 3),
        i64_array_at(p, 4), i64_array_at(p, 5), u64_array_at(p, 6),
    )  # fmt: skip


@kernel()
def apply_rows(
    table: I64Array,
    sets: I64Array,
    column: int,
    tier: int,
    tags: U64Array,
    rows: KernelTuple,
    most: int,
    accounts: U64Array,
) -> int:
    """As `updates.apply_rows`; returns the rejected blocks, or NO_ROOM, with nothing applied.
    `tags` (tiers) and `accounts` (tiers, words) are the cache's, `most` its limit over all
    tiers."""
    named = EventRows(rows[0], rows[1], rows[2], rows[3], rows[4])
    if not updates.has_capacity(_table(table), _sets(sets), column, len(named.keys)):
        return NO_ROOM
    for other in range(len(accounts)):
        if other != tier:
            most -= np.int64(accounts[other, BLOCK_COUNT])
    account = accounts[tier]
    updates.apply_rows(_table(table), _sets(sets), column, tags[tier], named, most, account)
    refused = np.int64(account[REJECTED])
    account[REJECTED] = 0
    return refused


@kernel()
def match_prefix(
    table: I64Array,
    sets: I64Array,
    alive: U64Array,
    constants: U64Array,
    local: U64Array,
    is_closed: bool,
    scratch: I64Array,
) -> int:
    """As `prefix_search.match_prefix`; `constants`: u64 (4)."""
    return prefix_search.match_prefix(
        _table(table),
        _sets(sets),
        alive,
        _constants(constants),
        local,
        is_closed,
        _scratch(scratch),
    )


@kernel()
def extend_to_lower_tier(
    table: I64Array,
    sets: I64Array,
    alive: U64Array,
    constants: U64Array,
    local: U64Array,
    depth: I64Array,
    scratch: I64Array,
) -> int:
    """As `prefix_search.extend_to_lower_tier`; `constants`: u64 (4)."""
    return prefix_search.extend_to_lower_tier(
        _table(table), _sets(sets), alive, _constants(constants), local, depth, _scratch(scratch)
    )
