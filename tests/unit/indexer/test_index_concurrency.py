"""Tests of concurrent readers of the index, while one writer changes other blocks."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlane.indexer import index as index_module
from kvlane.indexer.blocks.block_table import (
    USED,
    BlockTable,
    empty_table,
    erase_slot,
    find_slot,
    lookup_set,
    write_slot,
)
from kvlane.indexer.epochs import CacheId, Overlap
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, Tier
from kvlane.indexer.kernels import kernel
from kvlane.indexer.native.intrinsics import load_acquire, store_release
from tests.harness.keyed_index import KeyedIndex, ScanningIndex, local_hashes_of

STEADY = [CacheId(f"steady-{n}", 0) for n in range(3)]
BLOCKS = 600
ROUNDS = 400


def steady_index(kind: type[KeyedIndex], rng: random.Random) -> tuple[KeyedIndex, list[int]]:
    """Three caches hold the prompt, each one to another depth, and will go on to."""
    index, prompt = kind(), [rng.randrange(1, 1 << 64) for _ in range(BLOCKS)]
    for n, holder in enumerate(STEADY):
        events = [CLEARED, CacheEvent(EventKind.STORED, keys=tuple(prompt[: BLOCKS // (n + 1)]))]
        index.apply_events(0, holder, 1, 0, events)
    return index, prompt


class Churn:
    """Caches that come and go: they share the prompt's beginning; much else grows and shrinks."""

    def __init__(self, index: KeyedIndex, prompt: list[int], rng: random.Random) -> None:
        self.index, self.prompt, self.rng = index, prompt, rng
        self.ids: dict[CacheId, int] = {}

    def add(self, holder: CacheId, *events: CacheEvent) -> None:
        first = self.ids.get(holder, 0)
        self.ids[holder] = first + len(events)
        self.index.apply_events(1, holder, 1, first, events)

    def round(self, number: int) -> None:
        holder = CacheId(f"churning-{number % 150}", 0)
        shared = self.prompt[: self.rng.randrange(BLOCKS)]
        own = [self.rng.randrange(1, 1 << 64) for _ in range(self.rng.choice([10, 2000]))]
        self.add(holder, CLEARED, CacheEvent(EventKind.STORED, keys=(*shared, *own)))
        if number % 2:
            self.add(holder, CacheEvent(EventKind.REMOVED, keys=tuple(reversed(own))))
        if number % 3 == 0:
            self.add(holder, CacheEvent(EventKind.REMOVED, keys=tuple(reversed(shared))))


