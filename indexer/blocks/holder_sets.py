"""Interned sets of caches: each set is stored once, and equal sets have equal numbers.

A cache is a *column*, a set a row of bits; the table has the number of a row for each block. Most
blocks have the holders of their neighbours, so there are few sets, and memory does not grow with
the number of workers.

A row never changes while a block refers to it. `references` counts the blocks; at 0 the row is
retired, and reused only when no other is left. `generation` is incremented then, and with every
reallocation of the rows: a concurrent reader retries. Set 0 is empty. The hash of a set is the xor
of the random numbers of its columns (Zobrist hashing).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.kernels import inlined, kernel
from kvlane.indexer.native.intrinsics import allocate_zeros, fence, store_release

WORD_BITS = 64
MIN_ROWS = 256
MAX_ROWS = 1 << 32
"""Limit of the set numbers in a slot of the table."""

COUNT, FREE, RETIRED, GENERATION, STATE_WORDS = range(5)
"""Fields of `state`: rows ever used, rows in `free`, rows in `retired`, and the generation."""

EMPTY_SET = 0
ZERO, ONE = np.uint64(0), np.uint64(1)


class HolderSets(NamedTuple):
    """Interned sets: n rows of `words` u64 each, b buckets (a power of two).

    `rows`: u64 (n · words). `hashes`: u64 (n). `references`: i64 (n). `buckets`: i64 (b), from a
    set to its number, 0 for empty ones. `free`, `retired`: i64 (n), stacks. `zobrist_keys`: u64 (64
    · words), by column. `scratch_row`: u64 (words), the set to look up. `state`: i64.
    """

    rows: NDArray[np.uint64]
    words: int
    hashes: NDArray[np.uint64]
    references: NDArray[np.int64]
    buckets: NDArray[np.int64]
    free: NDArray[np.int64]
    retired: NDArray[np.int64]
    zobrist_keys: NDArray[np.uint64]
    scratch_row: NDArray[np.uint64]
    state: NDArray[np.int64]

    @property
    def column_capacity(self) -> int:
        return self.words * WORD_BITS

    @property
    def used_sets(self) -> int:
        return int(self.state[COUNT] - self.state[FREE] - self.state[RETIRED]) - 1


def empty_sets(words: int = 1, rows: int = MIN_ROWS) -> HolderSets:
    state = np.zeros(STATE_WORDS, np.int64)
    state[COUNT] = 1
    return _allocated(words, rows, state)


def _allocated(words: int, rows: int, state: NDArray[np.int64]) -> HolderSets:
    marks = np.random.default_rng(1).integers(1, 1 << 64, words * WORD_BITS, np.uint64)
    return HolderSets(
        allocate_zeros(rows * words), words, allocate_zeros(rows), allocate_zeros(rows, np.int64),
        np.zeros(1 << (2 * rows - 1).bit_length(), np.int64),
        allocate_zeros(rows, np.int64), allocate_zeros(rows, np.int64), marks,
        allocate_zeros(words), state,
    )  # fmt: skip


def with_capacity(sets: HolderSets, more: int, columns: int) -> HolderSets:
    """The same sets under the same numbers, with room for `more` sets and for `columns` columns."""
    words = sets.words
    while words * WORD_BITS < columns:
        words *= 2
    rows, used = len(sets.references), int(sets.state[COUNT])
    if sets.used_sets + 1 + more <= rows and words == sets.words:
        return sets
    while rows < sets.used_sets + 1 + more:
        rows *= 2
    if rows > MAX_ROWS:
        raise MemoryError(f"the index needs {rows} sets of caches; at most {MAX_ROWS} fit")
    larger = _allocated(words, rows, sets.state)
    larger.rows.reshape(rows, words)[:used, : sets.words] = sets.rows.reshape(-1, sets.words)[:used]
    for column in ("hashes", "references", "free", "retired"):
        getattr(larger, column)[:used] = getattr(sets, column)[:used]
    gone = np.zeros(used, np.bool_)
    gone[sets.free[: sets.state[FREE]]] = gone[sets.retired[: sets.state[RETIRED]]] = True
    known = np.flatnonzero(~gone)
    _insert_into_buckets(larger, known[known != EMPTY_SET])
    sets.state[GENERATION] += 1
    return larger


def bit_row(columns: Iterable[int], words: int) -> NDArray[np.uint64]:
    """A set as a row of bits, u64 (`words`, or more if needed)."""
    bits = [0] * words
    for column in columns:
        word = column // WORD_BITS
        bits += [0] * (word + 1 - len(bits))
        bits[word] |= 1 << (column % WORD_BITS)
    return np.array(bits, np.uint64)


# --- kernels --------------------------------------------------------------------------------------


@inlined
def has_column(sets: HolderSets, number: int, column: int) -> bool:
    word = sets.rows[number * sets.words + (column >> 6)]
    return (word >> np.uint64(column & 63)) & ONE != ZERO


@kernel()
def with_column_flipped(sets: HolderSets, number: int, column: int) -> int:
    """Number of the set with one column added, or removed if it was present. A new set has no
    references yet: the caller adds some, or releases it."""
    at = number * sets.words
    for word in range(sets.words):
        sets.scratch_row[word] = sets.rows[at + word]
    sets.scratch_row[column >> 6] ^= ONE << np.uint64(column & 63)
    return intern_set(sets, sets.hashes[number] ^ sets.zobrist_keys[column])


@kernel()
def intern_set(sets: HolderSets, hashed: np.uint64) -> int:
    """Number of the set in `scratch_row`, given its hash; a new number for a new set."""
    if is_empty(sets.scratch_row):
        return EMPTY_SET
    mask = len(sets.buckets) - 1
    bucket = np.int64(hashed & np.uint64(mask))
    while sets.buckets[bucket] != EMPTY_SET:
        number = sets.buckets[bucket]
        if sets.hashes[number] == hashed and _is_wanted(sets, number):
            return number
        bucket = (bucket + 1) & mask
    number = _unused_row(sets)
    at = number * sets.words
    for word in range(sets.words):
        sets.rows[at + word] = sets.scratch_row[word]
    sets.hashes[number] = hashed
    sets.references[number] = 0
    sets.buckets[bucket] = number
    fence()
    return number


@inlined
def is_empty(row: NDArray[np.uint64]) -> bool:
    for word in row:
        if word != ZERO:
            return False
    return True


@inlined
def _is_wanted(sets: HolderSets, number: int) -> bool:
    at = number * sets.words
    for word in range(sets.words):
        if sets.rows[at + word] != sets.scratch_row[word]:
            return False
    return True


@inlined
def _unused_row(sets: HolderSets) -> int:
    state = sets.state
    if state[FREE] == 0 and state[COUNT] == len(sets.references):
        # Retired rows become free. Readers that still use them notice by the generation.
        store_release(state, GENERATION, state[GENERATION] + 1)
        for i in range(state[RETIRED]):
            sets.free[i] = sets.retired[i]
        state[FREE], state[RETIRED] = state[RETIRED], 0
    if state[FREE] == 0:
        state[COUNT] += 1
        return state[COUNT] - 1
    state[FREE] -= 1
    return sets.free[state[FREE]]


@inlined
def add_references(sets: HolderSets, number: int, blocks: int) -> None:
    if number != EMPTY_SET:
        sets.references[number] += blocks


@kernel()
def drop_references(sets: HolderSets, number: int, blocks: int) -> None:
    """Remove references of `blocks` blocks from a set; at 0 its row is retired."""
    if number == EMPTY_SET:
        return
    sets.references[number] -= blocks
    if sets.references[number] == 0:
        _remove_from_buckets(sets, number)
        sets.retired[sets.state[RETIRED]] = number
        sets.state[RETIRED] += 1


@inlined
def _remove_from_buckets(sets: HolderSets, number: int) -> None:
    """Remove a set from the buckets, and shift back the entries that it had displaced."""
    mask = len(sets.buckets) - 1
    hole = np.int64(sets.hashes[number] & np.uint64(mask))
    while sets.buckets[hole] != number:
        hole = (hole + 1) & mask
    at = (hole + 1) & mask
    while sets.buckets[at] != EMPTY_SET:
        belongs = np.int64(sets.hashes[sets.buckets[at]] & np.uint64(mask))
        if ((at - belongs) & mask) >= ((at - hole) & mask):
            sets.buckets[hole] = sets.buckets[at]
            hole = at
        at = (at + 1) & mask
    sets.buckets[hole] = EMPTY_SET


@kernel()
def _insert_into_buckets(sets: HolderSets, numbers: NDArray[np.int64]) -> None:
    mask = len(sets.buckets) - 1
    for number in numbers:
        bucket = np.int64(sets.hashes[number] & np.uint64(mask))
        while sets.buckets[bucket] != EMPTY_SET:
            bucket = (bucket + 1) & mask
        sets.buckets[bucket] = number
