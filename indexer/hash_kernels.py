"""Kernels of hashes and keys: scalar functions that vanish in their callers, and thin loops.

Own no rules: what is hashed stands in `indexer/hashing.py`, what a key is in `indexer/keys.py`, the
format of XXH3 in `indexer/xxh3.py`, whose names these functions share. Inputs are u32 words, so
lengths are multiples of 4 bytes, read little endian.

Numba's integers follow C but for one thing: a u64 and a signed integer make a float. So constants
here are np.uint64, and so is what counts. An unsigned index costs no check for negative ones, too.

What helps are constant lengths, which unroll the loop within a block (32 tokens: 5.9 instead of
8.1 ns a block), and for 16 tokens eight blocks at once (see `eight_of_16`). Interleaving scalar
blocks by hand does not: processors overlap those of a plain loop as well.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import types
from numpy.typing import NDArray

from indexer import xxh3
from indexer.kernels import inlined, kernel
from indexer.lanes import (
    added,
    everywhere,
    folded,
    halves_multiplied,
    load_lanes,
    multiplied,
    neighbours_folded,
    pairs_added,
    pairs_folded,
    shifted_right,
    store_lanes,
    swapped,
    xored,
)

u64 = np.uint64
ZERO, ONE, TWO, FOUR, EIGHT, NINE = u64(0), u64(1), u64(2), u64(4), u64(8), u64(9)
HALF, LOW = u64(32), u64(xxh3.M32)
P32_1, P64_1 = u64(xxh3.P32_1), u64(xxh3.P64_1)
MIX_1, MIX_2 = u64(xxh3.MIX_1), u64(xxh3.MIX_2)
SECRET = np.array(xxh3.SECRET_WORDS, np.uint64)
FIRST_SUMS = np.array(xxh3.FIRST_SUMS, np.uint64)

KEYS_OF_16 = SECRET[[0, 8, 32, 40, 48, 56, 16, 24]]
SIGNS_OF_16 = np.array([1, xxh3.M64] * 4, np.uint64)
"""What 16 tokens are mixed with, in their order: the secret, plus and minus the seed."""
STRIPE = u64(16)
"""Words that the long form takes in at once."""
STRIPES_PER_BLOCK = u64(xxh3.STRIPES_PER_BLOCK)
SCRAMBLE_KEYS, LAST_KEYS, FINAL_KEYS, KEYS = u64(16), u64(24), u64(32), 40
"""Places in the seeded secret, see there."""

TOKENS = types.Array(types.uint32, 1, "C", readonly=True, aligned=False)
HASHES = types.Array(types.uint64, 1, "C", readonly=True, aligned=False)
RESULTS = types.Array(types.uint64, 1, "C")
Words: TypeAlias = NDArray[np.uint32]
Column: TypeAlias = NDArray[np.uint64]
Word: TypeAlias = Any
"""A u64 within kernels; from outside, any int from 0 to 2^64 - 1."""


# --- XXH3 of a row of words -----------------------------------------------------------------------


@inlined
def word(tokens: Words, at: Word) -> Word:
    """Two words as one u64: a single load."""
    return u64(tokens[at]) | (u64(tokens[at + ONE]) << HALF)


@inlined
def avalanche(h: Word) -> Word:
    """Let every bit depend on every other."""
    h ^= h >> u64(37)
    h *= MIX_1
    return h ^ (h >> HALF)


@inlined
def rotated(h: Word, bits: Word) -> Word:
    """Rotated to the left."""
    return (h << bits) | (h >> (u64(64) - bits))


@inlined
def bytes_reversed(h: Word) -> Word:
    """LLVM makes one instruction of it."""
    h = ((h & u64(0x00FF00FF00FF00FF)) << u64(8)) | ((h >> u64(8)) & u64(0x00FF00FF00FF00FF))
    h = ((h & u64(0x0000FFFF0000FFFF)) << u64(16)) | ((h >> u64(16)) & u64(0x0000FFFF0000FFFF))
    return (h << HALF) | (h >> HALF)


@inlined
def mix(tokens: Words, at: Word, secret: Word, seed: Word) -> Word:
    """16 bytes of a row against 16 bytes of the secret."""
    low = word(tokens, at) ^ (SECRET[secret] + seed)
    high = word(tokens, at + TWO) ^ (SECRET[secret + u64(8)] - seed)
    return folded(low, high)


@inlined
def upto_8(tokens: Words, at: Word, size: Word, seed: Word) -> Word:
    """One or two words."""
    flip = (SECRET[8] ^ SECRET[16]) - (seed ^ (bytes_reversed(seed & LOW)))
    h = (u64(tokens[at + size - ONE]) + (u64(tokens[at]) << HALF)) ^ flip
    h ^= rotated(h, u64(49)) ^ rotated(h, u64(24))
    h *= MIX_2
    h ^= (h >> u64(35)) + FOUR * size
    h *= MIX_2
    return h ^ (h >> u64(28))


@inlined
def of_16(low: Word, high: Word, length: Word, seed: Word) -> Word:
    """9 to 16 bytes, given as their first and their last eight."""
    low ^= (SECRET[24] ^ SECRET[32]) + seed
    high ^= (SECRET[40] ^ SECRET[48]) - seed
    return avalanche(length + bytes_reversed(low) + high + folded(low, high))


@inlined
def upto_128(tokens: Words, at: Word, size: Word, seed: Word) -> Word:
    """5 to 32 words."""
    total = FOUR * size * P64_1
    for i in range((size - ONE) // u64(8) + ONE):
        from_end = at + size - FOUR * (i + ONE)
        total += mix(tokens, at + FOUR * i, u64(32) * i, seed)
        total += mix(tokens, from_end, u64(32) * i + u64(16), seed)
    return avalanche(total)


@inlined
def two_of_16(tokens: Words, at: Word, stride: Word, keys: Any) -> Any:
    """The four `mix` each of two rows of 16 words, in turns."""
    first = xored(load_lanes(tokens, at), keys)
    return neighbours_folded(first, xored(load_lanes(tokens, at + stride), keys))


@inlined
def four_of_16(tokens: Words, at: Word, stride: Word, keys: Any) -> Any:
    """Their halves of sums: the first two rows' first and second halves, then the next two's."""
    return pairs_added(
        two_of_16(tokens, at, stride, keys), two_of_16(tokens, at + TWO * stride, stride, keys)
    )


@inlined
def eight_of_16(tokens: Words, at: Word, stride: Word, keys: Any) -> Any:
    """`upto_128` of eight rows of 16 words, in eight lanes: 2.0 instead of 3.0 ns a row."""
    sums = pairs_added(
        four_of_16(tokens, at, stride, keys), four_of_16(tokens, at + FOUR * stride, stride, keys)
    )
    sums = added(sums, everywhere(u64(64) * P64_1))
    sums = xored(sums, shifted_right(sums, everywhere(u64(37))))
    sums = multiplied(sums, everywhere(MIX_1))
    return xored(sums, shifted_right(sums, everywhere(HALF)))


@inlined
def from_129(tokens: Words, at: Word, size: Word, seed: Word) -> Word:
    """33 to 60 words."""
    total = FOUR * size * P64_1
    for i in range(u64(8)):
        total += mix(tokens, at + FOUR * i, u64(16) * i, seed)
    total = avalanche(total)
    for i in range(u64(8), size // FOUR):
        total += mix(tokens, at + FOUR * i, u64(16) * (i - u64(8)) + u64(3), seed)
    return avalanche(total + mix(tokens, at + size - FOUR, u64(119), seed))


@inlined
def upto_240(tokens: Words, at: Word, size: Word, seed: Word) -> Word:
    """Any row that is not long."""
    if size <= TWO:
        return upto_8(tokens, at, size, seed)
    if size <= FOUR:
        return of_16(word(tokens, at), word(tokens, at + size - TWO), FOUR * size, seed)
    if size <= u64(32):
        return upto_128(tokens, at, size, seed)
    return from_129(tokens, at, size, seed)


@kernel(RESULTS(types.uint64), allocates=True)
def seeded_secret(seed: Word) -> Column:
    """The secret as long rows use it, 24 u64, and twice eight more, as it reads from bytes on.

    Of the stripes of a block, the i-th uses eight words from word i on, and the last of a row those
    from byte 121 on. Scrambling uses the last eight, the final merge those from byte 11 on.
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
def taken_in(sums: Any, tokens: Words, at: Word, keys: Column, key: Word) -> Any:
    """The sums with one more stripe: eight u64 at once."""
    data = load_lanes(tokens, at)
    products = halves_multiplied(xored(data, load_lanes(keys, key)))
    return added(added(sums, swapped(data)), products)


