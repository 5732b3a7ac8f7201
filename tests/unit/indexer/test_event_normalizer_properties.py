"""Tests of the event normalizer with random events and cuts: an index equals the engine's cache.

In the device tier that is the part that can be reached: blocks with a hole before them match no
prompt, and the bridge does not announce them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.indexer.block_hashes import derive_secret, local_hashes, prompt_keys
from kvlane.indexer.cache_events.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
)
from kvlane.indexer.cache_events.event_normalizer import MAX_BATCH_BLOCKS, EventNormalizer
from kvlane.indexer.epochs import CacheId, Overlap
from kvlane.indexer.events import Tier, encode_events
from tests.harness.decoded import decode_events
from workbench.reference_index import ReferenceIndex

SIZE = 2
SECRET = derive_secret(b"s")
HOLDER = CacheId("w", 0)
BLOCKS = 4
MEDIA = ("", "CPU")

Prefix = tuple[int, ...]
"""One number a block."""

PROMPTS = list(product((0, 1), repeat=BLOCKS))


def tokens_of(prefix: Prefix) -> list[int]:
    return [token for block in prefix for token in (block,) * SIZE]


def keys_of(prefix: Prefix) -> list[int]:
    keys: list[int] = prompt_keys(local_hashes(tokens_of(prefix), SIZE), SECRET).tolist()
    return keys


KEYS = {prompt[:n]: keys_of(prompt[:n])[-1] for prompt in PROMPTS for n in range(1, BLOCKS + 1)}
BEFORE = {key: KEYS.get(prefix[:-1]) for prefix, key in KEYS.items()}


class ReferenceEngine:
    """An engine that stores physical copies under hashes of its own, and remembers which."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[Prefix, int, str]] = Counter()
        """By prefix, number of the hash (a prefix may have several), and medium."""

    def hash(self, prefix: Prefix, alias: int) -> EngineHash:
        return repr((prefix, alias)).encode()

    def store(self, prefix: Prefix, start: int, alias: int, medium: str) -> EngineEvent | None:
        """Store blocks `start` and later of a prefix; nothing if their parent is not there."""
        parent = prefix[:start]
        aliases = {a for p, a, _ in +self.copies if p == parent}
        if len(prefix) <= start or (start and not aliases):
            return None
        ends = range(start + 1, len(prefix) + 1)
        for end in ends:
            self.copies[prefix[:end], alias, medium] += 1
        return BlocksStored(
            [self.hash(prefix[:end], alias) for end in ends],
            self.hash(parent, max(aliases)) if start else None,
            tokens_of(prefix[start:]),
            SIZE,
            medium,
        )

    def remove(self, which: int) -> EngineEvent | None:
        held = sorted(+self.copies)
        if not held:
            return None
        prefix, alias, medium = held[which % len(held)]
        self.copies[prefix, alias, medium] -= 1
        return BlocksRemoved([self.hash(prefix, alias)], medium)

    def clear(self) -> EngineEvent:
        self.copies.clear()
        return AllCleared()

    def held(self, medium: str) -> set[Prefix]:
        return {p for p, _, m in +self.copies if m == medium}

    def reachable(self) -> set[Prefix]:
        """What the device tier holds with everything before it."""
        held = self.held("")
        return {p for p in held if all(p[:n] in held for n in range(1, len(p)))}

    def overlap(self, prompt: Prefix) -> Overlap:
        depth, parts = 0, []
        for held in map(self.held, MEDIA):
            start = depth
            while depth < len(prompt) and prompt[: depth + 1] in held:
                depth += 1
            parts.append(depth - start)
        return Overlap(*parts)


