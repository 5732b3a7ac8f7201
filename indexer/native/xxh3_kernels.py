"""XXH3 and block key kernels: inlined scalar functions, and thin loops.

The formats are in `indexer/block_hashes.py` and `indexer/xxh3.py`, whose names these functions
share. Inputs are u32 words, little endian: lengths are multiples of 4 bytes. In numba a u64 and a
signed integer make a float, so constants and counters are np.uint64. Constant lengths unroll the
loop within a block; 16 tokens are hashed eight blocks at once (`hash_eight_rows`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import types
from numpy.typing import NDArray

from kvlane.indexer import xxh3
from kvlane.indexer.kernels import inlined, kernel
from kvlane.indexer.native.simd import (
    add_lanes,
    add_pairs,
    broadcast,
    fold_neighbours,
    fold_pairs,
    load_simd,
    mul_fold,
    mul_halves,
    mul_lanes,
    shift_right,
    store_simd,
    swap_neighbours,
    xor_lanes,
)

u64 = np.uint64
ZERO, ONE, TWO, FOUR, EIGHT, NINE = u64(0), u64(1), u64(2), u64(4), u64(8), u64(9)
HALF_BITS, LOW_MASK = u64(32), u64(xxh3.M32)
P32_1, P64_1 = u64(xxh3.P32_1), u64(xxh3.P64_1)
MIX_1, MIX_2 = u64(xxh3.MIX_1), u64(xxh3.MIX_2)
SECRET = np.array(xxh3.SECRET_WORDS, np.uint64)
FIRST_SUMS = np.array(xxh3.FIRST_SUMS, np.uint64)

KEYS_OF_16 = SECRET[[0, 8, 32, 40, 48, 56, 16, 24]]
SIGNS_OF_16 = np.array([1, xxh3.M64] * 4, np.uint64)
"""Keys for 16 tokens, in their order: the secret, plus and minus the seed."""
STRIPE = u64(16)
"""Words per step of the long form."""
STRIPES_PER_BLOCK = u64(xxh3.STRIPES_PER_BLOCK)
SCRAMBLE_KEYS, LAST_KEYS, FINAL_KEYS, KEYS = u64(16), u64(24), u64(32), 40
"""Offsets in the result of `seeded_secret`."""

TOKENS = types.Array(types.uint32, 1, "C", readonly=True, aligned=False)
HASHES = types.Array(types.uint64, 1, "C", readonly=True, aligned=False)
RESULTS = types.Array(types.uint64, 1, "C")
Words32: TypeAlias = NDArray[np.uint32]
Column: TypeAlias = NDArray[np.uint64]
Word: TypeAlias = Any
"""A u64 inside kernels; callers pass any int from 0 to 2^64 - 1."""


# --- XXH3 of a row of words -----------------------------------------------------------------------


@inlined
def load_word(tokens: Words32, at: Word) -> Word:
    """Two words as one u64: a single load."""
    return u64(tokens[at]) | (u64(tokens[at + ONE]) << HALF_BITS)


@inlined
def avalanche(h: Word) -> Word:
    """Final mix: every bit depends on every other."""
    h ^= h >> u64(37)
    h *= MIX_1
    return h ^ (h >> HALF_BITS)


@inlined
def rotate_left(h: Word, bits: Word) -> Word:
    return (h << bits) | (h >> (u64(64) - bits))


@inlined
def reverse_bytes(h: Word) -> Word:
    """Reverse the bytes; LLVM emits one instruction."""
    h = ((h & u64(0x00FF00FF00FF00FF)) << u64(8)) | ((h >> u64(8)) & u64(0x00FF00FF00FF00FF))
    h = ((h & u64(0x0000FFFF0000FFFF)) << u64(16)) | ((h >> u64(16)) & u64(0x0000FFFF0000FFFF))
    return (h << HALF_BITS) | (h >> HALF_BITS)


@inlined
def mix(tokens: Words32, at: Word, secret: Word, seed: Word) -> Word:
    """Mix 16 bytes of a row with 16 bytes of the secret."""
    low = load_word(tokens, at) ^ (SECRET[secret] + seed)
    high = load_word(tokens, at + TWO) ^ (SECRET[secret + u64(8)] - seed)
    return mul_fold(low, high)


@inlined
def upto_8(tokens: Words32, at: Word, size: Word, seed: Word) -> Word:
    """One or two words."""
    flip = (SECRET[8] ^ SECRET[16]) - (seed ^ (reverse_bytes(seed & LOW_MASK)))
    h = (u64(tokens[at + size - ONE]) + (u64(tokens[at]) << HALF_BITS)) ^ flip
    h ^= rotate_left(h, u64(49)) ^ rotate_left(h, u64(24))
    h *= MIX_2
    h ^= (h >> u64(35)) + FOUR * size
    h *= MIX_2
    return h ^ (h >> u64(28))


@inlined
def upto_16(low: Word, high: Word, length: Word, seed: Word) -> Word:
    """9 to 16 bytes, given as the first and the last eight of them."""
    low ^= (SECRET[24] ^ SECRET[32]) + seed
    high ^= (SECRET[40] ^ SECRET[48]) - seed
    return avalanche(length + reverse_bytes(low) + high + mul_fold(low, high))


@inlined
def upto_128(tokens: Words32, at: Word, size: Word, seed: Word) -> Word:
    """5 to 32 words."""
    total = FOUR * size * P64_1
    for i in range((size - ONE) // u64(8) + ONE):
        from_end = at + size - FOUR * (i + ONE)
        total += mix(tokens, at + FOUR * i, u64(32) * i, seed)
        total += mix(tokens, from_end, u64(32) * i + u64(16), seed)
    return avalanche(total)


@inlined
def mix_two_rows(tokens: Words32, at: Word, stride: Word, keys: Any) -> Any:
    """The four `mix` results of each of two rows of 16 words, interleaved."""
    first = xor_lanes(load_simd(tokens, at), keys)
    return fold_neighbours(first, xor_lanes(load_simd(tokens, at + stride), keys))


@inlined
def mix_four_rows(tokens: Words32, at: Word, stride: Word, keys: Any) -> Any:
    """Partial sums of four rows: first and second halves of two rows, then of the next two."""
    return add_pairs(
        mix_two_rows(tokens, at, stride, keys),
        mix_two_rows(tokens, at + TWO * stride, stride, keys),
    )


@inlined
def hash_eight_rows(tokens: Words32, at: Word, stride: Word, keys: Any) -> Any:
    """`upto_128` of eight rows of 16 words, one per SIMD lane."""
    sums = add_pairs(
        mix_four_rows(tokens, at, stride, keys),
        mix_four_rows(tokens, at + FOUR * stride, stride, keys),
    )
    sums = add_lanes(sums, broadcast(u64(64) * P64_1))
    sums = xor_lanes(sums, shift_right(sums, broadcast(u64(37))))
    sums = mul_lanes(sums, broadcast(MIX_1))
    return xor_lanes(sums, shift_right(sums, broadcast(HALF_BITS)))


@inlined
def upto_240(tokens: Words32, at: Word, size: Word, seed: Word) -> Word:
    """33 to 60 words."""
    total = FOUR * size * P64_1
    for i in range(u64(8)):
        total += mix(tokens, at + FOUR * i, u64(16) * i, seed)
    total = avalanche(total)
    for i in range(u64(8), size // FOUR):
        total += mix(tokens, at + FOUR * i, u64(16) * (i - u64(8)) + u64(3), seed)
    return avalanche(total + mix(tokens, at + size - FOUR, u64(119), seed))


@inlined
def hash_short(tokens: Words32, at: Word, size: Word, seed: Word) -> Word:
    """1 to 60 words."""
    if size <= TWO:
        return upto_8(tokens, at, size, seed)
    if size <= FOUR:
        return upto_16(load_word(tokens, at), load_word(tokens, at + size - TWO), FOUR * size, seed)
    if size <= u64(32):
        return upto_128(tokens, at, size, seed)
    return upto_240(tokens, at, size, seed)


@kernel(RESULTS(types.uint64), allocates=True)
def seeded_secret(seed: Word) -> Column:
    """The seeded secret of long rows: 24 u64, and two unaligned copies of eight of them. The i-th
    stripe of a block uses eight words from word i on, the last stripe of a row those from byte 121
    on. Scrambling uses the last eight, the final merge those from byte 11 on.
    """
    keys = np.empty(KEYS, np.uint64)
    for i in range(12):
        keys[2 * i] = SECRET[16 * i] + seed
        keys[2 * i + 1] = SECRET[16 * i + 8] - seed
    for i in range(8):
        keys[24 + i] = (keys[15 + i] >> u64(8)) | (keys[16 + i] << u64(56))
        keys[32 + i] = (keys[1 + i] >> u64(24)) | (keys[2 + i] << u64(40))
    return keys


@inlined
def accumulate_stripe(sums: Any, tokens: Words32, at: Word, keys: Column, key: Word) -> Any:
    """Accumulate one stripe: eight u64 at once."""
    data = load_simd(tokens, at)
    products = mul_halves(xor_lanes(data, load_simd(keys, key)))
    return add_lanes(add_lanes(sums, swap_neighbours(data)), products)


@inlined
def hash_long(tokens: Words32, at: Word, size: Word, keys: Column) -> Word:
    """More than 60 words; `keys`: the seeded secret."""
    sums = load_simd(FIRST_SUMS, ZERO)
    for stripe in range((size - ONE) // STRIPE):
        within = stripe % STRIPES_PER_BLOCK
        sums = accumulate_stripe(sums, tokens, at + STRIPE * stripe, keys, within)
        if within == STRIPES_PER_BLOCK - ONE:
            sums = xor_lanes(sums, shift_right(sums, broadcast(u64(47))))
            sums = xor_lanes(sums, load_simd(keys, SCRAMBLE_KEYS))
            sums = mul_lanes(sums, broadcast(P32_1))
    sums = accumulate_stripe(sums, tokens, at + size - STRIPE, keys, LAST_KEYS)
    total = FOUR * size * P64_1 + fold_pairs(xor_lanes(sums, load_simd(keys, FINAL_KEYS)))
    return avalanche(total)


@inlined
def hash_rows_of_16(tokens: Words32, stride: Word, seed: Word, out: Column) -> None:
    """Eight rows in vector units, and a ninth in the scalar units, which are idle meanwhile."""
    signs = mul_lanes(load_simd(SIGNS_OF_16, ZERO), broadcast(seed))
    keys = add_lanes(load_simd(KEYS_OF_16, ZERO), signs)
    rows = u64(len(out))
    nines = rows // NINE * NINE
    for i in range(ZERO, nines, NINE):
        store_simd(out, i, hash_eight_rows(tokens, i * stride, stride, keys))
        out[i + EIGHT] = upto_128(tokens, (i + EIGHT) * stride, u64(16), seed)
    for i in range(nines, rows):
        out[i] = upto_128(tokens, i * stride, u64(16), seed)


@kernel(types.void(TOKENS, types.uint64, types.uint64, types.uint64, RESULTS), allocates=True)
def hash_rows(tokens: Words32, size: Word, stride: Word, seed: Word, out: Column) -> None:
    """XXH3-64 of rows of `size` words; row i starts at word i · stride."""
    rows = u64(len(out))
    if size == u64(16):
        hash_rows_of_16(tokens, stride, seed, out)
    elif size == u64(32):
        for i in range(rows):
            out[i] = upto_128(tokens, i * stride, u64(32), seed)
    elif size > u64(60):
        keys = seeded_secret(seed)
        for i in range(rows):
            out[i] = hash_long(tokens, i * stride, size, keys)
    else:
        for i in range(rows):
            out[i] = hash_short(tokens, i * stride, size, seed)


# --- chains and sums ------------------------------------------------------------------------------


@kernel(types.void(HASHES, types.uint64, RESULTS))
def chain_hashes(local: Column, seed: Word, out: Column) -> None:
    """Sequence hashes of local hashes."""
    last = ZERO
    for i in range(len(local)):
        last = upto_16(last, local[i], u64(16), seed) if i else local[i]
        out[i] = last


@inlined
def addend(flipped: Word, first: Word, second: Word) -> Word:
    """Addend M(x) of a block; `flipped` is x: its local hash xor f of its position."""
    product = flipped * first
    return (product ^ (product >> HALF_BITS)) * second


@kernel(types.void(HASHES, *(types.uint64,) * 6, RESULTS))
def prefix_sum_rows(
    local: Column,
    position: Word,
    before: Word,
    start: Word,
    step: Word,
    first: Word,
    second: Word,
    out: Column,
) -> None:
    """Sums of addends up to each block; the first is at `position`, after the sum `before`."""
    total, flip = before, start + position * step
    for i in range(len(local)):
        total += addend(local[i] ^ flip, first, second)
        flip += step
        out[i] = total
