"""What one engine's cache holds, and how much of it others have been told.

A block is known by its *sum*, the number behind its key (`indexer/keys.py`), which stands for the
whole prefix up to its end; so every block has one parent, the same for every engine and tier.

The device tier is *closed* for whoever listens: a block is told only while the one before it is.
Engines may drop a block and keep what continues it. Nothing behind such a hole can serve a prompt
from the device, so it is taken back with the block, kept here, and told again when the hole is
filled. Blocks are told parents first and taken back children first, one by one, so that it does
not matter where a batch of them is cut. Lower tiers are told as they are: they continue prefixes
of nearer tiers, and a hole in one of them says nothing.

Plain dicts of integers: a million blocks cost the garbage collector nothing. Owns no time, no
batches and no engine's names; see `indexer/bridge.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

from indexer.events import Kind, Tier

ROOT = -1
"""Stands before every first block; no sum is negative."""

Facts: TypeAlias = tuple[int, int, str, str]
"""Of a block: the sum before it, its position, its adapter's name and its salt."""


Put: TypeAlias = Callable[[Kind, Tier, int, Sequence[int]], None]
"""Told of changes in their order, like events (`indexer/events.py`), but of sums."""


class Mirror:
    """See the module."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._held: list[dict[int, int]] = [{} for _ in Tier]
        """For each tier, how many names the engine has for a block in it."""
        self._facts: dict[int, Facts] = {}
        """Of all blocks in any tier."""
        self._children = _Children()
        """Blocks of the device tier, told or not, by what they continue, held or not."""
        self._told = {ROOT}
        """Blocks of the device tier that whoever listens believes to be there."""
        self._waiting: list[list[int]] = [[] for _ in Tier]
        """What is still to be announced, the next one last. In the device tier what continues it
        follows."""

    @property
    def blocks(self) -> int:
        """Over all tiers, those that are not told included."""
        return sum(len(held) for held in self._held)

    @property
    def announcing(self) -> bool:
        """Whether an announcement has begun and not ended."""
        return any(self._waiting)

    def facts(self, total: int) -> Facts:
        """Of a block that a tier holds."""
        return self._facts[total]

    def add(self, tier: Tier, sums: Sequence[int], facts: Sequence[Facts]) -> None:
        """The engine has one more name, in this tier, for each of some consecutive blocks."""
        held = self._held[tier]
        waited_for = tier is Tier.DEVICE and not self._children.have_none(sums)
        if not waited_for and held.keys().isdisjoint(sums):
            self._begin(tier, sums, facts)
            return
        for total, fact in zip(sums, facts, strict=True):
            if total in held:
                held[total] += 1
            else:
                self._begin(tier, [total], [fact])

    def remove(self, tier: Tier, total: int) -> None:
        """The engine has one name less for a block of this tier."""
        held = self._held[tier]
        if held[total] > 1:
            held[total] -= 1
            return
        del held[total]
        if tier is not Tier.DEVICE:
            self._put(Kind.REMOVED, tier, 0, [total])
        else:
            self._children.remove(self._facts[total][0], total)
            if total in self._told:
                self._hide(total)
        for other in self._held:
            if total in other:
                break
        else:
            del self._facts[total]

    def announce(self, *, clear: bool) -> None:
        """Begin to tell everything again; with `clear`, to somebody who believes nothing any more.

        What changes meanwhile is told at once, as far as what it continues has been told.
        """
        if clear:
            self._told = {ROOT}
        self._waiting = [list(reversed(held)) for held in self._held]
        self._waiting[Tier.DEVICE] = list(self._children.of(ROOT))

    def announce_some(self, blocks: int) -> None:
        """Go on telling, at most so many blocks; those that are gone by now count, too."""
        for tier in Tier:
            blocks = self._announce(tier, self._waiting[tier], blocks)

    # --- the device tier -------------------------------------------------------------------------

    def _begin(self, tier: Tier, sums: Sequence[int], facts: Sequence[Facts]) -> None:
        """The tier has got consecutive blocks; only the last one may have been waited for."""
        held = self._held[tier]
        held.update(dict.fromkeys(sums, 1))
        self._facts.update(zip(sums, facts, strict=True))
        before, position, *_ = facts[0]
        if tier is not Tier.DEVICE:
            self._put(Kind.STORED, tier, position, sums)
            return
        self._children.add(before, sums[0])
        self._children.add_chain(sums)
        if before in self._told:
            self._told.update(sums)
            self._put(Kind.STORED, tier, position, sums)
            self._announce(tier, list(self._children.of(sums[-1])), len(held))

    def _announce(self, tier: Tier, waiting: list[int], blocks: int) -> int:
        """Tell at most so many of what waits, the last one first; returns how many may follow."""
        held, told, device = self._held[tier], self._told, tier is Tier.DEVICE
        while waiting and blocks:
            blocks -= 1
            total = waiting.pop()
            if total not in held:
                continue
            before, position, *_ = self._facts[total]
            if device:
                if before not in told:
                    continue
                told.add(total)
                waiting += self._children.of(total)
            self._put(Kind.STORED, tier, position, [total])
        return blocks

    def _hide(self, total: int) -> None:
        """Take a block back with all that continues it."""
        gone = [total]
        for block in gone:  # which grows
            gone += [child for child in self._children.of(block) if child in self._told]
        gone.reverse()
        self._told.difference_update(gone)
        self._put(Kind.REMOVED, Tier.DEVICE, 0, gone)


class _Children:
    """The children of blocks. Nearly all have one, so only forks cost a set."""

    def __init__(self) -> None:
        self._only: dict[int, int] = {}
        self._forks: dict[int, set[int]] = {}

    def of(self, parent: int) -> Collection[int]:
        fork = self._forks.get(parent)
        if fork is not None:
            return fork
        only = self._only.get(parent)
        return () if only is None else (only,)

    def have_none(self, parents: Iterable[int]) -> bool:
        return self._only.keys().isdisjoint(parents) and self._forks.keys().isdisjoint(parents)

    def add(self, parent: int, child: int) -> None:
        """A child that the parent has not."""
        fork = self._forks.get(parent)
        if fork is not None:
            fork.add(child)
        elif parent in self._only:
            self._forks[parent] = {self._only.pop(parent), child}
        else:
            self._only[parent] = child

    def add_chain(self, sums: Sequence[int]) -> None:
        """Each one is the only child of the one before it."""
        self._only.update(pairwise(sums))

    def remove(self, parent: int, child: int) -> None:
        """A child that the parent has."""
        fork = self._forks.get(parent)
        if fork is None:
            del self._only[parent]
            return
        fork.remove(child)
        if not fork:
            del self._forks[parent]
