"""What the index is made of: sets that share rows, and a table that grows, each against a dict."""

from __future__ import annotations

import random

import numpy as np
import pytest

from indexer.events import CLEARED, Event, Kind
from indexer.lives import Holder, Overlap
from indexer.memory import zeros
from indexer.sets import EMPTY, GENERATION, Sets, new_sets, refer, release, toggled, with_room
from indexer.table import (
    USED,
    Table,
    grow,
    grown,
    held_by,
    needs_room,
    new_table,
    place,
    put,
    settled,
    take_out,
)
from tests.indexes import FastIndex, local_of

ONE = Holder("one", 0)


# --- sets ----------------------------------------------------------------------------------------


def columns_of(sets: Sets, number: int) -> frozenset[int]:
    row = sets.rows[number * sets.words : (number + 1) * sets.words].tolist()
    return frozenset(
        64 * word + bit for word, bits in enumerate(row) for bit in range(64) if bits >> bit & 1
    )


@pytest.mark.parametrize("seed", range(10))
def test_equal_sets_have_one_number_through_growth_and_recycling(seed: int) -> None:
    rng = random.Random(seed)
    sets, numbers = new_sets(rows=8), dict[frozenset[int], int]()
    columns = 3
    for _ in range(3000):
        columns = min(columns + rng.choice([0] * 30 + [1]), 130)
        sets = with_room(sets, 1, columns)
        base = rng.choice([frozenset[int](), *numbers])
        column = rng.randrange(columns)
        wanted = base ^ {column}
        number = toggled(sets, numbers.get(base, EMPTY), column)
        if not wanted:
            assert number == EMPTY
        elif wanted in numbers:
            assert number == numbers[wanted]
        else:
            refer(sets, number, 2)
            numbers[wanted] = number
        if len(numbers) > rng.choice([5, 40]):
            gone = rng.choice(list(numbers))
            release(sets, numbers[gone], 1)
            release(sets, numbers.pop(gone), 1)
        assert sets.used == len(numbers)
    assert all(columns_of(sets, number) == wanted for wanted, number in numbers.items())
    assert len(set(numbers.values())) == len(numbers)


def test_readers_are_told_before_a_row_is_used_again() -> None:
    sets = new_sets(rows=4)
    before = int(sets.state[GENERATION])
    for column in range(3):
        refer(sets, toggled(sets, EMPTY, column), 1)
    release(sets, toggled(sets, EMPTY, 0), 1)
    assert int(sets.state[GENERATION]) == before, "the row is still as it was"
    number = toggled(sets, EMPTY, 3)
    assert int(sets.state[GENERATION]) > before
    assert columns_of(sets, number) == {3}


# --- the table -----------------------------------------------------------------------------------


def changed(table: Table, model: dict[int, int], rng: random.Random, known: list[int]) -> None:
    """Store a key, old or new, or take one out."""
    key = rng.choice(known) if known and rng.random() < 0.5 else rng.randrange(1, 1 << 64)
    slot, value = place(table, np.uint64(key))
    assert int(value) == model.get(key, 0)
    if value and rng.random() < 0.6:
        take_out(table, slot)
        del model[key]
    else:
        table.state[USED] += not value
        model[key] = rng.randrange(1, 1 << 32)
        put(table, slot, np.uint64(key), np.uint64(model[key]))
        known.append(key)


@pytest.mark.parametrize("seed", range(6))
def test_a_table_holds_what_a_dict_would_through_removals_and_growth(seed: int) -> None:
    rng = random.Random(seed)
    table, model, known = new_table(), dict[int, int](), list[int]()
    for _ in range(6000):
        changed(table, model, rng, known)
        if not table.is_growing and needs_room(table, 1):
            table = grown(table, 1)
        if table.is_growing and grow(table, rng.choice([1, 7, 300])):
            table = settled(table)
        for key in rng.sample(known, min(3, len(known))):
            assert int(held_by(table, np.uint64(key))) == model.get(key, 0)
    assert table.used == len(model)
    assert all(int(held_by(table, np.uint64(key))) == model.get(key, 0) for key in known)


def test_arrays_of_any_size_begin_where_pairs_may() -> None:
    for words in (2, 1 << 14):
        array = zeros(words)
        assert (len(array), array.ctypes.data % 16) == (words, 0)
        assert not array.any()
        array[-1] = 1


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [3, 600])
@pytest.mark.parametrize("zero_at", [0, 1, 2])
def test_a_prefix_whose_sum_is_zero_is_found_like_others(blocks: int, zero_at: int) -> None:
    totals = [random.Random(n).randrange(2, 1 << 64) for n in range(blocks)]
    totals[zero_at * (blocks // 3)] = 0
    index = FastIndex()
    keys = tuple(total or 1 for total in totals)
    index.apply(0, ONE, 1, 0, [CLEARED, Event(Kind.STORED, keys=keys)])
    assert super(FastIndex, index).match(local_of(totals)) == {ONE: Overlap(blocks)}


def test_a_block_that_nothing_was_stored_of_leaves_no_trace() -> None:
    index = FastIndex(max_blocks=0)
    index.apply(0, ONE, 1, 0, [CLEARED, Event(Kind.STORED, keys=(5, 6))])
    assert index.counters.refused_blocks == 2
    assert index.match([5]) == {}
    assert index.blocks(ONE) == index.state_hash(0) == 0
