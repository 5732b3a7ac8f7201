"""Prefix keys of a prompt, computed on demand: a search (`indexer/blocks/prefix_search.py`) needs
them at few positions. One pass sums up whole groups; a key is the sum before its group plus that of
a part of the group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.blocks.holder_sets import WORD_BITS, ZERO
from kvlane.indexer.events import Tier
from kvlane.indexer.kernels import inlined, kernel
from kvlane.indexer.native.xxh3_kernels import addend

GROUP_BLOCKS = 64
"""Blocks per group: at 64, both the pass over the sums and the filling of a group are short."""
GROUP_SHIFT = 6
TIERS = len(Tier)
KEY_FOR_ZERO = np.uint64(1)
"""Replacement for key 0, which marks an empty slot."""


class KeyConstants(NamedTuple):
    """Constants of the keys, each a u64; see `KeySecret`."""

    start: np.uint64
    step: np.uint64
    first: np.uint64
    second: np.uint64


class SearchScratch(NamedTuple):
    """Memory for one search at a time, of up to n blocks and c columns. `totals`: u64 (n), the sum
    up to each block, where computed. `sums`: u64 (groups + 1), before each group. `points`,
    `spare`: u64 (n + 2), positions with their sets, `position << 32 | set`. `columns`: i64 (c), the
    found ones. `depths`: i64 (c · TIERS), their matched blocks in row-major order; only those of
    the first tier are written. `row`: u64 (words).
    """

    totals: NDArray[np.uint64]
    sums: NDArray[np.uint64]
    points: NDArray[np.uint64]
    spare: NDArray[np.uint64]
    columns: NDArray[np.int64]
    depths: NDArray[np.int64]
    row: NDArray[np.uint64]


def new_scratch(blocks: int, columns: int) -> SearchScratch:
    return SearchScratch(
        np.zeros(blocks, np.uint64),
        np.zeros(blocks // GROUP_BLOCKS + 2, np.uint64),
        np.zeros(blocks + 2, np.uint64),
        np.zeros(blocks + 2, np.uint64),
        np.zeros(columns, np.int64),
        np.zeros(columns * TIERS, np.int64),
        np.zeros(columns // WORD_BITS, np.uint64),
    )


@inlined
def key_at(scratch: SearchScratch, position: int) -> np.uint64:
    """Key of the prefix up to a block whose total is known."""
    total = scratch.totals[position]
    return total if total != ZERO else KEY_FOR_ZERO


@inlined
def first_key(constants: KeyConstants, local: NDArray[np.uint64]) -> np.uint64:
    total = addend(local[0] ^ constants.start, constants.first, constants.second)
    return total if total != ZERO else KEY_FOR_ZERO


@inlined
def sum_of_addends(
    constants: KeyConstants, local: NDArray[np.uint64], start: int, end: int
) -> np.uint64:
    """Sum of the addends of these blocks; a loop over a slice is vectorised."""
    part, total = local[start:end], ZERO
    flip = constants.start + np.uint64(start) * constants.step
    for i in range(len(part)):
        total += addend(part[i] ^ flip, constants.first, constants.second)
        flip += constants.step
    return total


@inlined
def compute_total(
    constants: KeyConstants,
    local: NDArray[np.uint64],
    scratch: SearchScratch,
    position: int,
    known: int,
) -> None:
    """Compute the total of a block: free for the last one of a group. For others from `known`, an
    earlier block whose total is known, or from the start of the group."""
    if position < GROUP_BLOCKS:
        return  # the first group is always filled
    group, start = (position + 1) >> GROUP_SHIFT, position & ~(GROUP_BLOCKS - 1)
    if known >= start:
        total = scratch.totals[known] + sum_of_addends(constants, local, known + 1, position + 1)
    elif group << GROUP_SHIFT == position + 1:
        total = scratch.sums[group]
    else:
        total = scratch.sums[group] + sum_of_addends(constants, local, start, position + 1)
    scratch.totals[position] = total


@kernel()
def fill_group(
    constants: KeyConstants, local: NDArray[np.uint64], scratch: SearchScratch, group: int
) -> None:
    """Compute the totals of a group whose sum is known, and the sum before the next group."""
    start, end = group << GROUP_SHIFT, min((group + 1) << GROUP_SHIFT, len(local))
    part, totals, total = local[start:end], scratch.totals[start:end], scratch.sums[group]
    flip = constants.start + np.uint64(start) * constants.step
    for i in range(len(part)):  # a loop of its own is vectorised: 0.7 instead of 1.1 ns
        totals[i] = addend(part[i] ^ flip, constants.first, constants.second)
        flip += constants.step
    for i in range(len(part)):
        total += totals[i]
        totals[i] = total
    scratch.sums[group + 1] = total