def read(
    send: Callable[[], dict[CacheId, Overlap]], stop: threading.Event, wrong: list[object]
) -> None:
    """Look the prompt up again and again; what is steady must look so each time."""
    expected = {holder: Overlap(BLOCKS // (n + 1)) for n, holder in enumerate(STEADY)}
    reads = 0
    try:
        while not stop.is_set() and not wrong:
            found = send()
            seen = {holder: found.get(holder) for holder in STEADY}
            if seen != expected or any(overlap.total_blocks > BLOCKS for overlap in found.values()):
                wrong.append(found)
            reads += 1
    except BaseException as e:  # noqa: BLE001 - the test tells
        wrong.append(e)
    if not reads:
        wrong.append("nothing was read")


@pytest.mark.parametrize("kind", [KeyedIndex, ScanningIndex])
def test_concurrent_readers_see_unchanged_blocks_unchanged(kind: type[KeyedIndex]) -> None:
    rng = random.Random(1)
    index, prompt = steady_index(kind, rng)
    local, stop, wrong = local_hashes_of(prompt), threading.Event(), list[object]()

    def send() -> dict[CacheId, Overlap]:
        return super(KeyedIndex, index).match_prefix(local)

    readers = [threading.Thread(target=read, args=(send, stop, wrong)) for _ in range(2)]
    churn = Churn(index, prompt, rng)
    for reader in readers:
        reader.start()
    try:
        for number in range(ROUNDS):
            churn.round(number)
    finally:
        stop.set()
        for reader in readers:
            reader.join(30)
    assert not wrong
    while index.maintain(1 << 10):
        pass
    assert index.blocks_of(STEADY[0], Tier.DEVICE).keys() == set(prompt)


def test_reader_with_old_arrays_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    index, prompt = steady_index(KeyedIndex, random.Random(1))
    keys = [random.Random(1000 + n).randrange(1, 1 << 64) for n in range(140)]
    ids = dict.fromkeys(range(9), 0)

    def add(number: int, *stored: int) -> None:
        """One more bit of every number up to 140: a set each."""
        events = [CLEARED, CacheEvent(EventKind.STORED, keys=stored)]
        index.apply_events(0, CacheId(f"bit-{number}", 0), 1, ids[number], events)
        ids[number] += len(events)

    for bit in range(8):
        add(bit, *(key for n, key in enumerate(keys, 1) if n >> bit & 1))
    rows, original = len(index._views[Tier.DEVICE].sets.references), index_module.match_prefix

    def late(*args: Any) -> int:
        """The writer was quicker than this reader."""
        if not ids[8]:
            add(8, *prompt, *keys[:130])
        return original(*args)

    monkeypatch.setattr(index_module, "match_prefix", late)
    columns, found = index.match_depths(local_hashes_of(prompt))
    assert len(index._views[Tier.DEVICE].sets.references) > rows
    assert sorted(found[:, 0].tolist()) == [200, 300, 600, 600]
    assert len(columns) == 4


def test_depths_are_contiguous_by_row_for_all_tiers() -> None:
    index, keys = KeyedIndex(), (5, 6, 7)
    for worker in ("a", "b"):
        events = [
            CLEARED,
            CacheEvent(EventKind.STORED, keys=keys[:2]),
            CacheEvent(EventKind.STORED, Tier.HOST, 2, keys[2:]),
        ]
        index.apply_events(0, CacheId(worker, 0), 1, 0, events)
    _, found = index.match_depths(local_hashes_of(keys))
    assert found.tolist() == [[2, 1, 0, 0]] * 2
    assert found.flags.c_contiguous, "for another order kernels would be compiled in a decision"


def test_old_arrays_are_freed_by_the_writer_only() -> None:
    index, rng = KeyedIndex(), random.Random(1)
    reader = index._views[Tier.DEVICE]
    slots = weakref.ref(reader.table.slots)
    keys = tuple(rng.randrange(1, 1 << 64) for _ in range(100_000))
    index.apply_events(0, STEADY[0], 1, 0, [CLEARED, CacheEvent(EventKind.STORED, keys=keys)])
    index.maintain_fully()
    assert index._views[Tier.DEVICE] is not reader
    del reader
    assert slots() is not None
    index.maintain()
    assert slots() is None


def test_unread_arrays_are_freed_with_the_next_change() -> None:
    index, rng = KeyedIndex(), random.Random(1)
    slots = weakref.ref(index._views[Tier.DEVICE].table.slots)
    keys = tuple(rng.randrange(1, 1 << 64) for _ in range(100_000))
    index.apply_events(0, STEADY[0], 1, 0, [CLEARED, CacheEvent(EventKind.STORED, keys=keys)])
    index.maintain_fully()
    assert slots() is None


@kernel()
def churn(table: BlockTable, steady: Any, others: Any, present: Any, rounds: int) -> None:
    """Store and remove blocks around some that are there while `present` is odd."""
    for _ in range(rounds):
        for key in others:
            slot, _ = find_slot(table, key)
            write_slot(table, slot, key, np.uint64(5))
            table.state[USED] += 1
        for key in steady:
            slot, _ = find_slot(table, key)
            write_slot(table, slot, key, np.uint64(7))
            table.state[USED] += 1
        store_release(present, 0, present[0] + 1)
        for key in others:
            erase_slot(table, find_slot(table, key)[0])
        store_release(present, 0, present[0] + 1)
        for key in steady:
            erase_slot(table, find_slot(table, key)[0])


@kernel()
def look(table: BlockTable, steady: Any, present: Any, seen: Any, rounds: int) -> None:
    """Count lookups of what is there, and those that found nothing, or another block's set."""
    for _ in range(rounds):
        for key in steady:
            before = load_acquire(present, 0)
            if before & 1:
                number = lookup_set(table, key)
                if load_acquire(present, 0) == before:
                    seen[0] += 1
                    seen[1] += number == np.uint64(0)
                    seen[2] += number not in (np.uint64(0), np.uint64(7))


def test_moved_blocks_are_found_unchanged() -> None:
    keys = np.arange(1 << 63, (1 << 63) + 300, dtype=np.uint64)
    np.random.default_rng(1).shuffle(keys)  # all have one home, so that removals move many
    steady, others = keys[:100].copy(), keys[100:].copy()
    table, present, seen = empty_table(4000), np.zeros(1, np.int64), np.zeros(3, np.int64)
    churn(table, steady, others, present, 1)
    look(table, steady, present, seen, 1)
    writer = threading.Thread(target=churn, args=(table, steady, others, present, 4000))
    writer.start()
    while writer.is_alive():
        look(table, steady, present, seen, 50)
    writer.join()
    assert seen[0] > 0, "the threads did not meet"
    assert seen[1:].tolist() == [0, 0]
