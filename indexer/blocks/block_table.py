"""Block table: hash table from a key to the set of caches that hold the block. One flat array.

A slot is a pair of u64: the key, then `position << 32 | set`. Key 0 marks an empty slot, and sets
are numbers (`indexer/blocks/holder_sets.py`). Linear probing; a removal shifts displaced entries
back, since tombstones slow down under churn.

The home slot of a key is `key · capacity / 2^64`, so slots are nearly in the order of keys, and the
table can have any size and *grow in steps*: `frontier` is an empty slot; blocks with a home slot
before it are in the larger table already. A lookup reads one of the two tables, never both.

*First blocks*, those at position 0, are counted in an array that fits a processor's cache, since
most prompts are in no cache: where it has 0 there is no first block. Of the positions that caches
announce for a block the lowest is kept.

One writer; any number of concurrent readers, without a lock:
- a slot is written and read as a whole, and the set it refers to is written before it;
- `version` is odd while a removal moves entries: a reader that found no entry retries when the
  version was odd or has changed;
- blocks that were copied into the larger table stay in the smaller one until it has no readers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.kernels import inlined, kernel
from kvlane.indexer.native.intrinsics import (
    allocate_zeros,
    fence,
    load_acquire,
    load_pair,
    load_pair_once,
    prefetch,
    store_pair,
    store_release,
)

MAX_LOAD_FACTOR = 0.7
"""Maximum load factor: at most 2.2 slots are probed for a present key, 6 for another, in the
mean."""
SMALL_TABLE_GROWTH, LARGE_TABLE_GROWTH = 4, 1.5
"""Growth factors: up to SMALL_TABLE_SLOTS, and beyond, where memory matters."""
SMALL_TABLE_SLOTS = 1 << 20
OVERFLOW_SLOTS = 2048
"""Slots after the last home slot, so that no probe wraps around; a key without a slot is
rejected."""
MIN_CAPACITY = 1 << 10
COUNTED_SLOTS_SHIFT = 3
"""Home slots per counter, as a power of two."""
COUNTER_BITS_SHIFT, COUNTERS_SHIFT = 2, 4
"""Bits of a counter and counters of a word, as powers of two."""

CAPACITY, NEXT_CAPACITY, FRONTIER, USED, VERSION, STATE_WORDS = range(6)
"""Fields of `state`. Capacities and the frontier in slots; USED counts both tables."""

LARGER_TABLE_OFFSET = 1 << 40
"""Offset of the slot numbers of the larger table."""

U32, SET_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)
ZERO = np.uint64(0)
LARGEST_COUNT = np.uint64(15)
"""A counter that reaches it stays there: more is unknown, until the table grows."""


class BlockTable(NamedTuple):
    """Arrays of a block table. `slots`, `larger`: u64, two words per slot; the same array unless
    the table is growing. `firsts`, `larger_firsts`: u64, counters of first blocks. `state`: i64,
    fields as above."""

    slots: NDArray[np.uint64]
    larger: NDArray[np.uint64]
    firsts: NDArray[np.uint64]
    larger_firsts: NDArray[np.uint64]
    state: NDArray[np.int64]

    @property
    def capacity(self) -> int:
        """Home slots of the larger table, or of the only one."""
        return int(self.state[NEXT_CAPACITY])

    @property
    def used(self) -> int:
        return int(self.state[USED])

    @property
    def is_growing(self) -> bool:
        """Whether some blocks are still in the smaller table."""
        return self.slots is not self.larger


def empty_table(blocks: int = 0) -> BlockTable:
    capacity = max(MIN_CAPACITY, int(blocks / MAX_LOAD_FACTOR) + 1)
    return _single(_slots(capacity), _counters(capacity), capacity, used=0)


def is_too_full(table: BlockTable, more: int) -> bool:
    return table.used + more > MAX_LOAD_FACTOR * table.capacity


def start_growth(table: BlockTable, more: int) -> BlockTable:
    """The same table at the start of its growth, with room for `more` blocks."""
    assert not table.is_growing
    growth = SMALL_TABLE_GROWTH if table.capacity < SMALL_TABLE_SLOTS else LARGE_TABLE_GROWTH
    capacity = max(int(table.capacity * growth), int((table.used + more) / MAX_LOAD_FACTOR) + 1)
    state = table.state.copy()
    state[NEXT_CAPACITY], state[FRONTIER] = capacity, 0
    return BlockTable(table.slots, _slots(capacity), table.firsts, _counters(capacity), state)


def finish_growth(table: BlockTable) -> BlockTable:
    assert table.state[FRONTIER] == table.state[CAPACITY]
    return _single(table.larger, table.larger_firsts, table.capacity, table.used)


def _single(
    slots: NDArray[np.uint64], firsts: NDArray[np.uint64], capacity: int, used: int
) -> BlockTable:
    state = np.zeros(STATE_WORDS, np.int64)
    state[CAPACITY], state[NEXT_CAPACITY], state[USED] = capacity, capacity, used
    return BlockTable(slots, slots, firsts, firsts, state)


def _slots(capacity: int) -> NDArray[np.uint64]:
    return allocate_zeros(2 * (capacity + OVERFLOW_SLOTS))


def _counters(capacity: int) -> NDArray[np.uint64]:
    return np.zeros((capacity >> (COUNTED_SLOTS_SHIFT + COUNTERS_SHIFT)) + 1, np.uint64)


# --- kernels: one block ---------------------------------------------------------------------------


@inlined
def home_slot(key: np.uint64, capacity: int) -> int:
    """Home slot of a key. By its upper half: enough for 2^32 slots, and no 128-bit product."""
    return np.int64(((key >> U32) * np.uint64(capacity)) >> U32)


@kernel()
def lookup_set(table: BlockTable, key: np.uint64) -> np.uint64:
    """Set of a block, for readers; 0, the empty set, if the block is absent."""
    state = table.state
    while True:
        version = load_acquire(state, VERSION)
        slots, at = table.slots, home_slot(key, state[CAPACITY])
        if at < load_acquire(state, FRONTIER):
            slots, at = table.larger, home_slot(key, state[NEXT_CAPACITY])
        found, value = load_pair_once(slots, 2 * at)
        while found != key and found != ZERO:
            at += 1
            found, value = load_pair_once(slots, 2 * at)
        if found == key:
            return value & SET_MASK
        fence()
        if version & 1 == 0 and load_acquire(state, VERSION) == version:
            return ZERO


@inlined
def prefetch_slot(table: BlockTable, key: np.uint64) -> None:
    at = home_slot(key, table.state[CAPACITY])
    if at < table.state[FRONTIER]:
        prefetch(table.larger, 2 * home_slot(key, table.state[NEXT_CAPACITY]))
    else:
        prefetch(table.slots, 2 * at)


@inlined
def find_slot(table: BlockTable, key: np.uint64) -> tuple[int, np.uint64]:
    """Slot of a key and its value, for the writer; an empty slot and 0 for a new key."""
    at = home_slot(key, table.state[CAPACITY])
    if at < table.state[FRONTIER]:
        at, value = probe_slots(table.larger, home_slot(key, table.state[NEXT_CAPACITY]), key)
        return at + LARGER_TABLE_OFFSET, value
    return probe_slots(table.slots, at, key)


@inlined
def probe_slots(slots: NDArray[np.uint64], at: int, key: np.uint64) -> tuple[int, np.uint64]:
    """The first slot from `at` on that has the key or is empty, and its value."""
    found, value = load_pair(slots, 2 * at)
    while found != key and found != ZERO:
        at += 1
        found, value = load_pair(slots, 2 * at)
    return at, value


@inlined
def write_slot(table: BlockTable, slot: int, key: np.uint64, value: np.uint64) -> None:
    """Write a slot that `find_slot` returned; the position of a block may only become lower."""
    slots, firsts, capacity, at = table.slots, table.firsts, table.state[CAPACITY], slot
    if slot >= LARGER_TABLE_OFFSET:
        slots, firsts = table.larger, table.larger_firsts
        capacity, at = table.state[NEXT_CAPACITY], slot - LARGER_TABLE_OFFSET
    if value >> U32 == ZERO:
        _, before = load_pair(slots, 2 * at)
        if before == ZERO or before >> U32 != ZERO:
            count_first(firsts, home_slot(key, capacity))
    store_pair(slots, 2 * at, key, value)


@inlined
def is_usable_slot(table: BlockTable, slot: int) -> bool:
    """Whether an empty slot may be used: all but the last one, so that every probe ends."""
    if slot >= LARGER_TABLE_OFFSET:
        return 2 * (slot - LARGER_TABLE_OFFSET) + 2 < table.larger.size
    return 2 * slot + 2 < table.slots.size


@kernel()
def erase_slot(table: BlockTable, slot: int) -> None:
    """Erase a slot, and shift back the entries that it had displaced."""
    state = table.state
    slots, firsts, capacity, hole = table.slots, table.firsts, state[CAPACITY], slot
    if slot >= LARGER_TABLE_OFFSET:
        slots, firsts = table.larger, table.larger_firsts
        capacity, hole = state[NEXT_CAPACITY], slot - LARGER_TABLE_OFFSET
    key, value = load_pair(slots, 2 * hole)
    if value >> U32 == ZERO:
        uncount_first(firsts, home_slot(key, capacity))
    store_release(state, VERSION, state[VERSION] + 1)
    fence()
    at = hole + 1
    key, value = load_pair(slots, 2 * at)
    while key != ZERO:
        if home_slot(key, capacity) <= hole:
            store_pair(slots, 2 * hole, key, value)
            hole = at
        at += 1
        key, value = load_pair(slots, 2 * at)
    store_pair(slots, 2 * hole, ZERO, ZERO)
    state[USED] -= 1
    store_release(state, VERSION, state[VERSION] + 1)


# --- kernels: first blocks ------------------------------------------------------------------------


@inlined
def first_count(firsts: NDArray[np.uint64], home: int) -> tuple[int, np.uint64, np.uint64]:
    """Counter of a home slot: its word, the position of its lowest bit, and its value."""
    counter = home >> COUNTED_SLOTS_SHIFT
    word, within = counter >> COUNTERS_SHIFT, counter & ((1 << COUNTERS_SHIFT) - 1)
    bit = np.uint64(within << COUNTER_BITS_SHIFT)
    return word, bit, (firsts[word] >> bit) & LARGEST_COUNT


@inlined
def count_first(firsts: NDArray[np.uint64], home: int) -> None:
    word, bit, count = first_count(firsts, home)
    if count != LARGEST_COUNT:
        firsts[word] += np.uint64(1) << bit


@inlined
def uncount_first(firsts: NDArray[np.uint64], home: int) -> None:
    """Remove a first block from its counter."""
    word, bit, count = first_count(firsts, home)
    if count != LARGEST_COUNT:
        firsts[word] -= np.uint64(1) << bit


@inlined
def may_have_first(table: BlockTable, key: np.uint64) -> bool:
    """Whether the table may have a block as a first one, for readers; False is certain."""
    firsts, home = table.firsts, home_slot(key, table.state[CAPACITY])
    if home < load_acquire(table.state, FRONTIER):
        firsts, home = table.larger_firsts, home_slot(key, table.state[NEXT_CAPACITY])
    _, _, count = first_count(firsts, home)
    return count != ZERO


# --- kernels: growth ------------------------------------------------------------------------------


@kernel()
def copy_slots(table: BlockTable, steps: int) -> bool:
    """Copy the blocks of `steps` more slots, and on to the next empty slot, in the order of both
    tables; returns whether the copy is complete."""
    state, at, capacity = table.state, table.state[FRONTIER], table.state[CAPACITY]
    until, last = min(at + steps, capacity), table.slots.size // 2 - 1
    while at < last:
        key, value = load_pair(table.slots, 2 * at)
        if key != ZERO:
            slot, _ = probe_slots(table.larger, home_slot(key, state[NEXT_CAPACITY]), key)
            if is_usable_slot(table, slot + LARGER_TABLE_OFFSET):
                store_pair(table.larger, 2 * slot, key, value)
                if value >> U32 == ZERO:
                    count_first(table.larger_firsts, home_slot(key, state[NEXT_CAPACITY]))
            else:  # thousands of keys with one home slot: not random keys, so the block is dropped
                state[USED] -= 1
        elif at >= until:
            break
        at += 1
    # Entries before an empty slot have their home slots before it, entries after it after it.
    store_release(state, FRONTIER, min(at, capacity))
    return at >= capacity
