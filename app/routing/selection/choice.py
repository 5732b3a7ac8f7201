"""Choice of a candidate by costs, the same for all policies, and draws at random.

Randomness is a hash of the request's seed and the place alone, so a decision can be recomputed from
the recorded places, however many others there were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.cost_kernels import Floats, Words
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.indexer.xxh3 import M64

Costs = Floats
INELIGIBLE = math.inf
"""The cost of a candidate that the policy excludes."""
NO_LOADS: Floats = np.empty(0)
"""No usual loads to compare."""


def rank_hashes(places: Sequence[WorkerRank]) -> Words:
    """Hashes of places for random draws, without their epochs."""
    return np.array([_tag(each.worker, each.rank) for each in places], np.uint64)


@lru_cache(maxsize=1 << 14)
def _tag(worker: str, rank: int) -> int:
    digest = blake2b(f"{worker}\0{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def random_u64(seed: int, tags: Words) -> Words:
    """A number below 2^64 for each place, as if drawn at random."""
    drawn = np.empty_like(tags)
    cost_kernels.draw_random(as_u64(seed), tags, drawn)
    return drawn


def as_u64(seed: int) -> Any:
    return np.uint64(seed & M64)


def random_shares(seed: int, tags: Words) -> Floats:
    """Draws as numbers from 0 to 1, without either: 52 bits of `random_u64`."""
    shares: Floats = ((random_u64(seed, tags) >> np.uint64(12)) + 0.5) / 2**52
    return shares


def cost_range(costs: Costs) -> float:
    finite = costs[costs < INELIGIBLE]
    return float(finite.max() - finite.min()) if len(finite) else 0.0


def choose(costs: Costs, tags: Words, seed: int, noise: float = 0.0) -> int | None:
    """The index of the chosen option; None if all are excluded. Without noise the least cost, ties
    by draw. With noise the probability is in proportion to exp(-cost / noise): the least cost after
    subtracting Gumbel noise, one draw an option.
    """
    if noise > 0:
        shares = random_shares(seed, tags).tolist()
        costs = costs + np.array([noise * math.log(-math.log(share)) for share in shares])
    chosen: int = cost_kernels.argmin(costs, NO_LOADS, as_u64(seed), tags)
    return chosen if chosen >= 0 else None


def apply_affinity(own: int, chosen: int, costs: Costs, slack: float) -> int:
    """The option to take when `chosen` is the policy's choice and `own` that of the session."""
    return own if slack == math.inf or costs[own] <= min(costs) + slack else chosen
