"""Block hashes and block keys.

Hashes of the content of a block (*local*), and of the prefix up to it (*sequence*), are
bit-compatible with NVIDIA Dynamo, so that its tools, vectors and clients can be used. With H(b, s)
the XXH3-64 hash of bytes b with seed s:

- only whole blocks are hashed: len // block_size of them; a tail is dropped
- local_i = H(the block's tokens as u32, then its multimodal hashes as u64, ascending; seed), all
  little endian
- seed = 1337 + H(LoRA name, 0) if there is one + H(cache salt, 1) if there is one, mod 2^64
- sequence_0 = local_0, sequence_i = H(sequence_{i-1}, local_i as u64; 1337): chained, without salt

The index looks up keys, one for the whole prefix up to a block's end, which need no chain:

    sum_i = Σ_{j ≤ i} M(local_j xor f(j)) mod 2^64        key_i = sum_i, or 1 where that is 0
    f(j) = start + j · step          M(x) = y · second, with y = x · first and y xor (y >> 32)

Their constants are derived from the deployment's hash secret: with known ones collisions could be
constructed. Keys are internal.
"""

from __future__ import annotations

import string
from array import array
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.native.xxh3_kernels import chain_hashes, hash_rows, prefix_sum_rows
from kvlane.indexer.xxh3 import M64, xxh3

BASE_SEED = 1337
U32 = np.dtype("<u4")
_HEX = frozenset(string.hexdigits)

Tokens: TypeAlias = Sequence[int] | bytes | bytearray | memoryview | NDArray[np.integer]
"""Token ids: integers below 2^32, in a list or array of any kind, or u32 bytes, little endian."""


class BlockHashes(NamedTuple):
    """Hashes of a prompt: one u64 for each whole block."""

    local: NDArray[np.uint64]
    sequence: NDArray[np.uint64]


def hash_blocks(
    tokens: Tokens,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_hashes: Sequence[Collection[int] | None] | None = None,
    seed: int = BASE_SEED,
) -> BlockHashes:
    """Local and sequence hashes of a prompt's whole blocks.

    Args:
        tokens: token ids, 0 to 2^32 - 1: a list, an array, or their bytes as little-endian u32.
        block_size: tokens per block; a last block that is not full is left out.
        lora_name, cache_salt: prompts that differ in one of these share no hash.
        mm_hashes: for each block the u64 hashes of the multimodal objects in it; blocks beyond
            the list have none.
        seed: start value, the same for all that compare hashes.

    Raises ValueError for tokens out of range or a block size below 1.

    Example:
        hash_blocks(range(40), 16).sequence    # array of two u64: 40 tokens are 2.5 blocks
    """
    local = local_hashes(
        tokens, block_size, lora_name=lora_name, cache_salt=cache_salt, mm_hashes=mm_hashes,
        seed=seed,
    )  # fmt: skip
    return BlockHashes(local, sequence_hashes(local, seed=seed))


def local_hashes(
    tokens: Tokens,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_hashes: Sequence[Collection[int] | None] | None = None,
    seed: int = BASE_SEED,
) -> NDArray[np.uint64]:
    """Only the local hashes; see `hash_blocks`."""
    column = token_array(tokens)
    seed = block_seed(lora_name, cache_salt, seed)
    hashes = np.empty(block_count(len(column), block_size), np.uint64)
    hash_rows(column, block_size, block_size, seed, hashes)
    for i, objects in enumerate((mm_hashes or ())[: len(hashes)]):
        if objects:
            row = column[i * block_size :][:block_size].tobytes()
            row += np.array(sorted(set(objects)), "<u8").tobytes()
            hash_rows(np.frombuffer(row, U32), len(row) // 4, 0, seed, hashes[i : i + 1])
    return hashes


def sequence_hashes(local: NDArray[np.uint64], *, seed: int = BASE_SEED) -> NDArray[np.uint64]:
    chained = np.empty(len(local), np.uint64)
    chain_hashes(np.ascontiguousarray(local), seed & M64, chained)
    return chained


def block_seed(lora_name: str = "", cache_salt: str = "", seed: int = BASE_SEED) -> int:
    """Seed of local hashes; an empty LoRA name or salt is ignored."""
    if lora_name:
        seed += xxh3(lora_name.encode(), 0)
    if cache_salt:
        seed += xxh3(cache_salt.encode(), 1)
    return seed & M64


def multimodal_hash(identifier: str) -> int | None:
    """Hash of a multimodal object by its identifier; None for an empty identifier. 64 hexadecimal
    digits are a digest already: the first 16 are the hash."""
    if not identifier:
        return None
    if len(identifier) == 64 and _HEX.issuperset(identifier):
        return int(identifier[:16], 16)
    return xxh3(identifier.encode(), 0)


def token_array(tokens: Tokens) -> NDArray[np.uint32]:
    """Token ids as a u32 array; a view where possible. Raises ValueError."""
    if isinstance(tokens, bytes | bytearray | memoryview):
        if len(tokens) % 4:
            raise ValueError(f"token ids have {len(tokens)} bytes: not a multiple of 4")
        return np.frombuffer(tokens, U32)
    if isinstance(tokens, list | tuple | range):
        try:
            return np.frombuffer(array("I", tokens), U32)
        except (TypeError, OverflowError) as e:
            raise ValueError(f"token ids must be integers from 0 to 2^32 - 1: {e}") from e
    column = np.asarray(tokens)
    if column.ndim != 1 or (column.dtype.kind not in "iu" and column.size):
        raise ValueError("token ids must be a one-dimensional array of integers")
    if column.dtype != U32:
        if column.size and (int(column.min()) < 0 or int(column.max()) > 0xFFFFFFFF):
            raise ValueError("token ids must be from 0 to 2^32 - 1")
        column = column.astype(U32)
    return np.ascontiguousarray(column)


def block_count(tokens: int, block_size: int) -> int:
    """Number of whole blocks of a prompt. Raises ValueError."""
    if block_size < 1:
        raise ValueError(f"block size {block_size} must be at least 1")
    return tokens // block_size


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
    """Sums up to each block from block `position` on; `parent_sum` is the sum before it, which
    differs from the key of the parent if it is 0."""
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
