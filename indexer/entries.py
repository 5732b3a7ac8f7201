"""The kernels that Python calls for every record and every prompt, with arguments it passes fast.

To find out what it was given, numba takes 0.05 us for each array in a plain tuple, 0.2 in a named
one, and 0.8 for a single np.uint64. So these few take plain tuples, and name the parts for others.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from indexer import changes, search
from indexer.changes import BLOCKS, REFUSED
from indexer.events import Rows
from indexer.kernels import inlined, kernel
from indexer.prefixes import Mixing, Scratch
from indexer.sets import Sets
from indexer.table import Table

Words: TypeAlias = NDArray[np.uint64]
Numbers: TypeAlias = NDArray[np.int64]
Parts: TypeAlias = tuple[Any, ...]
"""The fields of a named tuple, in order."""
NO_ROOM = -1


@inlined
def _table(t: Parts) -> Table:
    return Table(t[0], t[1], t[2])


@inlined
def _sets(s: Parts) -> Sets:
    return Sets(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9])


@inlined
def _mixing(m: Words) -> Mixing:
    return Mixing(m[0], m[1], m[2], m[3])


@inlined
def _scratch(s: Parts) -> Scratch:
    return Scratch(s[0], s[1], s[2], s[3], s[4], s[5])


@kernel()
def apply_rows(
    table: Parts,
    sets: Parts,
    column: int,
    tier: int,
    tags: Words,
    rows: Parts,
    most: int,
    accounts: Words,
) -> int:
    """As `changes.apply_rows`; how many blocks were refused, or NO_ROOM, with nothing done.

    `tags` (tiers) and `accounts` (tiers, words) are the cache's, `most` what it may hold in all.
    """
    named = Rows(rows[0], rows[1], rows[2], rows[3], rows[4])
    if not changes.is_roomy(_table(table), _sets(sets), column, len(named.keys)):
        return NO_ROOM
    for other in range(len(accounts)):
        if other != tier:
            most -= np.int64(accounts[other, BLOCKS])
    account = accounts[tier]
    changes.apply_rows(_table(table), _sets(sets), column, tags[tier], named, most, account)
    refused = np.int64(account[REFUSED])
    account[REFUSED] = 0
    return refused


@kernel()
def match(
    table: Parts,
    sets: Parts,
    alive: Words,
    mixing: Words,
    local: Words,
    is_closed: bool,
    scratch: Parts,
) -> int:
    """As `search.match`; `mixing`: u64 (4)."""
    return search.match(
        _table(table), _sets(sets), alive, _mixing(mixing), local, is_closed, _scratch(scratch)
    )


@kernel()
def deepen(
    table: Parts,
    sets: Parts,
    alive: Words,
    mixing: Words,
    local: Words,
    depth: Numbers,
    scratch: Parts,
) -> int:
    """As `search.deepen`; `mixing`: u64 (4)."""
    return search.deepen(
        _table(table), _sets(sets), alive, _mixing(mixing), local, depth, _scratch(scratch)
    )
