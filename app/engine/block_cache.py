"""A prefix cache of KV blocks: who uses which block, what may be shared, what goes first.

A block is named by its *identity*, a non-negative int that stands for the whole prefix up to its
end; blocks without one are private to their sequence. Nothing has a place in memory here: a block
is a reference count, or an entry among the inactive ones, or part of the number of free blocks.

    free ──take──► in use (references > 0) ──release──► inactive, oldest first ──evicted──► in use
                          ▲                                │
                          └────────── acquired ────────────┘

- An identity has at most one block. Two sequences that compute the same prefix share it.
- `release` gives blocks up from the last to the first, so the least recently used inactive block is
  always a leaf: no prefix is evicted before what continues it.
- Blocks of a sequence that were never computed are not kept; computed ones without an identity are
  kept too, match nothing, and wait for their turn in the order of eviction like the others.
- Free blocks are used before any inactive one is evicted.

Owns the cache's contents and the bookkeeping of what its events have told (`stored`, `removed`).
Knows no tokens, no time and no requests; see `app/engine/step.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

PRIVATE = -1
"""In the list of a sequence's blocks: one without an identity."""


class Match(NamedTuple):
    """The leading blocks of a prompt that the cache holds, and how many of those are inactive."""

    blocks: int
    inactive: int


class BlockCache:
    """`capacity` blocks; see the module. `free`: blocks that hold nothing at all."""

    __slots__ = (
        "_inactive",
        "_next_private",
        "_references",
        "_told",
        "capacity",
        "free",
        "removed",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self.removed: list[int] = []
        """Identities evicted after they were told of; whoever reports them empties the list."""
        self._references: dict[int, int] = {}
        self._inactive: OrderedDict[int, None] = OrderedDict()
        self._told: set[int] = set()
        self._next_private = PRIVATE

    @property
    def available(self) -> int:
        """Blocks that could be taken now, evictions included."""
        return self.free + len(self._inactive)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.capacity - self.available

    def match(self, identities: Sequence[int], limit: int) -> Match:
        """How far the cache holds a prompt, looking at its first `limit` blocks."""
        references, inactive = self._references, self._inactive
        blocks = idle = 0
        for identity in identities[:limit]:
            if identity not in references:
                if identity not in inactive:
                    break
                idle += 1
            blocks += 1
        return Match(blocks, idle)

    def acquire(self, identities: Sequence[int], total: int) -> list[int]:
        """Blocks for a whole prompt: `total` of them, the first ones named by `identities`.

        Named blocks can be shared from now on. The caller has seen to it that enough blocks are
        available; what the cache has of the prompt is held before anything is evicted for the rest.
        """
        private = total - len(identities)
        self._take(self._hold(identities) + private)
        return [*identities, *[PRIVATE] * private]

    def take(self, held: list[int]) -> bool:
        """Add a private block to a sequence's blocks; False, and nothing done, if there is none."""
        if not self.free and not self._inactive:
            return False
        self._take(1)
        held.append(PRIVATE)
        return True

    def share(self, held: list[int], index: int, identity: int) -> None:
        """Name a private block of a sequence; one of the same name takes its place if there is."""
        assert held[index] == PRIVATE, f"block {index} has a name already"
        held[index] = identity
        self.free += 1
        self._take(self._hold((identity,)))

    def tell(self, held: Sequence[int], start: int, end: int) -> list[tuple[int, int]]:
        """Note blocks `start` to `end` of a sequence as told; returns the runs that were not."""
        runs: list[tuple[int, int]] = []
        told = self._told
        first = start
        for index in range(start, end):
            identity = held[index]
            if identity < 0 or identity in told:
                if index > first:
                    runs.append((first, index))
                first = index + 1
            else:
                told.add(identity)
        if end > first:
            runs.append((first, end))
        return runs

    def release(self, held: list[int], computed: int) -> None:
        """Give up a sequence's blocks, the last one first; the first `computed` stay cached."""
        references = self._references
        for index in range(len(held) - 1, -1, -1):
            identity = held[index]
            if identity >= 0:
                left = references[identity] - 1
                if left:
                    references[identity] = left
                    continue
                del references[identity]
            if index >= computed and identity not in self._told:
                self.free += 1
            elif identity >= 0:
                self._inactive[identity] = None
            else:
                self._next_private -= 1
                self._inactive[self._next_private] = None
        held.clear()

    def clear(self) -> bool:
        """Forget everything; False, and nothing done, while any block is in use."""
        if self.used:
            return False
        self.free = self.capacity
        self._inactive.clear()
        self._told.clear()
        return True

    def _hold(self, identities: Sequence[int]) -> int:
        """Count one more user of each; how many of them the cache does not have yet."""
        references, inactive = self._references, self._inactive
        missing = 0
        for identity in identities:
            count = references.get(identity)
            if count is not None:
                references[identity] = count + 1
                continue
            references[identity] = 1
            if identity in inactive:
                del inactive[identity]
            else:
                missing += 1
        return missing

    def _take(self, blocks: int) -> None:
        """Use so many blocks: free ones first, then those that were released first."""
        spare = min(blocks, self.free)
        self.free -= spare
        for _ in range(blocks - spare):
            identity, _ = self._inactive.popitem(last=False)
            if identity in self._told:
                self._told.remove(identity)
                self.removed.append(identity)
