"""Tests of the fast index against the reference: random logs, every answer compared."""

from __future__ import annotations

import random

import pytest

from kvlane.indexer.epochs import CacheId
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, Tier
from tests.harness.keyed_index import KeyedIndex, ScanningIndex
from workbench.reference_index import ReferenceIndex

WORKERS = [f"worker-{n}" for n in range(70)]


class Trees:
    """Keys of prompts that share beginnings, each one known by the prefix it ends."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.prompts: list[list[int]] = []

    def prompt(self, blocks: int) -> list[int]:
        start = self.rng.choice(self.prompts) if self.prompts and self.rng.random() < 0.7 else []
        shared = start[: self.rng.randint(0, len(start))]
        fresh = [self.rng.randrange(1, 1 << 64) for _ in range(max(blocks - len(shared), 1))]
        self.prompts.append(shared + fresh)
        return self.prompts[-1]


class Both:
    """Two indexes that are fed alike."""

    def __init__(self, fast: type[KeyedIndex], max_blocks: int = 1 << 24) -> None:
        self.fast = fast(max_blocks=max_blocks)
        self.plain = ReferenceIndex(max_blocks=max_blocks)
        self.ids: dict[tuple[CacheId, int], int] = {}

    def do(self, name: str, *args: object) -> None:
        getattr(self.fast, name)(*args)
        getattr(self.plain, name)(*args)

    def add(self, holder: CacheId, epoch: int, events: list[CacheEvent], skip: int = 0) -> None:
        first = self.ids.get((holder, epoch), 0) + skip
        self.ids[holder, epoch] = max(first + len(events), self.ids.get((holder, epoch), 0))
        self.do("apply_events", partition_of(holder), holder, epoch, first, events)

    def check_answers(self, prompts: list[list[int]]) -> None:
        for keys in prompts:
            assert self.fast.match_prefix(keys) == self.plain.match_prefix(keys)

    def check(self, prompts: list[list[int]]) -> None:
        self.check_answers(prompts)
        assert self.fast.cache_sizes() == self.plain.cache_sizes()
        assert self.fast.counters == self.plain.counters
        for partition in range(3):
            assert self.fast.state_hash(partition) == self.plain.state_hash(partition)

    def check_entries(self) -> None:
        for holder in self.plain.cache_sizes():
            for tier in Tier:
                assert self.fast.blocks_of(holder, tier) == self.plain.blocks_of(holder, tier)


def partition_of(holder: CacheId) -> int:
    return int(holder.worker.rpartition("-")[2]) % 3


def some_events(rng: random.Random, trees: Trees, blocks: int, *, tiers: int) -> list[CacheEvent]:
    """A few events as a log may hold them: runs with holes, of any order, twice, of any tier."""
    events = []
    for _ in range(rng.randint(1, 4)):
        keys = trees.prompt(rng.randint(1, blocks))
        start = 0 if rng.random() < 0.8 else rng.randrange(len(keys))
        end = len(keys) if rng.random() < 0.5 else rng.randint(start, len(keys))
        tier = Tier(rng.randrange(tiers))
        if rng.random() < 0.6:
            events.append(CacheEvent(EventKind.STORED, tier, start, tuple(keys[start:end])))
        else:
            gone = keys[start:end]
            rng.shuffle(gone)
            events.append(CacheEvent(EventKind.REMOVED, tier, 0, tuple(gone)))
    if rng.random() < 0.1:
        events.insert(rng.randint(0, len(events)), CLEARED)
    return events


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("tiers", [1, 4])
def test_random_logs_leave_both_indexes_equal(seed: int, tiers: int) -> None:
    rng = random.Random(f"{seed} {tiers}")
    trees, both = Trees(rng), Both(ScanningIndex, rng.choice([50, 1 << 24]))
    epochs = dict.fromkeys(WORKERS, 1)
    workers = WORKERS[: rng.choice([2, 8, 70])]
    blocks = rng.choice([3, 40, 300])
    for step in range(60):
        worker = rng.choice(workers)
        holder, dice = CacheId(worker, rng.randrange(2)), rng.random()
        partition = partition_of(holder)
        if dice < 0.8:
            events = some_events(rng, trees, blocks, tiers=tiers)
            both.add(holder, epochs[worker], events, skip=rng.choice([0] * 20 + [-2, 3]))
        elif dice < 0.85:
            epochs[worker] += rng.choice([0, 1])
            both.add(holder, epochs[worker], [CLEARED])
        elif dice < 0.88:
            both.do("end_epoch", partition, worker, epochs[worker])
            epochs[worker] += 1
        elif dice < 0.9:
            both.do("drop_worker", partition, worker)
        elif dice < 0.92:
            both.do("drop_partition", partition)
        elif dice < 0.94:
            both.do("on_heartbeat", partition, holder, epochs[worker], rng.randint(0, 300))
        elif dice < 0.97:
            data = both.fast.snapshot(partition)
            plain = both.plain.snapshot(partition)
            both.fast.restore(partition, data)
            both.plain.restore(partition, plain)
        else:
            both.fast.maintain(rng.choice([1 << 8, 1 << 20]))
        sent = rng.sample(trees.prompts, min(4, len(trees.prompts)))
        both.check_answers([*sent, trees.prompt(rng.randint(1, blocks))])
        if step % 10 == 9:
            both.check(sent)
            both.check_entries()


@pytest.mark.parametrize("seed", range(20))
def test_closed_caches_are_searched_as_they_would_be_scanned(seed: int) -> None:
    rng = random.Random(seed)
    trees, both = Trees(rng), Both(KeyedIndex)
    held: dict[CacheId, list[list[int]]] = {}
    for _ in range(80):
        holder = CacheId(rng.choice(WORKERS[: rng.choice([4, 70])]), 0)
        known = held.setdefault(holder, [])
        if not known:
            both.add(holder, 1, [CLEARED])
        if rng.random() < 0.7 or not known:
            keys = trees.prompt(rng.choice([1, 30, 200, 900]))
            known.append(keys)
            both.add(holder, 1, [CacheEvent(EventKind.STORED, Tier.DEVICE, 0, tuple(keys))])
        else:
            # All prompts that share what goes lose their ends, so that no hole is left.
            keys = rng.choice(known)
            kept = rng.randint(0, len(keys))
            gone = set(keys[kept:])
            ends = [key for other in known for key in reversed(other) if set(other) & gone]
            stays = {key for other in known if not set(other) & gone for key in other}
            removed = tuple(dict.fromkeys(key for key in ends if key not in stays))
            both.add(holder, 1, [CacheEvent(EventKind.REMOVED, Tier.DEVICE, 0, removed)])
            held[holder] = [other for other in known if not set(other) & gone]
        both.check(rng.sample(trees.prompts, min(5, len(trees.prompts))))
