"""Tests of the structures of the index: sets that share rows, and a table that grows, each
against a dict."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvlane.indexer.blocks.block_table import (
    USED,
    BlockTable,
    copy_slots,
    empty_table,
    erase_slot,
    find_slot,
    finish_growth,
    is_too_full,
    lookup_set,
    may_have_first,
    start_growth,
    write_slot,
)
from kvlane.indexer.blocks.holder_sets import (
    EMPTY_SET,
    GENERATION,
    HolderSets,
    add_references,
    drop_references,
    empty_sets,
    with_capacity,
    with_column_flipped,
)
from kvlane.indexer.epochs import CacheId, Overlap
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, Tier
from kvlane.indexer.kernels import kernel
from kvlane.indexer.native.intrinsics import allocate_zeros
from tests.harness.keyed_index import KeyedIndex, local_hashes_of

ONE = CacheId("one", 0)


# --- sets ----------------------------------------------------------------------------------------


def columns_of(sets: HolderSets, number: int) -> frozenset[int]:
    row = sets.rows[number * sets.words : (number + 1) * sets.words].tolist()
    return frozenset(
        64 * word + bit for word, bits in enumerate(row) for bit in range(64) if bits >> bit & 1
    )


@pytest.mark.parametrize("seed", range(10))
def test_equal_sets_have_one_number_through_growth_and_recycling(seed: int) -> None:
    rng = random.Random(seed)
    sets, numbers = empty_sets(rows=8), dict[frozenset[int], int]()
    columns = 3
    for _ in range(3000):
        columns = min(columns + rng.choice([0] * 30 + [1]), 130)
        sets = with_capacity(sets, 1, columns)
        base = rng.choice([frozenset[int](), *numbers])
        column = rng.randrange(columns)
        wanted = base ^ {column}
        number = with_column_flipped(sets, numbers.get(base, EMPTY_SET), column)
        if not wanted:
            assert number == EMPTY_SET
        elif wanted in numbers:
            assert number == numbers[wanted]
        else:
            add_references(sets, number, 2)
            numbers[wanted] = number
        if len(numbers) > rng.choice([5, 40]):
            gone = rng.choice(list(numbers))
            drop_references(sets, numbers[gone], 1)
            drop_references(sets, numbers.pop(gone), 1)
        assert sets.used_sets == len(numbers)
    assert all(columns_of(sets, number) == wanted for wanted, number in numbers.items())
    assert len(set(numbers.values())) == len(numbers)


def test_readers_are_notified_before_a_row_is_reused() -> None:
    sets = empty_sets(rows=4)
    before = int(sets.state[GENERATION])
    for column in range(3):
        add_references(sets, with_column_flipped(sets, EMPTY_SET, column), 1)
    drop_references(sets, with_column_flipped(sets, EMPTY_SET, 0), 1)
    assert int(sets.state[GENERATION]) == before, "the row is still as it was"
    number = with_column_flipped(sets, EMPTY_SET, 3)
    assert int(sets.state[GENERATION]) > before
    assert columns_of(sets, number) == {3}


# --- the table -----------------------------------------------------------------------------------


def changed(table: BlockTable, model: dict[int, int], rng: random.Random, known: list[int]) -> None:
    """Store a key, old or new, or take one out."""
    key = rng.choice(known) if known and rng.random() < 0.5 else rng.randrange(1, 1 << 64)
    slot, value = find_slot(table, np.uint64(key))
    assert int(value) == model.get(key, 0)
    if value and rng.random() < 0.6:
        erase_slot(table, slot)
        del model[key]
    else:
        table.state[USED] += not value
        model[key] = rng.randrange(1, 1 << 32)
        write_slot(table, slot, np.uint64(key), np.uint64(model[key]))
        known.append(key)


@pytest.mark.parametrize("seed", range(6))
def test_table_equals_a_dict_through_removals_and_growth(seed: int) -> None:
    rng = random.Random(seed)
    table, model, known = empty_table(), dict[int, int](), list[int]()
    for _ in range(6000):
        changed(table, model, rng, known)
        if not table.is_growing and is_too_full(table, 1):
            table = start_growth(table, 1)
        if table.is_growing and copy_slots(table, rng.choice([1, 7, 300])):
            table = finish_growth(table)
        for key in rng.sample(known, min(3, len(known))):
            assert int(lookup_set(table, np.uint64(key))) == model.get(key, 0)
    assert table.used == len(model)
    assert all(int(lookup_set(table, np.uint64(key))) == model.get(key, 0) for key in known)


@kernel()
def may_have(table: BlockTable, key: np.uint64) -> bool:
    return may_have_first(table, key)


@pytest.mark.parametrize("seed", range(4))
def test_first_blocks_are_tracked_through_removals_and_growth(seed: int) -> None:
    rng = random.Random(seed)
    table, model = empty_table(), dict[int, int]()
    for _ in range(4000):
        is_known = bool(model) and rng.random() < 0.4
        key = rng.choice(list(model)) if is_known else rng.randrange(1, 1 << 64)
        slot, value = find_slot(table, np.uint64(key))
        if is_known and rng.random() < 0.6:
            erase_slot(table, slot)
            del model[key]
        else:
            model[key] = min(rng.choice([0, 0, 7]), model.get(key, 7))
            table.state[USED] += not value
            write_slot(table, slot, np.uint64(key), np.uint64(model[key] << 32 | 1))
        if not table.is_growing and is_too_full(table, 1):
            table = start_growth(table, 1)
        if table.is_growing and copy_slots(table, rng.choice([1, 7, 300])):
            table = finish_growth(table)
        for known in rng.sample(list(model), min(3, len(model))):
            assert model[known] or may_have(table, np.uint64(known))
    assert all(may_have(table, np.uint64(key)) for key, position in model.items() if not position)
    if table.is_growing:
        copy_slots(table, 1 << 40)
        table = finish_growth(table)
    for key in model:
        erase_slot(table, find_slot(table, np.uint64(key))[0])
    assert not table.firsts.any()


def test_more_first_blocks_than_the_counter_holds_are_never_lost() -> None:
    table = empty_table()
    keys = [np.uint64(n + 1) for n in range(20)]
    for key in keys:
        write_slot(table, find_slot(table, key)[0], key, np.uint64(1))
    for key in keys[1:]:
        erase_slot(table, find_slot(table, key)[0])
    assert may_have(table, keys[0])


def test_first_block_stays_first_for_any_other_position() -> None:
    index = KeyedIndex()
    keys = tuple(range(5, 45))
    for worker, position in (("one", 0), ("two", 3)):
        stored = CacheEvent(EventKind.STORED, position=position, keys=keys)
        index.apply_events(0, CacheId(worker, 0), 1, 0, [CLEARED, stored])
    assert index.match_prefix(keys) == {
        CacheId(worker, 0): Overlap(len(keys)) for worker in ("one", "two")
    }
    assert min(index.blocks_of(CacheId("two", 0), Tier.DEVICE).values()) == 0


def test_arrays_of_any_size_are_aligned_for_pairs() -> None:
    for words in (2, 1 << 14):
        array = allocate_zeros(words)
        assert (len(array), array.ctypes.data % 16) == (words, 0)
        assert not array.any()
        array[-1] = 1


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [3, 600])
@pytest.mark.parametrize("zero_at", [0, 1, 2])
def test_prefix_whose_sum_is_zero_is_found_like_others(blocks: int, zero_at: int) -> None:
    totals = [random.Random(n).randrange(2, 1 << 64) for n in range(blocks)]
    totals[zero_at * (blocks // 3)] = 0
    index = KeyedIndex()
    keys = tuple(total or 1 for total in totals)
    index.apply_events(0, ONE, 1, 0, [CLEARED, CacheEvent(EventKind.STORED, keys=keys)])
    assert super(KeyedIndex, index).match_prefix(local_hashes_of(totals)) == {ONE: Overlap(blocks)}


def test_removed_block_leaves_no_trace() -> None:
    index = KeyedIndex(max_blocks=0)
    index.apply_events(0, ONE, 1, 0, [CLEARED, CacheEvent(EventKind.STORED, keys=(5, 6))])
    assert index.counters.rejected_blocks == 2
    assert index.match_prefix([5]) == {}
    assert index.block_count(ONE) == index.state_hash(0) == 0
