"""Sets of caches, each one stored once: equal sets have equal numbers.

A cache is a *column*, a set is a row of bits, and what the table keeps for a block is the number of
its row. Most blocks share their holders with their neighbours, so there are few sets: hundreds to
thousands in production traces, for millions of blocks. "The same holders" is one comparison of two
integers, memory does not grow with the number of workers, and storing a run of blocks changes its
set once, not once a block.

A row never changes while a block refers to it. `references` counts the blocks; at 0 the row is
retired, and taken for another set only when there is no other row left: `generation` rises then,
and with every change of the rows' place or width, so that a reader beside the writer knows that
what it has read may be of another set, and reads again.

Set 0 is the empty one. The hash of a set is the xor of its columns' marks, as Zobrist (1970) did it
for boards: one xor for a column that joins or leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexer.kernels import inlined, kernel
from indexer.memory import fence, store_release, zeros

WORD_BITS = 64
LEAST_ROWS = 256
ROWS_LIMIT = 1 << 32
"""What a slot of the table can name."""

COUNT, FREE, RETIRED, GENERATION, STATE_WORDS = range(5)
"""Places in `state`: rows ever begun, stacked in `free`, stacked in `retired`; see the module."""

EMPTY = 0
NOTHING, ONE = np.uint64(0), np.uint64(1)


class Sets(NamedTuple):
    """See the module; `n` rows, `words` u64 of bits each, b buckets (a power of two).

    `rows`: u64 (n · words). `hashes`: u64 (n). `references`: i64 (n). `buckets`: i64 (b), the hash
    table from a set to its number, 0 for empty ones. `free`, `retired`: i64 (n), two stacks.
    `marks`: u64 (64 · words), random, one for each column. `wanted`: u64 (words), the row that is
    looked for. `state`: i64.
    """

    rows: NDArray[np.uint64]
    words: int
    hashes: NDArray[np.uint64]
    references: NDArray[np.int64]
    buckets: NDArray[np.int64]
    free: NDArray[np.int64]
    retired: NDArray[np.int64]
    marks: NDArray[np.uint64]
    wanted: NDArray[np.uint64]
    state: NDArray[np.int64]

    @property
    def columns(self) -> int:
        """How many there is room for."""
        return self.words * WORD_BITS

    @property
    def used(self) -> int:
        """Sets that blocks refer to."""
        return int(self.state[COUNT] - self.state[FREE] - self.state[RETIRED]) - 1


def new_sets(words: int = 1, rows: int = LEAST_ROWS) -> Sets:
    """No sets but the empty one."""
    state = np.zeros(STATE_WORDS, np.int64)
    state[COUNT] = 1
    return _room(words, rows, state)


def _room(words: int, rows: int, state: NDArray[np.int64]) -> Sets:
    marks = np.random.default_rng(1).integers(1, 1 << 64, words * WORD_BITS, np.uint64)
    return Sets(
        zeros(rows * words), words, zeros(rows), zeros(rows, np.int64),
        np.zeros(1 << (2 * rows - 1).bit_length(), np.int64),
        zeros(rows, np.int64), zeros(rows, np.int64), marks, zeros(words), state,
    )  # fmt: skip


def with_room(sets: Sets, more: int, columns: int) -> Sets:
    """The same sets under the same numbers, with room for so many more, and for so many columns."""
    words = sets.words
    while words * WORD_BITS < columns:
        words *= 2
    rows, used = len(sets.references), int(sets.state[COUNT])
    if sets.used + 1 + more <= rows and words == sets.words:
        return sets
    while rows < sets.used + 1 + more:
        rows *= 2
    if rows > ROWS_LIMIT:
        raise MemoryError(f"{rows} sets of caches: more than a block can name")
    larger = _room(words, rows, sets.state)
    larger.rows.reshape(rows, words)[:used, : sets.words] = sets.rows.reshape(-1, sets.words)[:used]
    for column in ("hashes", "references", "free", "retired"):
        getattr(larger, column)[:used] = getattr(sets, column)[:used]
    gone = np.zeros(used, np.bool_)
    gone[sets.free[: sets.state[FREE]]] = gone[sets.retired[: sets.state[RETIRED]]] = True
    known = np.flatnonzero(~gone)
    _refill(larger, known[known != EMPTY])
    sets.state[GENERATION] += 1
    return larger


def bits_of(columns: Iterable[int], words: int) -> NDArray[np.uint64]:
    """A set as a row of bits, u64 (words, or as many as it takes)."""
    bits = [0] * words
    for column in columns:
        word = column // WORD_BITS
        bits += [0] * (word + 1 - len(bits))
        bits[word] |= 1 << (column % WORD_BITS)
    return np.array(bits, np.uint64)


# --- kernels --------------------------------------------------------------------------------------


@inlined
def has(sets: Sets, number: int, column: int) -> bool:
    """Whether a column is in a set."""
    word = sets.rows[number * sets.words + (column >> 6)]
    return (word >> np.uint64(column & 63)) & ONE != NOTHING


@kernel()
def toggled(sets: Sets, number: int, column: int) -> int:
    """The number of the set with this column in it if it is not, without it if it is.

    It may be new, without references: the caller gives it some, or discards it.
    """
    at = number * sets.words
    for word in range(sets.words):
        sets.wanted[word] = sets.rows[at + word]
    sets.wanted[column >> 6] ^= ONE << np.uint64(column & 63)
    return numbered(sets, sets.hashes[number] ^ sets.marks[column])


@kernel()
def numbered(sets: Sets, hashed: np.uint64) -> int:
    """The number of the set whose row is in `wanted`, by its hash; a new one if there is none."""
    if is_empty(sets.wanted):
        return EMPTY
    mask = len(sets.buckets) - 1
    bucket = np.int64(hashed & np.uint64(mask))
    while sets.buckets[bucket] != EMPTY:
        number = sets.buckets[bucket]
        if sets.hashes[number] == hashed and _is_wanted(sets, number):
            return number
        bucket = (bucket + 1) & mask
    number = _fresh(sets)
    at = number * sets.words
    for word in range(sets.words):
        sets.rows[at + word] = sets.wanted[word]
    sets.hashes[number] = hashed
    sets.references[number] = 0
    sets.buckets[bucket] = number
    fence()
    return number


@inlined
def is_empty(row: NDArray[np.uint64]) -> bool:
    """Whether no bit is set."""
    for word in row:
        if word != NOTHING:
            return False
    return True


@inlined
def _is_wanted(sets: Sets, number: int) -> bool:
    at = number * sets.words
    for word in range(sets.words):
        if sets.rows[at + word] != sets.wanted[word]:
            return False
    return True


@inlined
def _fresh(sets: Sets) -> int:
    """A row that no block and no reader knows."""
    state = sets.state
    if state[FREE] == 0 and state[COUNT] == len(sets.references):
        # The retired rows are the next free ones. Readers that may still look at them notice.
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
def refer(sets: Sets, number: int, blocks: int) -> None:
    """So many blocks more have this set."""
    if number != EMPTY:
        sets.references[number] += blocks


@kernel()
def release(sets: Sets, number: int, blocks: int) -> None:
    """So many blocks fewer have this set; without any, its row is retired."""
    if number == EMPTY:
        return
    sets.references[number] -= blocks
    if sets.references[number] == 0:
        _forget(sets, number)
        sets.retired[sets.state[RETIRED]] = number
        sets.state[RETIRED] += 1


@inlined
def _forget(sets: Sets, number: int) -> None:
    """Take a set out of the buckets, and move back what stands behind it because it was taken."""
    mask = len(sets.buckets) - 1
    hole = np.int64(sets.hashes[number] & np.uint64(mask))
    while sets.buckets[hole] != number:
        hole = (hole + 1) & mask
    at = (hole + 1) & mask
    while sets.buckets[at] != EMPTY:
        belongs = np.int64(sets.hashes[sets.buckets[at]] & np.uint64(mask))
        if ((at - belongs) & mask) >= ((at - hole) & mask):
            sets.buckets[hole] = sets.buckets[at]
            hole = at
        at = (at + 1) & mask
    sets.buckets[hole] = EMPTY


@kernel()
def _refill(sets: Sets, numbers: NDArray[np.int64]) -> None:
    """Put sets into the buckets."""
    mask = len(sets.buckets) - 1
    for number in numbers:
        bucket = np.int64(sets.hashes[number] & np.uint64(mask))
        while sets.buckets[bucket] != EMPTY:
            bucket = (bucket + 1) & mask
        sets.buckets[bucket] = number
