"""Block keys: one key for the whole prefix up to a block's end, computed without a hash chain.

    sum_i = Σ_{j ≤ i} M(local_j xor f(j)) mod 2^64        key_i = sum_i, or 1 where that is 0
    f(j) = start + j · step          M(x) = y · second, with y = x · first and y xor (y >> 32)

Addends are independent, unlike the hashes of a chain, which would take nearly all the time of a
deep lookup. The constants are derived from the deployment's hash secret: with known ones collisions
could be constructed. Keys are internal.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.native.xxh3_kernels import prefix_sum_rows
from kvlane.indexer.xxh3 import M64

LOOPBACK_SECRET = b"kvlane on loopback"
"""Default secret of a deployment on one machine; public, so unsafe on a network."""


class KeySecret(NamedTuple):
    """Constants of the keys, each below 2^64; all but `start` and `hash_seed` are odd."""

    start: int
    step: int
    first: int
    second: int
    hash_seed: int
    """Secret seed of local hashes, for deployments whose tenants do not trust each other."""
    fingerprint: str
    """Equal for processes with the same keys; reveals nothing about the secret."""


def derive_secret(secret: bytes) -> KeySecret:
    """Derive the constants from a secret. Raises ValueError for an empty one."""
    if not secret:
        raise ValueError("the hash secret is empty")

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
    local: NDArray[np.uint64], secret: KeySecret, *, position: int = 0, parent_sum: int = 0
) -> NDArray[np.uint64]:
    """Sums up to each block from block `position` on; `parent_sum` is the sum before it. A
    continuation needs the sum, not the key, of its parent: they differ for a sum of 0."""
    sums = np.empty(len(local), np.uint64)
    constants = secret.start, secret.step, secret.first, secret.second
    prefix_sum_rows(np.ascontiguousarray(local), position, parent_sum & M64, *constants, sums)
    return sums


def keys_from_sums(sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Keys of sums: 0 marks an empty slot of the table, so it is replaced by 1."""
    return np.maximum(sums, np.uint64(1))


def prompt_keys(local: NDArray[np.uint64], secret: KeySecret) -> NDArray[np.uint64]:
    """Keys of all blocks of a prompt."""
    return keys_from_sums(prefix_sums(local, secret))
