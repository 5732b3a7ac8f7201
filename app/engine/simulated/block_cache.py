"""Prefix cache of KV blocks: reference counts, sharing, and eviction order.

A block is named by its *identity*, a non-negative int for the whole prefix up to its end; a block
without one is private to its sequence.

    free ──take──► in use (references > 0) ──release──► inactive, oldest first ──evicted──► in use
                          ▲                                │
                          └────────── acquired ────────────┘

- An identity has at most one block, which sequences with the same prefix share.
- `release` frees blocks from the last to the first: no prefix is evicted before its continuations.
- Blocks that were never computed are not kept. Computed ones without an identity match nothing, and
  are evicted in the same order as the others.
- Free blocks are used before any inactive one is evicted.

Owns which blocks its events (`stored`, `evicted`) have reported. Has no tokens, time or requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

PRIVATE = -1
"""A block without an identity, in the list of a sequence's blocks."""


class PrefixMatch(NamedTuple):
    """The number of leading blocks of a prompt in the cache, and how many of them are inactive."""

    blocks: int
    inactive: int


class BlockCache:
    """A cache of `capacity` blocks. `free_blocks`: blocks without contents."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free_blocks = capacity
        self.evicted: list[int] = []
        """Evicted identities that were reported as stored; the caller that reports them clears
        it."""
        self._references: dict[int, int] = {}
        self._inactive: OrderedDict[int, None] = OrderedDict()
        self._reported: set[int] = set()
        self._next_private = PRIVATE

    @property
    def available_blocks(self) -> int:
        return self.free_blocks + len(self._inactive)

    @property
    def used_blocks(self) -> int:
        return self.capacity - self.available_blocks

    def match(self, identities: Sequence[int], limit: int) -> PrefixMatch:
        references, inactive = self._references, self._inactive
        blocks = idle = 0
        for identity in identities[:limit]:
            if identity not in references:
                if identity not in inactive:
                    break
                idle += 1
            blocks += 1
        return PrefixMatch(blocks, idle)

    def acquire(self, identities: Sequence[int], total: int) -> list[int]:
        """Allocate the `total` blocks of a prompt, the first ones named by `identities`.

        The caller has checked that enough are available; cached blocks of the prompt are held
        before others are evicted for the rest.
        """
        private = total - len(identities)
        self._allocate(self._add_references(identities) + private)
        return [*identities, *[PRIVATE] * private]

    def append_block(self, held: list[int]) -> bool:
        """Append a private block to a sequence's blocks; False, without effect, if there is
        none."""
        if not self.free_blocks and not self._inactive:
            return False
        self._allocate(1)
        held.append(PRIVATE)
        return True

    def name_block(self, held: list[int], index: int, identity: int) -> None:
        """Name a private block of a sequence; an existing block of that identity replaces it."""
        assert held[index] == PRIVATE, f"block {index} has a name already"
        held[index] = identity
        self.free_blocks += 1
        self._allocate(self._add_references((identity,)))

    def mark_reported(self, held: Sequence[int], start: int, end: int) -> list[tuple[int, int]]:
        """Mark blocks `start` to `end` of a sequence as reported; returns the ranges that were
        not."""
        runs: list[tuple[int, int]] = []
        reported = self._reported
        first = start
        for index in range(start, end):
            identity = held[index]
            if identity < 0 or identity in reported:
                if index > first:
                    runs.append((first, index))
                first = index + 1
            else:
                reported.add(identity)
        if end > first:
            runs.append((first, end))
        return runs

    def release(self, held: list[int], computed: int) -> None:
        """Release a sequence's blocks, the last one first; the first `computed` stay cached."""
        references = self._references
        for index in range(len(held) - 1, -1, -1):
            identity = held[index]
            if identity >= 0:
                left = references[identity] - 1
                if left:
                    references[identity] = left
                    continue
                del references[identity]
            if index >= computed and identity not in self._reported:
                self.free_blocks += 1
            elif identity >= 0:
                self._inactive[identity] = None
            else:
                self._next_private -= 1
                self._inactive[self._next_private] = None
        held.clear()

    def _add_references(self, identities: Sequence[int]) -> int:
        """Add a reference to each identity; returns how many are not in the cache yet."""
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

    def _allocate(self, blocks: int) -> None:
        """Allocate blocks: free ones first, then the least recently released."""
        spare = min(blocks, self.free_blocks)
        self.free_blocks -= spare
        for _ in range(blocks - spare):
            identity, _ = self._inactive.popitem(last=False)
            if identity in self._reported:
                self._reported.remove(identity)
                self.evicted.append(identity)
