"""The keys of a prompt's prefixes, computed where they are asked for.

A key is a sum over the blocks up to its own (`indexer/keys.py`). A search needs it at few places of
a long prompt: one pass computes the sums of whole groups, and a key is then the sum before its
group and that of a part of it.

Owns the memory of a search (`Scratch`). Where to look is `search.py`'s to say.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexer.hash_kernels import mixed
from indexer.kernels import inlined, kernel
from indexer.sets import NOTHING, WORD_BITS

GROUP = 64
"""Blocks of a group: at 64 both the pass over the sums and the filling of a group stay short."""
GROUP_SHIFT = 6
NO_SLOT = np.uint64(1)
"""What key 0 is replaced by: an empty slot looks like 0."""


class Mixing(NamedTuple):
    """The constants of the keys, each a u64; see `KeySecret`."""

    start: np.uint64
    step: np.uint64
    first: np.uint64
    second: np.uint64


class Scratch(NamedTuple):
    """Memory for one search at a time, of up to n blocks and c columns.

    `totals`: u64 (n), the sum up to each block, where it was asked for. `sums`: u64 (groups + 1),
    the sum before each group. `points`, `spare`: u64 (n + 2), positions with their sets,
    `position << 32 | set`. `out`: u64 (c), `column << 32 | depth`. `row`: u64 (words).
    """

    totals: NDArray[np.uint64]
    sums: NDArray[np.uint64]
    points: NDArray[np.uint64]
    spare: NDArray[np.uint64]
    out: NDArray[np.uint64]
    row: NDArray[np.uint64]


def new_scratch(blocks: int, columns: int) -> Scratch:
    """Room for prompts of so many blocks."""
    sizes = blocks, blocks // GROUP + 2, blocks + 2, blocks + 2, columns, columns // WORD_BITS
    return Scratch(*(np.zeros(size, np.uint64) for size in sizes))


@inlined
def key_at(scratch: Scratch, position: int) -> np.uint64:
    """The key of the prefix up to a block whose total is known."""
    total = scratch.totals[position]
    return total if total != NOTHING else NO_SLOT


@inlined
def added(mixing: Mixing, local: NDArray[np.uint64], start: int, end: int) -> np.uint64:
    """What these blocks add: 0.2 ns each, as the compiler makes vectors of a loop over a slice."""
    part, total = local[start:end], NOTHING
    flip = mixing.start + np.uint64(start) * mixing.step
    for i in range(len(part)):
        total += mixed(part[i] ^ flip, mixing.first, mixing.second)
        flip += mixing.step
    return total


@inlined
def find_total(
    mixing: Mixing, local: NDArray[np.uint64], scratch: Scratch, position: int, known: int
) -> None:
    """Compute the total of a block: free for the last one of a group.

    For others from a block before it whose total is known, or from the start of the group.
    """
    if position < GROUP:
        return  # the first group is always filled
    group, start = (position + 1) >> GROUP_SHIFT, position & ~(GROUP - 1)
    if known >= start:
        total = scratch.totals[known] + added(mixing, local, known + 1, position + 1)
    elif group << GROUP_SHIFT == position + 1:
        total = scratch.sums[group]
    else:
        total = scratch.sums[group] + added(mixing, local, start, position + 1)
    scratch.totals[position] = total


@kernel()
def fill(mixing: Mixing, local: NDArray[np.uint64], scratch: Scratch, group: int) -> None:
    """Compute the totals of a group, whose sum is known, and the sum of the next one."""
    start, end = group << GROUP_SHIFT, min((group + 1) << GROUP_SHIFT, len(local))
    part, totals, total = local[start:end], scratch.totals[start:end], scratch.sums[group]
    flip = mixing.start + np.uint64(start) * mixing.step
    for i in range(len(part)):  # by itself, so that it is done in vectors: 0.7 instead of 1.1 ns
        totals[i] = mixed(part[i] ^ flip, mixing.first, mixing.second)
        flip += mixing.step
    for i in range(len(part)):
        total += totals[i]
        totals[i] = total
    scratch.sums[group + 1] = total