class Chain:
    """Engine, bridge, columns and index, one behind the other."""

    def __init__(self, max_pending: int) -> None:
        self.engine = ReferenceEngine()
        self.bridge = EventNormalizer(SIZE, SECRET, max_pending=max_pending)
        self.index = ReferenceIndex()
        self.number = 1

    def feed(self, event: EngineEvent | None) -> None:
        if event is not None:
            self.bridge.on_events([event], 0.0)

    def store(self, prefix: Prefix, start: int, alias: int, medium: str) -> None:
        self.feed(self.engine.store(prefix, start, alias, medium))

    def remove(self, which: int) -> None:
        self.feed(self.engine.remove(which))

    def clear(self) -> None:
        self.feed(self.engine.clear())

    def take(self, blocks: int) -> bool:
        batch = self.bridge.take_batch(blocks)
        if batch is not None:
            events = decode_events(encode_events(batch.events))
            self.index.apply_events(0, HOLDER, self.number, batch.first_event_id, events)
            held = self.index.blocks_of(HOLDER, Tier.DEVICE)
            assert all(BEFORE[key] is None or BEFORE[key] in held for key in held), "a hole"
        return batch is not None

    def announce(self, clear: bool) -> None:
        self.bridge.start_announcement(0.0, clear=clear)

    def announce_some(self, blocks: int) -> None:
        self.bridge.continue_announcement(blocks, 0.0)

    def epoch(self) -> None:
        self.number += 1
        self.bridge.start_epoch(0.0)

    def settle(self, blocks: int) -> None:
        while self.bridge.is_announcing:
            self.announce_some(3)
        while self.take(blocks):
            pass
        for prompt in PROMPTS:
            found = self.index.match_prefix(keys_of(prompt)).get(HOLDER, Overlap())
            assert found == self.engine.overlap(prompt)
        got = [self.engine.reachable(), self.engine.held("CPU")]
        for tier, prefixes in zip(Tier, got, strict=False):
            expected = {KEYS[prefix]: len(prefix) - 1 for prefix in prefixes}
            assert self.index.blocks_of(HOLDER, tier) == expected
        assert self.bridge.held_blocks == sum(len(self.engine.held(medium)) for medium in MEDIA)
        counters = self.index.counters
        assert counters.gaps == counters.duplicate_events == 0


prefixes = st.lists(st.integers(0, 1), min_size=1, max_size=BLOCKS).map(tuple)
commands: st.SearchStrategy[list[tuple[Any, ...]]] = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"), prefixes, st.integers(0, BLOCKS - 1), st.integers(0, 2),
            st.sampled_from(MEDIA),
        ),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("announce"), st.booleans()),
        st.tuples(st.just("announce_some"), st.integers(0, 3)),
        st.tuples(st.just("epoch")),
        st.tuples(st.just("settle"), st.integers(1, 5)),
    ),
    max_size=40,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(script=commands, max_pending=st.sampled_from([2, 1000]))
def test_index_equals_the_cache_of_the_engine(
    script: list[tuple[Any, ...]], max_pending: int
) -> None:
    chain = Chain(max_pending)
    for command, *arguments in script:
        getattr(chain, command)(*arguments)
    chain.settle(MAX_BATCH_BLOCKS)


def moves_of(chain: Chain, rng: random.Random) -> list[Callable[[], object]]:
    """What may happen next, as often as it is likely."""

    def store() -> None:
        prefix = tuple(rng.randrange(2) for _ in range(rng.randint(1, BLOCKS)))
        start = rng.randrange(len(prefix))
        chain.store(prefix, start, rng.randrange(3), rng.choice(("", "", "CPU")))

    return [
        *[store] * 40,
        *[lambda: chain.remove(rng.randrange(100))] * 40,
        *[lambda: chain.take(rng.randint(1, 5))] * 20,
        *[lambda: chain.announce_some(rng.randint(0, 3))] * 20,
        lambda: chain.announce(rng.random() < 0.5),
        lambda: chain.settle(rng.randint(1, 5)),
        chain.clear,
        chain.epoch,
    ]


@pytest.mark.parametrize("seed", range(8))
def test_state_is_empty_after_all_blocks_are_removed(seed: int) -> None:
    rng = random.Random(seed)
    chain = Chain(max_pending=rng.choice([3, 20, 1000]))
    moves = moves_of(chain, rng)
    for _ in range(2000):
        rng.choice(moves)()
    chain.settle(MAX_BATCH_BLOCKS)
    while +chain.engine.copies:
        chain.remove(rng.randrange(100))
    chain.settle(MAX_BATCH_BLOCKS)
    bare = EventNormalizer(SIZE, SECRET)
    for part in ("_held", "_hash_counts", "_children", "_published", "_unannounced"):
        assert getattr(chain.bridge._mirror, part) == getattr(bare._mirror, part)
    assert not chain.bridge._copies
    assert not any(known for tiers in chain.bridge._sums.values() for known in tiers)
