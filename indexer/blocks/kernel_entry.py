"""Entry points to the kernels that Python calls for every record and every prompt.

To determine the types of its arguments, numba takes 0.05 us for each array in a plain tuple, 0.2 in
a named tuple, and 0.8 for a single np.uint64. So these functions take plain tuples, and build the
named ones for the inner kernels.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from indexer.blocks import prefix_search, updates
from indexer.blocks.block_table import BlockTable
from indexer.blocks.holder_sets import HolderSets
from indexer.blocks.prefix_keys import KeyConstants, SearchScratch
from indexer.blocks.updates import BLOCK_COUNT, REJECTED
from indexer.events import EventRows
from indexer.kernels import inlined, kernel

U64Array: TypeAlias = NDArray[np.uint64]
I64Array: TypeAlias = NDArray[np.int64]
KernelTuple: TypeAlias = tuple[Any, ...]
"""The fields of a named tuple, in order."""
NO_ROOM = -1


@inlined
def _table(t: KernelTuple) -> BlockTable:
    return BlockTable(t[0], t[1], t[2])


@inlined
def _sets(s: KernelTuple) -> HolderSets:
    return HolderSets(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9])


@inlined
def _mixing(m: U64Array) -> KeyConstants:
    return KeyConstants(m[0], m[1], m[2], m[3])


@inlined
def _scratch(s: KernelTuple) -> SearchScratch:
    return SearchScratch(s[0], s[1], s[2], s[3], s[4], s[5])


@kernel()
def apply_rows(
    table: KernelTuple,
    sets: KernelTuple,
    column: int,
    tier: int,
    tags: U64Array,
    rows: KernelTuple,
    most: int,
    accounts: U64Array,
) -> int:
    """As `changes.apply_rows`; returns the rejected blocks, or NO_ROOM, with nothing applied.

    `tags` (tiers) and `accounts` (tiers, words) are the cache's, `most` its limit over all tiers.
    """
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
    table: KernelTuple,
    sets: KernelTuple,
    alive: U64Array,
    mixing: U64Array,
    local: U64Array,
    is_closed: bool,
    scratch: KernelTuple,
) -> int:
    """As `search.match_prefix`; `mixing`: u64 (4)."""
    return prefix_search.match_prefix(
        _table(table), _sets(sets), alive, _mixing(mixing), local, is_closed, _scratch(scratch)
    )


@kernel()
def extend_to_lower_tier(
    table: KernelTuple,
    sets: KernelTuple,
    alive: U64Array,
    mixing: U64Array,
    local: U64Array,
    depth: I64Array,
    scratch: KernelTuple,
) -> int:
    """As `search.extend_to_lower_tier`; `mixing`: u64 (4)."""
    return prefix_search.extend_to_lower_tier(
        _table(table), _sets(sets), alive, _mixing(mixing), local, depth, _scratch(scratch)
    )
