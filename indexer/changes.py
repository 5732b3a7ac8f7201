"""What one cache's events do to the table: runs of blocks that it holds from now on, or no more.

Blocks of a run mostly have the same holders, so the set they get is looked up once for all that
follow one another, and counted once. The slots of the blocks ahead are being loaded while one is
written: a store is bound by that, one line of memory a block.

An *account* keeps what stands in the table for one cache: the number of its blocks, and the sum of
their digests, by which replicas compare their state without comparing their blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.events import Kind, Rows
from indexer.kernels import inlined, kernel
from indexer.memory import load_pair, trailing_zeros
from indexer.sets import (
    COUNT,
    EMPTY,
    FREE,
    NOTHING,
    ONE,
    RETIRED,
    WORD_BITS,
    Sets,
    has,
    numbered,
    refer,
    release,
    toggled,
)
from indexer.table import (
    CAPACITY,
    LOAD,
    NEXT_CAPACITY,
    SET_MASK,
    U32,
    USED,
    Table,
    expect,
    has_room,
    place,
    put,
    take_out,
)

BLOCKS, DIGEST, REFUSED, ACCOUNT_WORDS = range(4)
"""Places in an account, u64: blocks held, the sum of their digests, blocks that had no room."""

GROW_STEPS = 16
"""Slots copied for each key that is stored while a table grows: done long before it is full."""
WRITE_AHEAD = 12
"""Blocks whose slots are being loaded. From 8 to 16 it makes no difference; 4 lost a third."""

STORED = np.uint8(Kind.STORED)
UNKNOWN = -1
MIX_1, MIX_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0x165667919E3779F9)
SHIFT_1, SHIFT_2 = np.uint64(29), np.uint64(32)


@inlined
def digest(tag: np.uint64, key: np.uint64) -> np.uint64:
    """The share of one block in its account; the tag is of the cache and the tier."""
    mixed = (key ^ tag) * MIX_1
    mixed = (mixed ^ (mixed >> SHIFT_1)) * MIX_2
    return mixed ^ (mixed >> SHIFT_2)


@inlined
def is_roomy(table: Table, sets: Sets, column: int, keys: int) -> bool:
    """Whether there is room for the column and so many blocks; a growing table may need more time.

    One column more or less gives each set another one at most.
    """
    if table.state[USED] + keys > LOAD * table.state[NEXT_CAPACITY]:
        return False
    is_growing = table.state[CAPACITY] != table.state[NEXT_CAPACITY]
    if is_growing and GROW_STEPS * keys > table.state[CAPACITY]:
        return False
    used = sets.state[COUNT] - sets.state[FREE] - sets.state[RETIRED]
    has_rows = len(sets.references) >= used + min(keys, used)
    return has_rows and column < WORD_BITS * sets.words


@inlined
def expect_first(table: Table, keys: NDArray[np.uint64]) -> None:
    """Begin to load the slots of the first blocks: else each of them would be waited for."""
    for i in range(min(WRITE_AHEAD, len(keys))):
        expect(table, keys[i])


@kernel()
def apply_rows(
    table: Table,
    sets: Sets,
    column: int,
    tag: np.uint64,
    rows: Rows,
    limit: int,
    account: NDArray[np.uint64],
) -> None:
    """Take in rows of one tier, all of them stored or removed.

    The cache may have `limit` blocks in this tier. The caller has made room (`is_roomy`).
    """
    start = 0
    for row in range(len(rows.kinds)):
        end = start + np.int64(rows.counts[row])
        joins, position = rows.kinds[row] == STORED, np.int64(rows.positions[row])
        change(table, sets, column, joins, tag, rows.keys[start:end], position, limit, account)
        start = end


@kernel()
def change(
    table: Table,
    sets: Sets,
    column: int,
    joins: bool,
    tag: np.uint64,
    keys: NDArray[np.uint64],
    position: int,
    limit: int,
    account: NDArray[np.uint64],
) -> None:
    """The cache holds these blocks from now on, or, if it does not join, no more.

    They follow one another from a position on. What is so already is passed over.
    """
    before, after, moved, moves = UNKNOWN, EMPTY, 0, False
    held, total = np.int64(account[BLOCKS]), account[DIGEST]
    expect_first(table, keys)
    for i in range(len(keys)):
        if i + WRITE_AHEAD < len(keys):
            expect(table, keys[i + WRITE_AHEAD])
        key = keys[i]
        slot, value = place(table, key)
        number = np.int64(value & SET_MASK)
        if number != before:
            _settle(sets, before, after, moved)
            before, moved = number, 0
            moves = has(sets, number, column) != joins
            after = toggled(sets, number, column) if moves else EMPTY
        if not moves:
            continue
        if joins:
            if held >= limit or (number == EMPTY and not has_room(table, slot)):
                account[REFUSED] += ONE
                continue
            put(table, slot, key, (np.uint64(position + i) << U32) | np.uint64(after))
            if number == EMPTY:
                table.state[USED] += 1
            held += 1
            total += digest(tag, key)
        else:
            _rewrite(table, slot, key, value, after)
            held -= 1
            total -= digest(tag, key)
        moved += 1
    _settle(sets, before, after, moved)
    account[BLOCKS], account[DIGEST] = np.uint64(held), total


@kernel()
def sweep(table: Table, sets: Sets, leaving: NDArray[np.uint64], at: int, steps: int) -> int:
    """Take columns out of the sets of so many slots below `at`; where it got to, 0 for all done.

    `leaving`: u64 (words), the columns. From the last slot to the first, because removals move
    blocks towards the first: nothing is moved out of the way. Not while the table grows.
    """
    before, after, moved, leaves = UNKNOWN, EMPTY, 0, False
    until = max(at - steps, 0)
    while at > until:
        at -= 1
        key, value = load_pair(table.slots, 2 * at)
        if key == NOTHING:
            continue
        number = np.int64(value & SET_MASK)
        if number != before:
            _settle(sets, before, after, moved)
            before, moved = number, 0
            hashed, leaves = _without(sets, number, leaving)
            after = numbered(sets, hashed) if leaves else EMPTY
        if leaves:
            _rewrite(table, at, key, value, after)
            moved += 1
    _settle(sets, before, after, moved)
    return at


@inlined
def _without(sets: Sets, number: int, leaving: NDArray[np.uint64]) -> tuple[np.uint64, bool]:
    """Put a set without these columns into `wanted`; its hash, and whether it has any of them."""
    hashed, leaves = sets.hashes[number], False
    for word in range(sets.words):
        bits = sets.rows[number * sets.words + word]
        gone = bits & leaving[word]
        sets.wanted[word] = bits ^ gone
        leaves |= gone != NOTHING
        for bit in range(WORD_BITS):
            if (gone >> np.uint64(bit)) & ONE != NOTHING:
                hashed ^= sets.marks[WORD_BITS * word + bit]
    return hashed, leaves


@inlined
def _rewrite(table: Table, slot: int, key: np.uint64, value: np.uint64, after: int) -> None:
    """Give a block another set, or none at all."""
    if after == EMPTY:
        take_out(table, slot)
    else:
        put(table, slot, key, (value & ~SET_MASK) | np.uint64(after))


@inlined
def _settle(sets: Sets, before: int, after: int, moved: int) -> None:
    """So many blocks went from one set to another; what nobody refers to, goes."""
    refer(sets, after, moved)
    if before != UNKNOWN:
        if moved:
            release(sets, before, moved)
        elif after != EMPTY and sets.references[after] == 0:
            release(sets, after, 0)


# --- snapshots ------------------------------------------------------------------------------------


@kernel()
def dump(
    slots: NDArray[np.uint64],
    start: int,
    sets: Sets,
    chosen: NDArray[np.uint64],
    keys: NDArray[np.uint64],
    positions: NDArray[np.uint32],
    numbers: NDArray[np.uint32],
) -> int:
    """Copy out the blocks from a slot on that any of the chosen columns holds; how many they are.

    The outputs have room for all of them.
    """
    size, before, wanted = 0, UNKNOWN, False
    for at in range(start, slots.size // 2):
        key, value = load_pair(slots, 2 * at)
        if key == NOTHING:
            continue
        number = np.int64(value & SET_MASK)
        if number != before:
            before, wanted = number, False
            for word in range(sets.words):
                wanted |= sets.rows[number * sets.words + word] & chosen[word] != NOTHING
        if wanted:
            keys[size], positions[size], numbers[size] = key, value >> U32, number
            size += 1
    return size


@kernel()
def load(
    table: Table,
    sets: Sets,
    keys: NDArray[np.uint64],
    positions: NDArray[np.uint32],
    numbers: NDArray[np.uint32],
    rows: NDArray[np.uint64],
    fresh: NDArray[np.uint64],
    tags: NDArray[np.uint64],
    accounts: NDArray[np.uint64],
) -> bool:
    """The inverse of `dump`: add blocks with sets of `fresh` columns, which hold nothing yet.

    `numbers`: for each block its row in `rows`, u64 (n, words), of at least one of these columns.
    `tags`: u64 by column. `accounts`: u64 (columns, words of an account). The caller has made room:
    for all blocks, and for each known set joined with each row. False, in the middle, for a block
    that stands twice or finds no slot, as in no dump.
    """
    before, row, after, moved = UNKNOWN, UNKNOWN, EMPTY, 0
    expect_first(table, keys)
    for i in range(len(keys)):
        if i + WRITE_AHEAD < len(keys):
            expect(table, keys[i + WRITE_AHEAD])
        key = keys[i]
        slot, value = place(table, key)
        number = np.int64(value & SET_MASK)
        if number != before or np.int64(numbers[i]) != row:
            _settle(sets, before, after, moved)
            before, row, moved = number, np.int64(numbers[i]), 0
            if not _is_apart(sets, number, fresh):
                return False
            after = numbered(sets, _joined(sets, number, rows[row]))
        if number == EMPTY and not has_room(table, slot):
            _settle(sets, before, after, moved)
            return False
        put(table, slot, key, (np.uint64(positions[i]) << U32) | np.uint64(after))
        if number == EMPTY:
            table.state[USED] += 1
        moved += 1
        _enter(rows[row], key, tags, accounts)
    _settle(sets, before, after, moved)
    return True


@inlined
def _is_apart(sets: Sets, number: int, row: NDArray[np.uint64]) -> bool:
    """Whether none of the columns is in the set."""
    for word in range(sets.words):
        if sets.rows[number * sets.words + word] & row[word] != NOTHING:
            return False
    return True


@inlined
def _joined(sets: Sets, number: int, row: NDArray[np.uint64]) -> np.uint64:
    """Put a set with more columns into `wanted`; its hash."""
    hashed = sets.hashes[number]
    for word in range(sets.words):
        bits = sets.rows[number * sets.words + word]
        come = row[word] & ~bits
        sets.wanted[word] = bits | come
        for bit in range(WORD_BITS):
            if (come >> np.uint64(bit)) & ONE != NOTHING:
                hashed ^= sets.marks[WORD_BITS * word + bit]
    return hashed


@inlined
def _enter(
    row: NDArray[np.uint64],
    key: np.uint64,
    tags: NDArray[np.uint64],
    accounts: NDArray[np.uint64],
) -> None:
    """Account for a block that all columns of a row hold."""
    for word in range(len(row)):
        bits = row[word]
        while bits != NOTHING:
            column = WORD_BITS * word + trailing_zeros(bits)
            bits &= bits - ONE
            accounts[column, BLOCKS] += ONE
            accounts[column, DIGEST] += digest(tags[column], key)
