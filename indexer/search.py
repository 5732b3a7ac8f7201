"""How much of a prompt each cache holds: from the hashes of its blocks to depths, by column.

A prompt is seen as *runs* of blocks with equal sets of holders. Where every cache that holds a
block holds all blocks before it (*closed*, see `indexer/index.py`), sets only get smaller along a
prompt; two blocks with equal sets then have that set everywhere in between, and a search finds the
few places where sets change without looking at the blocks in between: some positions are probed at
once, then some in each gap between unequal neighbours, until no gap is left. A probe costs a miss
of the cache, 150-220 ns, but probes made at once cost little more than one of them. Without that
promise all blocks are scanned, at 8-10 ns each.

For example, of 1000 blocks the first 256 are held by A and B, the others by A alone. The first
round looks at block 0, at the last block of 15 groups of 64, and at block 999: AB AB AB AB A … A.
One gap is left, between blocks 255 and 319, whose 63 places are divided by 6; then a gap of 9 is
looked through. Two runs come out: AB from 0 on, A from 256 on, up to 1000.

Columns that were retired but not swept do not disturb this. They are masked out of the result; for
the others sets still only get smaller, and equal sets still have equal live columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.kernels import inlined, kernel
from indexer.memory import fence, load_acquire, trailing_zeros
from indexer.prefixes import (
    GROUP,
    GROUP_SHIFT,
    Mixing,
    Scratch,
    added,
    fill,
    find_total,
    key_at,
)
from indexer.sets import GENERATION, NOTHING, ONE, WORD_BITS, Sets, has
from indexer.table import SET_MASK, U32, Table, expect, held_by

SOON = 16
"""Groups that are summed up while the first block is loaded; of longer prompts none, since most
prompts are new to everybody."""
FIRST_FAN, FAN = 15, 6
"""Probes made at once, in the first round and in each gap. A round costs about one miss, a probe a
tenth of that; prompts of 1000 blocks take 3 rounds so, of 8000 blocks 4."""
FEW = 24
"""Prompts of up to so many blocks are scanned: their probes are all made at once then, too."""
SCAN_AHEAD = 20
"""Blocks that are being loaded while a scan looks at one."""
RETRY = -1
NO_SET = np.uint64(1 << 63)
"""The number of no set at all."""


@kernel()
def match(
    table: Table,
    sets: Sets,
    alive: NDArray[np.uint64],
    mixing: Mixing,
    local: NDArray[np.uint64],
    is_closed: bool,
    scratch: Scratch,
) -> int:
    """How many leading blocks each live column holds, into `scratch.out`; how many columns do.

    `local`: u64, the hashes of the blocks; at least one. `alive`: u64 (words), the columns that
    count. RETRY when sets were recycled meanwhile.
    """
    generation = load_acquire(sets.state, GENERATION)
    if is_closed and len(local) > FEW:
        points, runs, end = search(table, mixing, local, scratch)
    else:
        points, runs, end = scan(table, mixing, local, scratch)
    count = depths(sets, alive, points, runs, end, scratch)
    fence()
    return count if load_acquire(sets.state, GENERATION) == generation else RETRY


# --- runs -----------------------------------------------------------------------------------------


@inlined
def point(position: int, number: np.uint64) -> np.uint64:
    """A position with its set."""
    return (np.uint64(position) << U32) | number


@inlined
def position_of(packed: np.uint64) -> int:
    """The position of a point."""
    return np.int64(packed >> U32)


@kernel()
def scan(
    table: Table, mixing: Mixing, local: NDArray[np.uint64], scratch: Scratch
) -> tuple[NDArray[np.uint64], int, int]:
    """The first points of all runs up to a block that nobody holds, their number, that block."""
    blocks, runs, last = len(local), 0, NOTHING
    scratch.sums[0] = NOTHING
    fill(mixing, local, scratch, 0)
    for position in range(min(SCAN_AHEAD, blocks)):
        expect(table, key_at(scratch, position))
    for position in range(blocks):
        coming = position + SCAN_AHEAD
        if coming < blocks:
            if coming & (GROUP - 1) == 0:
                fill(mixing, local, scratch, coming >> GROUP_SHIFT)
            expect(table, key_at(scratch, coming))
        number = held_by(table, key_at(scratch, position))
        if number != last:
            if number == NOTHING:
                return scratch.points, runs, position
            scratch.points[runs] = point(position, number)
            runs += 1
            last = number
        elif number == NOTHING:
            return scratch.points, 0, 0
    return scratch.points, runs, blocks


@kernel()
def search(
    table: Table, mixing: Mixing, local: NDArray[np.uint64], scratch: Scratch
) -> tuple[NDArray[np.uint64], int, int]:
    """As `scan`, of a prompt whose holders are closed."""
    blocks = len(local)
    if not begin(table, mixing, local, scratch):
        return scratch.points, 0, 0
    points, spare = scratch.points, scratch.spare
    last = blocks - 1
    spread = expect_between(table, mixing, local, scratch, 0, last, FIRST_FAN)
    find_total(mixing, local, scratch, last, 0)
    expect(table, key_at(scratch, last))
    number = held_by(table, key_at(scratch, 0))
    if number == NOTHING:
        return points, 0, 0
    count = emit(points, 0, 0, number)
    count = probe_between(table, scratch, points, count, 0, last, spread)
    if points[count - 1] & SET_MASK != NOTHING:
        count = emit(points, count, last, held_by(table, key_at(scratch, last)))
    while expect_gaps(table, mixing, local, scratch, points, count):
        count = probe_gaps(table, scratch, points, count, spare)
        points, spare = spare, points
    return first_points(points, count, blocks)


@inlined
def begin(table: Table, mixing: Mixing, local: NDArray[np.uint64], scratch: Scratch) -> bool:
    """Sum up the groups; False, early, when nobody holds the first block."""
    groups = len(local) >> GROUP_SHIFT  # whole ones
    scratch.sums[0] = NOTHING
    fill(mixing, local, scratch, 0)
    expect(table, key_at(scratch, 0))
    if groups > SOON and held_by(table, key_at(scratch, 0)) == NOTHING:
        return False
    for group in range(1, groups):
        start = group << GROUP_SHIFT
        scratch.sums[group + 1] = scratch.sums[group] + added(mixing, local, start, start + GROUP)
    return groups > SOON or held_by(table, key_at(scratch, 0)) != NOTHING


@inlined
def places(low: int, high: int) -> tuple[int, int, int]:
    """Where to look between two blocks: from which number on, the shift of a number, how many.

    The last blocks of groups, if there are any, since their totals are there; else all.
    """
    start = (low + 1) >> GROUP_SHIFT
    groups = (high >> GROUP_SHIFT) - start
    if groups > 0:
        return start, GROUP_SHIFT, groups
    return low, 0, high - low - 1


@inlined
def stride_of(inside: int, spread: int) -> np.uint64:
    """How far apart `spread` of the places inside stand, evenly, times 2^32."""
    return ((np.uint64(inside + 1) << U32) + np.uint64(spread)) // np.uint64(spread + 1)


@inlined
def place_at(start: int, shift: int, k: int, stride: np.uint64) -> int:
    """The k-th of them, from 1 on. Divisions would take longer."""
    number = start + np.int64((np.uint64(k) * stride) >> U32)
    return (number << shift) - (1 if shift else 0)


@inlined
def expect_between(
    table: Table,
    mixing: Mixing,
    local: NDArray[np.uint64],
    scratch: Scratch,
    low: int,
    high: int,
    most: int,
) -> int:
    """Begin to load so many blocks between two, at most; how many there are."""
    start, shift, inside = places(low, high)
    spread = min(inside, most)
    stride, known = stride_of(inside, spread), low
    for k in range(1, spread + 1):
        position = place_at(start, shift, k, stride)
        find_total(mixing, local, scratch, position, known)
        expect(table, key_at(scratch, position))
        known = position
    return spread


@inlined
def probe_between(
    table: Table,
    scratch: Scratch,
    points: NDArray[np.uint64],
    count: int,
    low: int,
    high: int,
    spread: int,
) -> int:
    """Append the blocks that were expected, up to a free one; how many points there are then."""
    start, shift, inside = places(low, high)
    stride = stride_of(inside, spread)
    for k in range(1, spread + 1):
        position = place_at(start, shift, k, stride)
        number = held_by(table, key_at(scratch, position))
        count = emit(points, count, position, number)
        if number == NOTHING:
            break
    return count


@inlined
def emit(points: NDArray[np.uint64], count: int, position: int, number: np.uint64) -> int:
    """Append a point; of equal neighbours only the first and the last are kept."""
    if (
        count >= 2
        and points[count - 1] & SET_MASK == number
        and points[count - 2] & SET_MASK == number
    ):
        points[count - 1] = point(position, number)
        return count
    points[count] = point(position, number)
    return count + 1


@inlined
def is_gap(low: np.uint64, high: np.uint64) -> bool:
    """Whether the set changes between two points, and not just at the second one."""
    return low & SET_MASK != high & SET_MASK and position_of(high) - position_of(low) > 1


@kernel()
def expect_gaps(
    table: Table,
    mixing: Mixing,
    local: NDArray[np.uint64],
    scratch: Scratch,
    points: NDArray[np.uint64],
    count: int,
) -> bool:
    """Begin to load what the next round will look at; False when no gap is left."""
    is_any = False
    for k in range(count - 1):
        if is_gap(points[k], points[k + 1]):
            low, high = position_of(points[k]), position_of(points[k + 1])
            expect_between(table, mixing, local, scratch, low, high, FAN)
            is_any = True
    return is_any


@kernel()
def probe_gaps(
    table: Table,
    scratch: Scratch,
    points: NDArray[np.uint64],
    count: int,
    out: NDArray[np.uint64],
) -> int:
    """Another round: the points with those in the gaps between them; up to a free block."""
    size = 0
    for k in range(count):
        low, number = position_of(points[k]), points[k] & SET_MASK
        size = emit(out, size, low, number)
        if number == NOTHING or k + 1 == count:
            break
        if is_gap(points[k], points[k + 1]):
            high = position_of(points[k + 1])
            _, _, inside = places(low, high)
            size = probe_between(table, scratch, out, size, low, high, min(inside, FAN))
            if out[size - 1] & SET_MASK == NOTHING:
                break
    return size


@inlined
def first_points(
    points: NDArray[np.uint64], count: int, blocks: int
) -> tuple[NDArray[np.uint64], int, int]:
    """Keep of each run its first point, in place; their number, and where the last one ends."""
    runs, last = 0, NOTHING
    for k in range(count):
        number = points[k] & SET_MASK
        if number == NOTHING:
            return points, runs, position_of(points[k])
        if number != last:
            points[runs] = points[k]
            runs += 1
            last = number
    return points, runs, blocks


# --- depths ---------------------------------------------------------------------------------------


@kernel()
def depths(
    sets: Sets,
    alive: NDArray[np.uint64],
    points: NDArray[np.uint64],
    runs: int,
    end: int,
    scratch: Scratch,
) -> int:
    """Where each live column that holds the first block ends, into `scratch.out`."""
    count = 0
    if runs == 0:
        return count
    if not _is_known(sets, points[0]):
        return RETRY
    at = np.int64(points[0] & SET_MASK) * sets.words
    for word in range(sets.words):
        scratch.row[word] = sets.rows[at + word] & alive[word]
    for run in range(1, runs):
        if not _is_known(sets, points[run]):
            return RETRY
        at = np.int64(points[run] & SET_MASK) * sets.words
        for word in range(sets.words):
            still = scratch.row[word] & sets.rows[at + word]
            gone = scratch.row[word] ^ still
            scratch.row[word] = still
            count = _list(gone, word, position_of(points[run]), scratch.out, count)
    for word in range(sets.words):
        count = _list(scratch.row[word], word, end, scratch.out, count)
    return count


@inlined
def _is_known(sets: Sets, packed: np.uint64) -> bool:
    """Whether a set was there when the search began: rows move when they need more room."""
    return np.int64(packed & SET_MASK) < len(sets.references)


@inlined
def _list(bits: np.uint64, word: int, depth: int, out: NDArray[np.uint64], count: int) -> int:
    """Append the columns of a word with their depth."""
    while bits != NOTHING:
        out[count] = (np.uint64(WORD_BITS * word + trailing_zeros(bits)) << U32) | np.uint64(depth)
        count += 1
        bits &= bits - ONE
    return count


@kernel()
def deepen(
    table: Table,
    sets: Sets,
    alive: NDArray[np.uint64],
    mixing: Mixing,
    local: NDArray[np.uint64],
    depth: NDArray[np.int64],
    scratch: Scratch,
) -> int:
    """Go on in a lower tier from where each live column's depth ends, in place.

    `depth`: i64 by column. Tiers below the first are not closed: each block is looked at. RETRY,
    with depths that say nothing, when sets were recycled meanwhile; else 0.
    """
    generation = load_acquire(sets.state, GENERATION)
    runs = all_runs(table, mixing, local, scratch)
    for run in range(runs):
        if not _is_known(sets, scratch.points[run]):
            return RETRY
    for word in range(sets.words):
        bits = alive[word]
        while bits != NOTHING:
            column = WORD_BITS * word + trailing_zeros(bits)
            bits &= bits - ONE
            depth[column] = reached(sets, column, depth[column], scratch.points, runs)
    fence()
    return 0 if load_acquire(sets.state, GENERATION) == generation else RETRY


@kernel()
def all_runs(table: Table, mixing: Mixing, local: NDArray[np.uint64], scratch: Scratch) -> int:
    """The runs of the whole prompt, blocks that nobody holds among them, and a point at its end."""
    blocks, runs, last = len(local), 0, NO_SET
    scratch.sums[0] = NOTHING
    for group in range((blocks + GROUP - 1) >> GROUP_SHIFT):
        fill(mixing, local, scratch, group)
    for position in range(blocks):
        if position + SCAN_AHEAD < blocks:
            expect(table, key_at(scratch, position + SCAN_AHEAD))
        number = held_by(table, key_at(scratch, position))
        if number != last:
            scratch.points[runs] = point(position, number)
            runs += 1
            last = number
    scratch.points[runs] = point(blocks, NOTHING)
    return runs


@inlined
def reached(sets: Sets, column: int, depth: int, points: NDArray[np.uint64], runs: int) -> int:
    """The first block from `depth` on that the column does not hold."""
    for run in range(runs):
        following = position_of(points[run + 1])
        if following > depth:
            if not has(sets, np.int64(points[run] & SET_MASK), column):
                break
            depth = following
    return depth
