"""Kernels of the hashes and of the keys: scalar functions to inline, and thin loops over columns.

Own no rules: what is hashed stands in `indexer/hashing.py`, what a key is in `indexer/keys.py`.
Numba's integers follow C but for one thing: a u64 and a signed integer make a float. So every
constant here is an np.uint64, and what comes from a loop counter is cast.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from indexer.kernels import inlined, kernel

u64 = np.uint64
HALF = u64(32)

U64S = types.Array(types.uint64, 1, "C")
U64S_READ = types.Array(types.uint64, 1, "C", readonly=True, aligned=False)


@inlined
def addend(
    local: np.uint64,
    position: int,
    start: np.uint64,
    step: np.uint64,
    first: np.uint64,
    second: np.uint64,
) -> np.uint64:
    """What the block at a position adds to the sums; the other four are of the `KeySecret`."""
    mixed = (local ^ (start + u64(position) * step)) * first
    return (mixed ^ (mixed >> HALF)) * second


@kernel(types.void(U64S_READ, *(types.uint64,) * 6, U64S))
def running_sums(
    local: NDArray[np.uint64],
    position: np.uint64,
    before: np.uint64,
    start: np.uint64,
    step: np.uint64,
    first: np.uint64,
    second: np.uint64,
    out: NDArray[np.uint64],
) -> None:
    """Sums of addends up to each block; the first stands at `position`, after the sum `before`."""
    total = before
    for i in range(len(local)):
        total += addend(local[i], position + u64(i), start, step, first, second)
        out[i] = total
