"""Prefix search: depth of a prompt in each cache, from the hashes of its blocks.

A prompt is a sequence of *runs*: blocks with equal sets of holders. If every cache is *closed* (see
`indexer/index.py`), sets only shrink along the prompt; two blocks with equal sets have that set
everywhere in between. So the search probes some positions at once, since several cache misses cost
little more than one, then some in each gap between unequal neighbours, until no gap is left. If a
cache may not be closed, all blocks are scanned.

Example: of 1000 blocks the first 256 are held by A and B, the others by A alone. The first round
probes block 0, the last block of 15 groups of 64, and block 999: AB AB AB AB A … A. In the gap
between blocks 255 and 319, 7 probes divide the 63 positions; then the 7 positions of one gap are
probed. The result is two runs: AB from 0, A from 256, up to 1000.

Columns that were retired but not swept are masked out of the result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.blocks.block_table import (
    SET_MASK,
    U32,
    BlockTable,
    lookup_set,
    may_have_first,
    prefetch_slot,
)
from kvlane.indexer.blocks.holder_sets import (
    GENERATION,
    ONE,
    WORD_BITS,
    ZERO,
    HolderSets,
    has_column,
)
from kvlane.indexer.blocks.prefix_keys import (
    GROUP_BLOCKS,
    GROUP_SHIFT,
    TIERS,
    KeyConstants,
    SearchScratch,
    compute_total,
    fill_group,
    first_key,
    key_at,
    sum_of_addends,
)
from kvlane.indexer.kernels import inlined, kernel
from kvlane.indexer.native.intrinsics import fence, load_acquire, trailing_zeros

FIRST_PROBES, PROBES_PER_GAP = 15, 7
"""Probes made at once: in the first round, if there are that many groups, and in each gap. A round
costs about one miss, a probe a tenth of that."""
SCAN_THRESHOLD = 24
"""Longest prompt, in blocks, that is always scanned: its lookups run at once anyway."""
SCAN_PREFETCH = 20
"""Prefetch distance of a scan, in blocks."""
RETRY = -1
NO_SET = np.uint64(1 << 63)
"""A number that no set has."""


@kernel()
def match_prefix(
    table: BlockTable,
    sets: HolderSets,
    alive: NDArray[np.uint64],
    constants: KeyConstants,
    local: NDArray[np.uint64],
    is_closed: bool,
    scratch: SearchScratch,
) -> int:
    """Write the live columns that hold the first block, and their leading blocks, to
    `scratch.columns` and `scratch.depths`; returns their number, or RETRY when sets were recycled.
    `local`: u64, the hashes of at least one block. `alive`: u64 (words), the live columns."""
    if is_closed and not may_have_first(table, first_key(constants, local)):
        return 0
    generation = load_acquire(sets.state, GENERATION)
    if is_closed and len(local) > SCAN_THRESHOLD:
        points, runs, end = search_closed(table, constants, local, scratch)
    else:
        points, runs, end = scan_blocks(table, constants, local, scratch)
    count = column_depths(sets, alive, points, runs, end, scratch)
    fence()
    return count if load_acquire(sets.state, GENERATION) == generation else RETRY


# --- runs -----------------------------------------------------------------------------------------


@inlined
def pack_point(position: int, number: np.uint64) -> np.uint64:
    return (np.uint64(position) << U32) | number


@inlined
def position_of(packed: np.uint64) -> int:
    return np.int64(packed >> U32)


@kernel()
def scan_blocks(
    table: BlockTable, constants: KeyConstants, local: NDArray[np.uint64], scratch: SearchScratch
) -> tuple[NDArray[np.uint64], int, int]:
    """Look up every block; returns the first point of each run, their number, and the position of
    the first block without holders."""
    blocks, runs, last = len(local), 0, ZERO
    scratch.sums[0] = ZERO
    fill_group(constants, local, scratch, 0)
    for position in range(min(SCAN_PREFETCH, blocks)):
        prefetch_slot(table, key_at(scratch, position))
    for position in range(blocks):
        coming = position + SCAN_PREFETCH
        if coming < blocks:
            if coming & (GROUP_BLOCKS - 1) == 0:
                fill_group(constants, local, scratch, coming >> GROUP_SHIFT)
            prefetch_slot(table, key_at(scratch, coming))
        number = lookup_set(table, key_at(scratch, position))
        if number != last:
            if number == ZERO:
                return scratch.points, runs, position
            scratch.points[runs] = pack_point(position, number)
            runs += 1
            last = number
        elif number == ZERO:
            return scratch.points, 0, 0
    return scratch.points, runs, blocks


@kernel()
def search_closed(
    table: BlockTable, constants: KeyConstants, local: NDArray[np.uint64], scratch: SearchScratch
) -> tuple[NDArray[np.uint64], int, int]:
    """The same result as `scan_blocks`, if all caches are closed."""
    blocks, last = len(local), len(local) - 1
    points, spare = scratch.points, scratch.spare
    prefetch_slot(table, first_key(constants, local))
    sum_groups(constants, local, scratch)
    compute_total(constants, local, scratch, last, 0)
    prefetch_slot(table, key_at(scratch, last))
    most = FIRST_PROBES if blocks > GROUP_BLOCKS else PROBES_PER_GAP
    spread = prefetch_between(table, constants, local, scratch, 0, last, most)
    number = lookup_set(table, key_at(scratch, 0))
    if number == ZERO:
        return points, 0, 0
    points[0] = pack_point(0, number)
    at_end = lookup_set(table, key_at(scratch, last))
    if at_end == number:
        return points, 1, blocks
    count = probe_between(table, scratch, points, 1, 0, last, spread)
    if points[count - 1] & SET_MASK != ZERO:
        count = append_point(points, count, last, at_end)
    while prefetch_gaps(table, constants, local, scratch, points, count):
        count = probe_gaps(table, scratch, points, count, spare)
        points, spare = spare, points
    return compact_runs(points, count, blocks)


@inlined
def sum_groups(constants: KeyConstants, local: NDArray[np.uint64], scratch: SearchScratch) -> None:
    """Sum up the whole groups; of the first one, compute all totals."""
    scratch.sums[0] = ZERO
    fill_group(constants, local, scratch, 0)
    for group in range(1, len(local) >> GROUP_SHIFT):
        start = group << GROUP_SHIFT
        scratch.sums[group + 1] = scratch.sums[group] + sum_of_addends(
            constants, local, start, start + GROUP_BLOCKS
        )


@inlined
def probe_range(low: int, high: int) -> tuple[int, int, int]:
    """Positions to probe between two blocks: first number, shift of a number, count. The last
    blocks of whole groups if there are any, since their totals are known; else all."""
    start = (low + 1) >> GROUP_SHIFT
    groups = (high >> GROUP_SHIFT) - start
    if groups > 0:
        return start, GROUP_SHIFT, groups
    return low, 0, high - low - 1


@inlined
def probe_stride(inside: int, spread: int) -> np.uint64:
    """Distance between `spread` evenly spaced probes, times 2^32."""
    return ((np.uint64(inside + 1) << U32) + np.uint64(spread)) // np.uint64(spread + 1)


@inlined
def probe_position(start: int, shift: int, k: int, stride: np.uint64) -> int:
    """Position of the k-th probe, from 1 on. Without a division, which would be slower."""
    number = start + np.int64((np.uint64(k) * stride) >> U32)
    return (number << shift) - (1 if shift else 0)


@inlined
def prefetch_between(
    table: BlockTable,
    constants: KeyConstants,
    local: NDArray[np.uint64],
    scratch: SearchScratch,
    low: int,
    high: int,
    most: int,
) -> int:
    """Prefetch up to `most` blocks between two; returns their number."""
    start, shift, inside = probe_range(low, high)
    spread = min(inside, most)
    stride, known = probe_stride(inside, spread), low
    for k in range(1, spread + 1):
        position = probe_position(start, shift, k, stride)
        compute_total(constants, local, scratch, position, known)
        prefetch_slot(table, key_at(scratch, position))
        known = position
    return spread


@inlined
def probe_between(
    table: BlockTable,
    scratch: SearchScratch,
    points: NDArray[np.uint64],
    count: int,
    low: int,
    high: int,
    spread: int,
) -> int:
    """Look up the prefetched blocks, up to one without holders; returns the number of points."""
    start, shift, inside = probe_range(low, high)
    stride = probe_stride(inside, spread)
    for k in range(1, spread + 1):
        position = probe_position(start, shift, k, stride)
        number = lookup_set(table, key_at(scratch, position))
        count = append_point(points, count, position, number)
        if number == ZERO:
            break
    return count


@inlined
def append_point(points: NDArray[np.uint64], count: int, position: int, number: np.uint64) -> int:
    """Append a point; of equal neighbours, only the first and the last are kept."""
    if (
        count >= 2
        and points[count - 1] & SET_MASK == number
        and points[count - 2] & SET_MASK == number
    ):
        points[count - 1] = pack_point(position, number)
        return count
    points[count] = pack_point(position, number)
    return count + 1


@inlined
def is_gap(low: np.uint64, high: np.uint64) -> bool:
    """Whether the set may change before the second of two points."""
    return low & SET_MASK != high & SET_MASK and position_of(high) - position_of(low) > 1


@kernel()
def prefetch_gaps(
    table: BlockTable,
    constants: KeyConstants,
    local: NDArray[np.uint64],
    scratch: SearchScratch,
    points: NDArray[np.uint64],
    count: int,
) -> bool:
    """Prefetch the probes of the next round; False if no gap is left."""
    is_any = False
    for k in range(count - 1):
        if is_gap(points[k], points[k + 1]):
            low, high = position_of(points[k]), position_of(points[k + 1])
            prefetch_between(table, constants, local, scratch, low, high, PROBES_PER_GAP)
            is_any = True
    return is_any


@kernel()
def probe_gaps(
    table: BlockTable,
    scratch: SearchScratch,
    points: NDArray[np.uint64],
    count: int,
    out: NDArray[np.uint64],
) -> int:
    """One more round: the points, and the probes in the gaps; up to a block without holders."""
    size = 0
    for k in range(count):
        low, number = position_of(points[k]), points[k] & SET_MASK
        size = append_point(out, size, low, number)
        if number == ZERO or k + 1 == count:
            break
        if is_gap(points[k], points[k + 1]):
            high = position_of(points[k + 1])
            _, _, inside = probe_range(low, high)
            size = probe_between(table, scratch, out, size, low, high, min(inside, PROBES_PER_GAP))
            if out[size - 1] & SET_MASK == ZERO:
                break
    return size


@inlined
def compact_runs(
    points: NDArray[np.uint64], count: int, blocks: int
) -> tuple[NDArray[np.uint64], int, int]:
    """Keep the first point of each run, in place; also their number and the end of the last."""
    runs, last = 0, ZERO
    for k in range(count):
        number = points[k] & SET_MASK
        if number == ZERO:
            return points, runs, position_of(points[k])
        if number != last:
            points[runs] = points[k]
            runs += 1
            last = number
    return points, runs, blocks


# --- depths ---------------------------------------------------------------------------------------


@kernel()
def column_depths(
    sets: HolderSets,
    alive: NDArray[np.uint64],
    points: NDArray[np.uint64],
    runs: int,
    end: int,
    scratch: SearchScratch,
) -> int:
    """Write each live column that holds the first block, and its depth, to the scratch memory."""
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
            count = _append_columns(gone, word, position_of(points[run]), scratch, count)
    for word in range(sets.words):
        count = _append_columns(scratch.row[word], word, end, scratch, count)
    return count


@inlined
def _is_known(sets: HolderSets, packed: np.uint64) -> bool:
    """Whether a set existed in these arrays: rows are reallocated when they grow."""
    return np.int64(packed & SET_MASK) < len(sets.references)


@inlined
def _append_columns(
    bits: np.uint64, word: int, depth: int, scratch: SearchScratch, count: int
) -> int:
    """Append the columns of a word, with their depth."""
    while bits != ZERO:
        scratch.columns[count] = WORD_BITS * word + trailing_zeros(bits)
        scratch.depths[TIERS * count] = depth
        count += 1
        bits &= bits - ONE
    return count


@kernel()
def extend_to_lower_tier(
    table: BlockTable,
    sets: HolderSets,
    alive: NDArray[np.uint64],
    constants: KeyConstants,
    local: NDArray[np.uint64],
    depth: NDArray[np.int64],
    scratch: SearchScratch,
) -> int:
    """Extend the depth of each live column (`depth`: i64 by column) into a lower tier, in place.
    Lower tiers are not closed, so each block is looked up. Returns 0, or RETRY, with invalid
    depths, when sets were recycled."""
    generation = load_acquire(sets.state, GENERATION)
    runs = all_runs(table, constants, local, scratch)
    for run in range(runs):
        if not _is_known(sets, scratch.points[run]):
            return RETRY
    for word in range(sets.words):
        bits = alive[word]
        while bits != ZERO:
            column = WORD_BITS * word + trailing_zeros(bits)
            bits &= bits - ONE
            depth[column] = depth_in_tier(sets, column, depth[column], scratch.points, runs)
    fence()
    return 0 if load_acquire(sets.state, GENERATION) == generation else RETRY


@kernel()
def all_runs(
    table: BlockTable, constants: KeyConstants, local: NDArray[np.uint64], scratch: SearchScratch
) -> int:
    """Runs of the whole prompt, including blocks without holders, and a point at its end."""
    blocks, runs, last = len(local), 0, NO_SET
    scratch.sums[0] = ZERO
    for group in range((blocks + GROUP_BLOCKS - 1) >> GROUP_SHIFT):
        fill_group(constants, local, scratch, group)
    for position in range(blocks):
        if position + SCAN_PREFETCH < blocks:
            prefetch_slot(table, key_at(scratch, position + SCAN_PREFETCH))
        number = lookup_set(table, key_at(scratch, position))
        if number != last:
            scratch.points[runs] = pack_point(position, number)
            runs += 1
            last = number
    scratch.points[runs] = pack_point(blocks, ZERO)
    return runs


@inlined
def depth_in_tier(
    sets: HolderSets, column: int, depth: int, points: NDArray[np.uint64], runs: int
) -> int:
    """The first block from `depth` on that the column does not hold."""
    for run in range(runs):
        following = position_of(points[run + 1])
        if following > depth:
            if not has_column(sets, np.int64(points[run] & SET_MASK), column):
                break
            depth = following
    return depth
