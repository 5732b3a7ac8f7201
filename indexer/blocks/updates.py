"""Updates of the block table: runs of blocks that are added to one cache or removed from it.

The new set is looked up once per group of equal sets, and later slots are prefetched, so an update
costs one cache line per block. An *account* has the number of blocks of one cache in one tier, and
the sum of their digests, by which replicas compare their state.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.blocks.block_table import (
    CAPACITY,
    MAX_LOAD_FACTOR,
    NEXT_CAPACITY,
    SET_MASK,
    U32,
    USED,
    BlockTable,
    erase_slot,
    find_slot,
    is_usable_slot,
    prefetch_slot,
    write_slot,
)
from kvlane.indexer.blocks.holder_sets import (
    COUNT,
    EMPTY_SET,
    FREE,
    ONE,
    RETIRED,
    WORD_BITS,
    ZERO,
    HolderSets,
    add_references,
    drop_references,
    has_column,
    intern_set,
    with_column_flipped,
)
from kvlane.indexer.events import EventKind, EventRows
from kvlane.indexer.kernels import inlined, kernel
from kvlane.indexer.native.intrinsics import load_pair, trailing_zeros

BLOCK_COUNT, DIGEST_SUM, REJECTED, ACCOUNT_WORDS = range(4)
"""Fields of an account, u64: blocks held, the sum of their digests, rejected blocks."""

GROW_SLOTS_PER_KEY = 16
"""Slots copied per stored key while a table grows, so that growth ends long before it is full."""
PREFETCH_DISTANCE = 24
"""Prefetch distance in blocks."""

STORED = np.uint8(EventKind.STORED)
NO_SET_YET = -1
MIX_1, MIX_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0x165667919E3779F9)
SHIFT_1, SHIFT_2 = np.uint64(29), np.uint64(32)


@inlined
def block_digest(tag: np.uint64, key: np.uint64) -> np.uint64:
    """Digest of one block for its account; `tag`: of the cache and the tier."""
    mixed = (key ^ tag) * MIX_1
    mixed = (mixed ^ (mixed >> SHIFT_1)) * MIX_2
    return mixed ^ (mixed >> SHIFT_2)


@inlined
def placed(before: np.uint64, position: int, number: int) -> np.uint64:
    """New value of a block with the value `before`, 0 for a new one: the lower position."""
    if before != ZERO:
        position = min(position, np.int64(before >> U32))
    return (np.uint64(position) << U32) | np.uint64(number)


@inlined
def has_capacity(table: BlockTable, sets: HolderSets, column: int, keys: int) -> bool:
    """Whether table and sets have room for the column and `keys` keys, also while they grow. Adding
    or removing one column creates at most one new set per existing set."""
    if table.state[USED] + keys > MAX_LOAD_FACTOR * table.state[NEXT_CAPACITY]:
        return False
    is_growing = table.state[CAPACITY] != table.state[NEXT_CAPACITY]
    if is_growing and GROW_SLOTS_PER_KEY * keys > table.state[CAPACITY]:
        return False
    used = sets.state[COUNT] - sets.state[FREE] - sets.state[RETIRED]
    has_rows = len(sets.references) >= used + min(keys, used)
    return has_rows and column < WORD_BITS * sets.words


@inlined
def prefetch_first_slots(table: BlockTable, keys: NDArray[np.uint64]) -> None:
    for i in range(min(PREFETCH_DISTANCE, len(keys))):
        prefetch_slot(table, keys[i])


@kernel()
def apply_rows(
    table: BlockTable,
    sets: HolderSets,
    column: int,
    tag: np.uint64,
    rows: EventRows,
    limit: int,
    account: NDArray[np.uint64],
) -> None:
    """Apply rows of one tier, all of them stored or removed. `limit`: maximum blocks of the cache
    in this tier. The caller has made room (`has_capacity`)."""
    start = 0
    for row in range(len(rows.kinds)):
        end = start + np.int64(rows.counts[row])
        joins, position = rows.kinds[row] == STORED, np.int64(rows.positions[row])
        update_run(table, sets, column, joins, tag, rows.keys[start:end], position, limit, account)
        start = end


@kernel()
def update_run(
    table: BlockTable,
    sets: HolderSets,
    column: int,
    joins: bool,
    tag: np.uint64,
    keys: NDArray[np.uint64],
    position: int,
    limit: int,
    account: NDArray[np.uint64],
) -> None:
    """Add these blocks to the cache (`joins`), or remove them from it. They are consecutive from
    `position` on. Blocks that are in that state already are skipped."""
    before, after, moved, moves = NO_SET_YET, EMPTY_SET, 0, False
    held, total = np.int64(account[BLOCK_COUNT]), account[DIGEST_SUM]
    prefetch_first_slots(table, keys)
    for i in range(len(keys)):
        if i + PREFETCH_DISTANCE < len(keys):
            prefetch_slot(table, keys[i + PREFETCH_DISTANCE])
        key = keys[i]
        slot, value = find_slot(table, key)
        number = np.int64(value & SET_MASK)
        if number != before:
            _move_references(sets, before, after, moved)
            before, moved = number, 0
            moves = has_column(sets, number, column) != joins
            after = with_column_flipped(sets, number, column) if moves else EMPTY_SET
        if not moves:
            continue
        if joins:
            if held >= limit or (number == EMPTY_SET and not is_usable_slot(table, slot)):
                account[REJECTED] += ONE
                continue
            write_slot(table, slot, key, placed(value, position + i, after))
            if number == EMPTY_SET:
                table.state[USED] += 1
            held += 1
            total += block_digest(tag, key)
        else:
            _rewrite(table, slot, key, value, after)
            held -= 1
            total -= block_digest(tag, key)
        moved += 1
    _move_references(sets, before, after, moved)
    account[BLOCK_COUNT], account[DIGEST_SUM] = np.uint64(held), total


@kernel()
def sweep_slots(
    table: BlockTable, sets: HolderSets, leaving: NDArray[np.uint64], at: int, steps: int
) -> int:
    """Remove columns (`leaving`: u64, words) from the sets of up to `steps` slots below `at`;
    returns the new `at`. From the last slot to the first, because an erase moves blocks that way.
    Not while the table grows."""
    before, after, moved, leaves = NO_SET_YET, EMPTY_SET, 0, False
    until = max(at - steps, 0)
    while at > until:
        at -= 1
        key, value = load_pair(table.slots, 2 * at)
        if key == ZERO:
            continue
        number = np.int64(value & SET_MASK)
        if number != before:
            _move_references(sets, before, after, moved)
            before, moved = number, 0
            hashed, leaves = _without(sets, number, leaving)
            after = intern_set(sets, hashed) if leaves else EMPTY_SET
        if leaves:
            _rewrite(table, at, key, value, after)
            moved += 1
    _move_references(sets, before, after, moved)
    return at


@inlined
def _without(sets: HolderSets, number: int, leaving: NDArray[np.uint64]) -> tuple[np.uint64, bool]:
    """Write a set without these columns to `scratch_row`; returns its hash, and whether it had
    any."""
    hashed, leaves = sets.hashes[number], False
    for word in range(sets.words):
        bits = sets.rows[number * sets.words + word]
        gone = bits & leaving[word]
        sets.scratch_row[word] = bits ^ gone
        leaves |= gone != ZERO
        for bit in range(WORD_BITS):
            if (gone >> np.uint64(bit)) & ONE != ZERO:
                hashed ^= sets.zobrist_keys[WORD_BITS * word + bit]
    return hashed, leaves


@inlined
def _rewrite(table: BlockTable, slot: int, key: np.uint64, value: np.uint64, after: int) -> None:
    """Give a block another set, or erase it if the set is empty."""
    if after == EMPTY_SET:
        erase_slot(table, slot)
    else:
        write_slot(table, slot, key, (value & ~SET_MASK) | np.uint64(after))


@inlined
def _move_references(sets: HolderSets, before: int, after: int, moved: int) -> None:
    """Move the references of `moved` blocks from one set to another; unreferenced sets go."""
    add_references(sets, after, moved)
    if before != NO_SET_YET:
        if moved:
            drop_references(sets, before, moved)
        elif after != EMPTY_SET and sets.references[after] == 0:
            drop_references(sets, after, 0)


# --- snapshots ------------------------------------------------------------------------------------


@kernel()
def dump_blocks(
    slots: NDArray[np.uint64],
    start: int,
    sets: HolderSets,
    chosen: NDArray[np.uint64],
    keys: NDArray[np.uint64],
    positions: NDArray[np.uint32],
    numbers: NDArray[np.uint32],
) -> int:
    """Copy the blocks that any of the chosen columns holds, from slot `start` on, to outputs with
    room for all of them; returns their number."""
    size, before, wanted = 0, NO_SET_YET, False
    for at in range(start, slots.size // 2):
        key, value = load_pair(slots, 2 * at)
        if key == ZERO:
            continue
        number = np.int64(value & SET_MASK)
        if number != before:
            before, wanted = number, False
            for word in range(sets.words):
                wanted |= sets.rows[number * sets.words + word] & chosen[word] != ZERO
        if wanted:
            keys[size], positions[size], numbers[size] = key, value >> U32, number
            size += 1
    return size


@kernel()
def load_blocks(
    table: BlockTable,
    sets: HolderSets,
    keys: NDArray[np.uint64],
    positions: NDArray[np.uint32],
    numbers: NDArray[np.uint32],
    rows: NDArray[np.uint64],
    fresh: NDArray[np.uint64],
    tags: NDArray[np.uint64],
    accounts: NDArray[np.uint64],
) -> bool:
    """Add blocks with sets of `fresh` columns, which are empty yet: the inverse of `dump_blocks`.
    `numbers`: for each block its row in `rows`, u64 (n, words), with at least one of these columns.
    `tags`: u64 by column. `accounts`: u64 (columns, words of an account). The caller has made room.
    False, with a part added, for a block that occurs twice or finds no slot."""
    before, row, after, moved = NO_SET_YET, NO_SET_YET, EMPTY_SET, 0
    prefetch_first_slots(table, keys)
    for i in range(len(keys)):
        if i + PREFETCH_DISTANCE < len(keys):
            prefetch_slot(table, keys[i + PREFETCH_DISTANCE])
        key = keys[i]
        slot, value = find_slot(table, key)
        number = np.int64(value & SET_MASK)
        if number != before or np.int64(numbers[i]) != row:
            _move_references(sets, before, after, moved)
            before, row, moved = number, np.int64(numbers[i]), 0
            if not _is_disjoint(sets, number, fresh):
                return False
            after = intern_set(sets, _union(sets, number, rows[row]))
        if number == EMPTY_SET and not is_usable_slot(table, slot):
            _move_references(sets, before, after, moved)
            return False
        write_slot(table, slot, key, placed(value, np.int64(positions[i]), after))
        if number == EMPTY_SET:
            table.state[USED] += 1
        moved += 1
        _count_block(rows[row], key, tags, accounts)
    _move_references(sets, before, after, moved)
    return True


@inlined
def _is_disjoint(sets: HolderSets, number: int, row: NDArray[np.uint64]) -> bool:
    for word in range(sets.words):
        if sets.rows[number * sets.words + word] & row[word] != ZERO:
            return False
    return True


@inlined
def _union(sets: HolderSets, number: int, row: NDArray[np.uint64]) -> np.uint64:
    """Write the union of a set and a row to `scratch_row`; returns its hash."""
    hashed = sets.hashes[number]
    for word in range(sets.words):
        bits = sets.rows[number * sets.words + word]
        added = row[word] & ~bits
        sets.scratch_row[word] = bits | added
        for bit in range(WORD_BITS):
            if (added >> np.uint64(bit)) & ONE != ZERO:
                hashed ^= sets.zobrist_keys[WORD_BITS * word + bit]
    return hashed


@inlined
def _count_block(
    row: NDArray[np.uint64], key: np.uint64, tags: NDArray[np.uint64], accounts: NDArray[np.uint64]
) -> None:
    """Count a block in the accounts of all columns of a row."""
    for word in range(len(row)):
        bits = row[word]
        while bits != ZERO:
            column = WORD_BITS * word + trailing_zeros(bits)
            bits &= bits - ONE
            accounts[column, BLOCK_COUNT] += ONE
            accounts[column, DIGEST_SUM] += block_digest(tags[column], key)
