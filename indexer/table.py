"""The table of blocks: from a key to the set of caches that hold the block. One flat array.

A slot is a pair of u64: the key, then `position << 32 | set`. Key 0 marks an empty slot, and sets
are numbers (`indexer/sets.py`). Collisions go to the next free slot (linear probing), and a removal
moves back what was displaced (no tombstones: with them, churn fell to 1 % of the speed).

The home of a key is `key · capacity / 2^64`: keys are random numbers, and so slots lie in the order
of keys, nearly. That is why the table can have any size, and why it *grows in steps*: `frontier` is
an empty slot; the blocks whose home lies before it are in the larger table already, copied from one
end to the other, the rest is not. A lookup asks one of the two, never both.

One writer; any number of readers beside it, without a lock:
- a slot is written and read as a whole, and what its set says is written before it;
- `version` is odd while a removal moves entries: a reader that found nothing looks again when the
  version was odd or has changed meanwhile, since it may have missed an entry on its way;
- what was copied into the larger table stays in the smaller one, until nobody reads it any more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexer.kernels import inlined, kernel
from indexer.memory import (
    fence,
    load_acquire,
    load_pair,
    prefetch,
    read_pair,
    store_pair,
    store_release,
    zeros,
)

LOAD = 0.7
"""Slots in use, at most: 2.2 slots are seen for a key that is there, 6 for one that is not."""
LEAP, GROWTH = 4, 1.5
"""How much larger the next table is: up to SMALL slots, and beyond, where it is the memory that
counts: 23 to 34 bytes a block. To copy a block takes 7-10 ns, the memory's first touch included."""
SMALL = 1 << 20
SPILL = 2048
"""Slots behind the last home, so that no probe wraps around. The longest run of used slots at full
load is a few hundred; a key that finds no room at all is refused."""
LEAST = 1 << 10

CAPACITY, NEXT_CAPACITY, FRONTIER, USED, VERSION, STATE_WORDS = range(6)
"""Places in `state`. Capacities and the frontier in slots, `used` counts both tables."""

ABSENT = -1
NEXT = 1 << 40
"""Added to the numbers of slots in the larger table."""

U32, SET_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)
NOTHING = np.uint64(0)


class Table(NamedTuple):
    """See the module. `larger` is `slots` itself while the table does not grow.

    `slots`, `larger`: u64, two words a slot. `state`: i64, see the names above.
    """

    slots: NDArray[np.uint64]
    larger: NDArray[np.uint64]
    state: NDArray[np.int64]

    @property
    def capacity(self) -> int:
        """Homes of the larger table, or of the only one."""
        return int(self.state[NEXT_CAPACITY])

    @property
    def used(self) -> int:
        """Blocks in both."""
        return int(self.state[USED])

    @property
    def is_growing(self) -> bool:
        """Whether some blocks are still in the smaller table."""
        return self.slots is not self.larger


def new_table(blocks: int = 0) -> Table:
    """An empty table with room for so many blocks."""
    capacity = max(LEAST, int(blocks / LOAD) + 1)
    return _settled(_slots(capacity), capacity, used=0)


def needs_room(table: Table, more: int) -> bool:
    """Whether so many more blocks would be too many."""
    return table.used + more > LOAD * table.capacity


def grown(table: Table, more: int) -> Table:
    """The same table at the beginning of its growth, with room for so many more."""
    assert not table.is_growing
    growth = LEAP if table.capacity < SMALL else GROWTH
    capacity = max(int(table.capacity * growth), int((table.used + more) / LOAD) + 1)
    state = table.state.copy()
    state[NEXT_CAPACITY], state[FRONTIER] = capacity, 0
    return Table(table.slots, _slots(capacity), state)


def settled(table: Table) -> Table:
    """The larger table alone, when all blocks are in it."""
    assert table.state[FRONTIER] == table.state[CAPACITY]
    return _settled(table.larger, table.capacity, table.used)


def _settled(slots: NDArray[np.uint64], capacity: int, used: int) -> Table:
    state = np.zeros(STATE_WORDS, np.int64)
    state[CAPACITY], state[NEXT_CAPACITY], state[USED] = capacity, capacity, used
    return Table(slots, slots, state)


def _slots(capacity: int) -> NDArray[np.uint64]:
    return zeros(2 * (capacity + SPILL))


# --- kernels: one block ---------------------------------------------------------------------------


@inlined
def home(key: np.uint64, capacity: int) -> int:
    """Where a key belongs. By its upper half: enough for 2^32 slots, and no 128-bit product."""
    return np.int64(((key >> U32) * np.uint64(capacity)) >> U32)


