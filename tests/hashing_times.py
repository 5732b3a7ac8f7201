"""What the hashes of a prompt cost: from tokens to local hashes, chain and sums of keys.

Called from Python, so that the first column is what a worker or a lookup pays for a whole prompt;
the price of a call is in it, and small against 2048 blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from kvlane.indexer.block_hashes import (
    LOOPBACK_SECRET,
    derive_secret,
    local_hashes,
    prefix_sums,
    sequence_hashes,
)

BLOCKS = 2048
REPEATS = 200
SIZES = (16, 32, 64, 128)


class HashingTimes(NamedTuple):
    """The least of many times, in nanoseconds for one block; `call` is for no block."""

    local: dict[int, float]
    """By block size in tokens, which are given as bytes."""
    listed: dict[int, float]
    """The same from a list of ints."""
    chain: float
    sums: float
    call: float


def hashing_times(repeats: int = REPEATS) -> HashingTimes:
    """Measure; takes about a second."""
    tokens = np.random.default_rng(0).integers(0, 150_000, BLOCKS * max(SIZES), np.uint32)
    local, listed = {}, {}
    for size in SIZES:
        prompt = tokens[: BLOCKS * size]
        as_bytes, as_list = prompt.tobytes(), prompt.tolist()
        local[size] = _least(partial(local_hashes, as_bytes, size), repeats)
        listed[size] = _least(partial(local_hashes, as_list, size), repeats // 10 + 1)
    hashes, secret = local_hashes(tokens, 16)[:BLOCKS], derive_secret(LOOPBACK_SECRET)
    return HashingTimes(
        local,
        listed,
        chain=_least(partial(sequence_hashes, hashes), repeats),
        sums=_least(partial(prefix_sums, hashes, secret), repeats),
        call=BLOCKS * _least(partial(local_hashes, b"", 16), repeats),
    )


def _least(call: Callable[[], object], repeats: int) -> float:
    """Nanoseconds a block."""
    least = 1 << 62
    for _ in range(repeats):
        began = time.perf_counter_ns()
        call()
        least = min(least, time.perf_counter_ns() - began)
    return least / BLOCKS
