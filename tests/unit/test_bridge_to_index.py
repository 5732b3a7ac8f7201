"""Whatever an engine does, and however batches are cut: an index ends up with what it holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.bridge import BATCH_BLOCKS, Bridge
from indexer.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
)
from indexer.events import decode, encode
from indexer.hashing import local_hashes
from indexer.keys import derive, prompt_keys
from indexer.reference import Holder, Overlap, ReferenceIndex

SIZE = 2
SECRET = derive(b"s")
HOLDER = Holder("w", 0)
PROMPTS = ([0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1])


class PlainEngine:
    """An engine that stores physical copies under hashes of its own, and remembers which."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[tuple[int, ...], str]] = Counter()

    def hash(self, prefix: tuple[int, ...]) -> EngineHash:
        return repr(prefix).encode()

    def store(self, prefix: tuple[int, ...], start: int, medium: str) -> EngineEvent | None:
        """Store blocks `start` and later of a prefix; nothing if their parent is not there."""
        parent = prefix[: start * SIZE]
        if start and not any(self.copies[parent, m] for m in ("", "CPU")):
            return None
        ends = range((start + 1) * SIZE, len(prefix) + 1, SIZE)
        if not ends:
            return None
        for end in ends:
            self.copies[prefix[:end], medium] += 1
        return BlocksStored(
            [self.hash(prefix[:end]) for end in ends],
            self.hash(parent) if start else None,
            list(prefix[start * SIZE :]),
            SIZE,
            medium,
        )

    def remove(self, which: int) -> EngineEvent | None:
        held = sorted(+self.copies)
        if not held:
            return None
        prefix, medium = held[which % len(held)]
        self.copies[prefix, medium] -= 1
        return BlocksRemoved([self.hash(prefix)], medium)

    def clear(self) -> EngineEvent:
        self.copies.clear()
        return AllCleared()

    def overlap(self, prompt: list[int]) -> Overlap:
        depth, parts = 0, []
        for medium in ("", "CPU"):
            start = depth
            while depth * SIZE < len(prompt):
                if not self.copies[tuple(prompt[: (depth + 1) * SIZE]), medium]:
                    break
                depth += 1
            parts.append(depth - start)
        return Overlap(*parts)


class Chain:
    """Engine, bridge, columns and index, one behind the other."""

    def __init__(self, max_pending: int) -> None:
        self.engine = PlainEngine()
        self.bridge = Bridge(SIZE, SECRET, max_pending=max_pending)
        self.index = ReferenceIndex()
        self.number = 1

    def feed(self, event: EngineEvent | None) -> None:
        if event is not None:
            self.bridge.feed([event], 0.0)

    def store(self, prefix: tuple[int, ...], start: int, medium: str) -> None:
        self.feed(self.engine.store(prefix, start, medium))

    def remove(self, which: int) -> None:
        self.feed(self.engine.remove(which))

    def clear(self) -> None:
        self.feed(self.engine.clear())

    def take(self, blocks: int) -> bool:
        batch = self.bridge.take(blocks)
        if batch is not None:
            events = decode(encode(batch.events))
            self.index.apply(0, HOLDER, self.number, batch.first_event_id, events)
        return batch is not None

    def announce(self, clear: bool) -> None:
        self.bridge.announce(0.0, clear=clear)

    def announce_some(self, blocks: int) -> None:
        self.bridge.announce_some(blocks, 0.0)

    def epoch(self) -> None:
        self.number += 1
        self.bridge.begin_epoch(0.0)

    def settle(self) -> None:
        while self.bridge.to_announce:
            self.announce_some(3)
        while self.take(BATCH_BLOCKS):
            pass


prefixes = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(
    lambda blocks: tuple(token for block in blocks for token in (block, block))
)
commands: st.SearchStrategy[list[tuple[Any, ...]]] = st.lists(
    st.one_of(
        st.tuples(st.just("store"), prefixes, st.integers(0, 2), st.sampled_from(["", "CPU"])),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("announce"), st.booleans()),
        st.tuples(st.just("announce_some"), st.integers(0, 3)),
        st.tuples(st.just("epoch")),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(script=commands, max_pending=st.sampled_from([2, 1000]))
def test_an_index_ends_up_with_what_the_engine_holds(
    script: list[tuple[Any, ...]], max_pending: int
) -> None:
    chain = Chain(max_pending)
    for command, *arguments in script:
        getattr(chain, command)(*arguments)
    chain.settle()
    for prompt in PROMPTS:
        keys = prompt_keys(local_hashes(prompt, SIZE), SECRET).tolist()
        found = chain.index.match(keys).get(HOLDER, Overlap())
        assert found == chain.engine.overlap(prompt)
    assert chain.index.blocks(HOLDER) == chain.bridge.held == len(+chain.engine.copies)
    counters = chain.index.counters
    assert counters.gaps == counters.repeated_events == 0