@kernel()
def held_by(table: Table, key: np.uint64) -> np.uint64:
    """The set of a block: 0, the empty one, for blocks that are not there. For readers."""
    state = table.state
    while True:
        version = load_acquire(state, VERSION)
        slots, at = table.slots, home(key, state[CAPACITY])
        if at < load_acquire(state, FRONTIER):
            slots, at = table.larger, home(key, state[NEXT_CAPACITY])
        found, value = read_pair(slots, 2 * at)
        while found != key and found != NOTHING:
            at += 1
            found, value = read_pair(slots, 2 * at)
        if found == key:
            return value & SET_MASK
        fence()
        if version & 1 == 0 and load_acquire(state, VERSION) == version:
            return NOTHING


@inlined
def expect(table: Table, key: np.uint64) -> None:
    """Begin to load the slot of a key that will be asked for soon."""
    at = home(key, table.state[CAPACITY])
    if at < table.state[FRONTIER]:
        prefetch(table.larger, 2 * home(key, table.state[NEXT_CAPACITY]))
    else:
        prefetch(table.slots, 2 * at)


@inlined
def place(table: Table, key: np.uint64) -> tuple[int, np.uint64]:
    """For the writer: the slot of a key and what it holds; an empty slot and 0 when it is new."""
    at = home(key, table.state[CAPACITY])
    if at < table.state[FRONTIER]:
        at, value = probe(table.larger, home(key, table.state[NEXT_CAPACITY]), key)
        return at + NEXT, value
    return probe(table.slots, at, key)


@inlined
def probe(slots: NDArray[np.uint64], at: int, key: np.uint64) -> tuple[int, np.uint64]:
    """The first slot from `at` on that holds the key, or is empty."""
    found, value = load_pair(slots, 2 * at)
    while found != key and found != NOTHING:
        at += 1
        found, value = load_pair(slots, 2 * at)
    return at, value


@inlined
def put(table: Table, slot: int, key: np.uint64, value: np.uint64) -> None:
    """Write a slot that `place` gave."""
    if slot >= NEXT:
        store_pair(table.larger, 2 * (slot - NEXT), key, value)
    else:
        store_pair(table.slots, 2 * slot, key, value)


@inlined
def has_room(table: Table, slot: int) -> bool:
    """Whether an empty slot may be used: the last one never is, so that every probe ends."""
    if slot >= NEXT:
        return 2 * (slot - NEXT) + 2 < table.larger.size
    return 2 * slot + 2 < table.slots.size


@kernel()
def take_out(table: Table, slot: int) -> None:
    """Empty a slot, and move back what stands behind it because it was taken."""
    state = table.state
    slots, capacity, hole = table.slots, state[CAPACITY], slot
    if slot >= NEXT:
        slots, capacity, hole = table.larger, state[NEXT_CAPACITY], slot - NEXT
    store_release(state, VERSION, state[VERSION] + 1)
    fence()
    at = hole + 1
    key, value = load_pair(slots, 2 * at)
    while key != NOTHING:
        if home(key, capacity) <= hole:
            store_pair(slots, 2 * hole, key, value)
            hole = at
        at += 1
        key, value = load_pair(slots, 2 * at)
    store_pair(slots, 2 * hole, NOTHING, NOTHING)
    state[USED] -= 1
    store_release(state, VERSION, state[VERSION] + 1)


# --- kernels: growth ------------------------------------------------------------------------------


@kernel()
def grow(table: Table, steps: int) -> bool:
    """Copy the blocks of so many more slots, and on to the next empty one; whether that was all.

    Both tables are in the order of keys, but for what collided, so this reads and writes from one
    end to the other: 5 ns a slot, most of it for branches that nobody can predict.
    """
    state, at, capacity = table.state, table.state[FRONTIER], table.state[CAPACITY]
    until, last = min(at + steps, capacity), table.slots.size // 2 - 1
    while at < last:
        key, value = load_pair(table.slots, 2 * at)
        if key != NOTHING:
            slot, _ = probe(table.larger, home(key, state[NEXT_CAPACITY]), key)
            if has_room(table, slot + NEXT):
                store_pair(table.larger, 2 * slot, key, value)
            else:  # thousands of keys with one home: no random ones, and the block is lost
                state[USED] -= 1
        elif at >= until:
            break
        at += 1
    # All that lies before an empty slot has its home before it, and nothing that lies behind has.
    store_release(state, FRONTIER, min(at, capacity))
    return at >= capacity