@inlined
def longer(tokens: Words, at: Word, size: Word, keys: Column) -> Word:
    """More than 60 words; `keys` is the seeded secret."""
    sums = load_lanes(FIRST_SUMS, ZERO)
    for stripe in range((size - ONE) // STRIPE):
        within = stripe % STRIPES_PER_BLOCK
        sums = taken_in(sums, tokens, at + STRIPE * stripe, keys, within)
        if within == STRIPES_PER_BLOCK - ONE:
            sums = xored(sums, shifted_right(sums, everywhere(u64(47))))
            sums = xored(sums, load_lanes(keys, SCRAMBLE_KEYS))
            sums = multiplied(sums, everywhere(P32_1))
    sums = taken_in(sums, tokens, at + size - STRIPE, keys, LAST_KEYS)
    total = FOUR * size * P64_1 + pairs_folded(xored(sums, load_lanes(keys, FINAL_KEYS)))
    return avalanche(total)


@inlined
def rows_of_16(tokens: Words, stride: Word, seed: Word, out: Column) -> None:
    """Eight rows in vector units, and one beside them in scalar ones, which have nothing to do.

    1.8 ns a row, of 64 rows 1.9; without the ninth 2.0; with two of them 1.7, but 2.0 of 64 rows,
    which are seven nines and one; scalar ones alone take 3.0. With AVX2 alone it takes 2.2, with
    SSE2 alone 4.2.
    """
    signs = multiplied(load_lanes(SIGNS_OF_16, ZERO), everywhere(seed))
    keys = added(load_lanes(KEYS_OF_16, ZERO), signs)
    rows = u64(len(out))
    nines = rows // NINE * NINE
    for i in range(ZERO, nines, NINE):
        store_lanes(out, i, eight_of_16(tokens, i * stride, stride, keys))
        out[i + EIGHT] = upto_128(tokens, (i + EIGHT) * stride, u64(16), seed)
    for i in range(nines, rows):
        out[i] = upto_128(tokens, i * stride, u64(16), seed)


@kernel(types.void(TOKENS, types.uint64, types.uint64, types.uint64, RESULTS), allocates=True)
def hash_rows(tokens: Words, size: Word, stride: Word, seed: Word, out: Column) -> None:
    """XXH3-64 of rows of `size` words, the i-th of which begins at word i · stride."""
    rows = u64(len(out))
    if size == u64(16):
        rows_of_16(tokens, stride, seed, out)
    elif size == u64(32):
        for i in range(rows):
            out[i] = upto_128(tokens, i * stride, u64(32), seed)
    elif size > u64(60):
        keys = seeded_secret(seed)
        for i in range(rows):
            out[i] = longer(tokens, i * stride, size, keys)
    else:
        for i in range(rows):
            out[i] = upto_240(tokens, i * stride, size, seed)


# --- chains and sums ------------------------------------------------------------------------------


@kernel(types.void(HASHES, types.uint64, RESULTS))
def chain(local: Column, seed: Word, out: Column) -> None:
    """Sequence hashes of local ones. Serial, so it takes the latency of a hash: 4-5 ns a block."""
    last = ZERO
    for i in range(len(local)):
        last = of_16(last, local[i], u64(16), seed) if i else local[i]
        out[i] = last


@inlined
def mixed(flipped: Word, first: Word, second: Word) -> Word:
    """What a block adds to the sums: its local hash, xored with its position's f, is M's input."""
    product = flipped * first
    return (product ^ (product >> HALF)) * second


@kernel(types.void(HASHES, *(types.uint64,) * 6, RESULTS))
def running_sums(
    local: Column,
    position: Word,
    before: Word,
    start: Word,
    step: Word,
    first: Word,
    second: Word,
    out: Column,
) -> None:
    """Sums of addends up to each block; the first stands at `position`, after the sum `before`."""
    total, flip = before, start + position * step
    for i in range(len(local)):
        total += mixed(local[i] ^ flip, first, second)
        flip += step
        out[i] = total
