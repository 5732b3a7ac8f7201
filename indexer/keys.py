"""What the index looks up: one key for the whole prefix up to a block's end, without a chain.

    sum_i = Σ_{j ≤ i} M(local_j xor f(j)) mod 2^64        key_i = sum_i, or 1 where that is 0
    f(j) = start + j · step          M(x) = y · second, with y = x · first and y xor (y >> 32)

Sums instead of a chain of hashes, because every addend can be computed by itself: a chain costs
4-5 ns a block one after the other, and was nearly all of the time of a deep lookup. The constants
are secret, derived from the deployment's hash secret, because sums with known constants could be
made to collide on purpose. A key says nothing to other systems; see `indexer/hashing.py`.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexer.hash_kernels import running_sums
from indexer.xxh3 import M64

LOOPBACK_SECRET = b"kvlane on loopback"
"""The secret of a deployment without one: known to everybody, so for one's own machine only."""


class KeySecret(NamedTuple):
    """The constants of the keys, each below 2^64; all but `start` and `hash_seed` are odd."""

    start: int
    step: int
    first: int
    second: int
    hash_seed: int
    """Seed of local hashes where tenants do not trust each other, instead of the public one."""
    fingerprint: str
    """Equal for processes whose keys agree; tells nothing about the secret."""


def derive(secret: bytes) -> KeySecret:
    """The constants of a secret. Raises ValueError for an empty one."""
    if not secret:
        raise ValueError("an empty hash secret")

    def draw(name: str) -> int:
        digest = blake2b(name.encode(), key=blake2b(secret).digest(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    return KeySecret(
        start=draw("start"),
        step=draw("step") | 1,
        first=draw("first") | 1,
        second=draw("second") | 1,
        hash_seed=draw("hash seed"),
        fingerprint=f"{draw('fingerprint'):016x}",
    )


def prefix_sums(
    local: NDArray[np.uint64], secret: KeySecret, *, position: int = 0, before: int = 0
) -> NDArray[np.uint64]:
    """Sums up to each block; `local` begins at block `position`, `before` is the sum up to there.

    A continuation takes the sum, not the key, of what it continues: they differ where it is 0.
    """
    sums = np.empty(len(local), np.uint64)
    constants = secret.start, secret.step, secret.first, secret.second
    running_sums(np.ascontiguousarray(local), position, before & M64, *constants, sums)
    return sums


def keys_of(sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The keys of sums: 0 means an empty place in the index, so 1 stands for it."""
    return np.maximum(sums, np.uint64(1))


def prompt_keys(local: NDArray[np.uint64], secret: KeySecret) -> NDArray[np.uint64]:
    """The keys of a prompt's blocks, from its first one on."""
    return keys_of(prefix_sums(local, secret))
