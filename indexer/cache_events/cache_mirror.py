"""Mirror of one engine's cache, and of the part of it that is published.

A block is identified by its *sum*, the number behind its key, so every block has one parent, the
same for every engine and tier.

The published device tier is *closed*: a block is published only while its parent is. Descendants of
an evicted block cannot serve a prompt: they are retracted with it, kept here, and published again
when it returns. Parents are published before children and retracted after them, one by one, so a
batch may be cut anywhere. Lower tiers are published as they are: they continue nearer ones.

Dicts of integers and flat tuples, no objects, which the garbage collector would walk for long.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from kvlane.indexer.events import EventKind, Tier

ROOT = -1
"""Parent of every first block; no sum is negative."""

BlockMeta: TypeAlias = tuple[int, int, str, str]
"""Metadata of a block: parent sum, position, adapter name and cache salt."""


class MirrorChange(NamedTuple):
    """A canonical event (`indexer/events.py`), but with sums; the list is the receiver's."""

    kind: EventKind
    tier: Tier
    position: int
    sums: list[int]


# Enum members are slow to look up, and these are needed for every block.
STORED, REMOVED, DEVICE = EventKind.STORED, EventKind.REMOVED, Tier.DEVICE


class CacheMirror:
    """Contents of one cache. Methods return the changes to publish, in order."""

    def __init__(self) -> None:
        self._held: list[dict[int, BlockMeta]] = [{} for _ in Tier]
        """The blocks of each tier."""
        self._hash_counts: dict[tuple[Tier, int], int] = {}
        """Number of engine hashes for a block in a tier, where it is more than one."""
        self._children: dict[int, int | set[int]] = {}
        """Blocks of the device tier, published or not, by parent, held or not."""
        self._published = {ROOT}
        """Blocks of the device tier, by the records in the log."""
        self._unannounced: list[list[int]] = [[] for _ in Tier]
        """Blocks to publish again by tier, the next one last. In the device tier, their
        descendants follow."""

    @property
    def block_count(self) -> int:
        return sum(len(held) for held in self._held)

    @property
    def is_announcing(self) -> bool:
        return any(self._unannounced)

    def block_meta(self, tier: Tier, total: int) -> BlockMeta:
        return self._held[tier][total]

    def add_blocks(self, tier: Tier, sums: list[int], facts: list[BlockMeta]) -> list[MirrorChange]:
        """Add one engine hash for each of these consecutive blocks in this tier."""
        held = self._held[tier]
        has_children = tier is DEVICE and not self._children.keys().isdisjoint(sums)
        if not has_children and held.keys().isdisjoint(sums):
            return self._insert(tier, sums, facts)
        changes: list[MirrorChange] = []
        for total, fact in zip(sums, facts, strict=True):
            if total in held:
                self._hash_counts[tier, total] = self._hash_counts.get((tier, total), 1) + 1
            else:
                changes += self._insert(tier, [total], [fact])
        return changes

    def remove_blocks(self, tier: Tier, sums: list[int]) -> list[MirrorChange]:
        """Remove one engine hash for each of these blocks, which the tier holds."""
        held, gone = self._held[tier], list[int]()
        for total in sums:
            if self._hash_counts and (names := self._hash_counts.pop((tier, total), 1)) > 1:
                if names > 2:
                    self._hash_counts[tier, total] = names - 1
                continue
            before = held.pop(total)[0]
            if tier is not DEVICE:
                gone.append(total)
                continue
            siblings = self._children[before]
            if isinstance(siblings, set) and len(siblings) > 1:
                siblings.remove(total)
            else:
                del self._children[before]
            if total in self._published:
                self._retract(total, gone)
        return [MirrorChange(REMOVED, tier, 0, gone)] if gone else []

    def start_announcement(self, *, clear: bool) -> None:
        """Start publishing all blocks again; with `clear`, for readers whose state was cleared."""
        if clear:
            self._published = {ROOT}
        for tier, held in zip(Tier, self._held, strict=True):
            self._unannounced[tier] = (
                list(self._children_of(ROOT)) if tier is DEVICE else list(reversed(held))
            )

    def continue_announcement(self, blocks: int) -> list[MirrorChange]:
        """Publish up to `blocks` more blocks; blocks that were removed meanwhile count too."""
        changes: list[MirrorChange] = []
        for tier in Tier:
            blocks = self._announce(tier, self._unannounced[tier], blocks, changes)
        return changes

    # --- the device tier -------------------------------------------------------------------------

    def _insert(self, tier: Tier, sums: list[int], facts: list[BlockMeta]) -> list[MirrorChange]:
        """Insert consecutive blocks; only the last one may have children already."""
        held = self._held[tier]
        held.update(zip(sums, facts, strict=True))
        before, position, *_ = facts[0]
        if tier is not DEVICE:
            return [MirrorChange(STORED, tier, position, sums)]
        siblings = self._children.get(before)
        if siblings is None:
            self._children[before] = sums[0]
        elif isinstance(siblings, set):
            siblings.add(sums[0])
        else:
            self._children[before] = {siblings, sums[0]}
        self._children.update(pairwise(sums))
        if before not in self._published:
            return []
        self._published.update(sums)
        changes = [MirrorChange(STORED, tier, position, sums)]
        self._announce(tier, list(self._children_of(sums[-1])), len(held), changes)
        return changes

    def _announce(
        self, tier: Tier, waiting: list[int], blocks: int, changes: list[MirrorChange]
    ) -> int:
        """Publish up to `blocks` of the waiting ones, last one first; returns the rest of that."""
        held, published = self._held[tier], self._published
        start, run = 0, list[int]()
        while waiting and blocks:
            blocks -= 1
            total = waiting.pop()
            if total not in held:
                continue
            before, position, *_ = held[total]
            if tier is DEVICE:
                if before not in published:
                    continue
                published.add(total)
                waiting += self._children_of(total)
            if position != start + len(run):
                if run:
                    changes.append(MirrorChange(STORED, tier, start, run))
                start, run = position, []
            run.append(total)
        if run:
            changes.append(MirrorChange(STORED, tier, start, run))
        return blocks

    def _retract(self, total: int, gone: list[int]) -> None:
        """Retract a block and its descendants, and append them to `gone`."""
        if total not in self._children:
            self._published.remove(total)
            gone.append(total)
            return
        retracted = [total]
        for block in retracted:  # which grows
            retracted += [child for child in self._children_of(block) if child in self._published]
        self._published.difference_update(retracted)
        gone += reversed(retracted)

    def _children_of(self, parent: int) -> Collection[int]:
        children = self._children.get(parent)
        if children is None:
            return ()
        return children if isinstance(children, set) else (children,)
