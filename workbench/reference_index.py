"""Reference implementation of the index, in plain dicts.

Slow and simple; tests and benchmarks compare the index (`indexer/index.py`) with it, and where they
differ this one is right. `indexer/epochs.py` decides which events are applied. Effects:

- *stored* and *removed* are idempotent: storing a held block or removing an absent one changes
  nothing.
- *cleared* empties all tiers.
- A rank holds at most `max_blocks` blocks; further ones are rejected and counted, in arrival order.

`match_prefix` returns for each (worker, rank) how many leading blocks of a prompt it holds: a
gapless prefix in the device tier; its continuation in the host tier; and so on, never back to a
nearer tier. A missing block ends the part of a tier.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from kvlane.indexer.epochs import CacheId, CacheState, EpochTracker, Overlap, cache_tag
from kvlane.indexer.events import CacheEvent, EventKind, Tier
from kvlane.indexer.xxh3 import M64, MIX_1, P64_1

MAGIC = b"kvlane blocks 1\n"
MAX_CACHE_BLOCKS = 1 << 24


class _Rank(CacheState):
    def __init__(self) -> None:
        self.tiers: list[dict[int, int]] = [{} for _ in Tier]
        """Position by key, for each tier."""

    def drop_blocks(self) -> None:
        for tier in self.tiers:
            tier.clear()

    @property
    def tier_block_counts(self) -> tuple[int, ...]:
        return tuple(len(tier) for tier in self.tiers)


class ReferenceIndex(EpochTracker[_Rank]):
    """Reference index. `fingerprint`: of the key secret, for snapshots."""

    def __init__(self, *, fingerprint: str = "", max_blocks: int = MAX_CACHE_BLOCKS) -> None:
        super().__init__(lambda _holder: _Rank())
        self._fingerprint = fingerprint
        self._max_blocks = max_blocks

    def apply_events(
        self,
        partition: int,
        holder: CacheId,
        epoch: int,
        first_event_id: int,
        events: Sequence[CacheEvent],
    ) -> None:
        rank = self.advance_to(partition, holder, epoch, first_event_id)
        if rank is None:
            self.counters.stale_events += len(events)
            return
        for event in events[self.skip_duplicates(rank, first_event_id, len(events)) :]:
            self._apply_event(rank, event)

    def match_prefix(self, keys: Sequence[int]) -> dict[CacheId, Overlap]:
        """Overlap of a prompt, given by its keys, with every cache that holds its first block."""
        found = {}
        for holder, rank in self.caches():
            depth, parts = 0, []
            for tier in rank.tiers:
                start = depth
                while depth < len(keys) and keys[depth] in tier:
                    depth += 1
                parts.append(depth - start)
            if depth:
                found[holder] = Overlap(*parts)
        return found

    def blocks_of(self, holder: CacheId, tier: Tier) -> dict[int, int]:
        """Keys in one tier of a cache with their positions; a copy."""
        rank = self.find_cache(holder)
        return dict(rank.tiers[tier]) if rank else {}

    def state_hash(self, partition: int) -> int:
        """Hash of the contents of a partition, independent of their order: a u64."""
        total = 0
        for holder, rank in self.caches_of(partition):
            for tier in Tier:
                tag = cache_tag(holder, tier)
                total += sum(block_digest(tag, key) for key in rank.tiers[tier])
        return total & M64

    # --- snapshots -------------------------------------------------------------------------------

    def snapshot(self, partition: int) -> bytes:
        tiers = [tier for _, rank in self.caches_of(partition) for tier in rank.tiers]
        header = {
            "fingerprint": self._fingerprint,
            "workers": self.serialize(partition),
            "sizes": [len(tier) for tier in tiers],
        }
        keys = np.array([key for tier in tiers for key in tier], "<u8")
        positions = np.array([p for tier in tiers for p in tier.values()], "<u4")
        head = json.dumps(header).encode()
        size = len(head).to_bytes(4, "little")
        return b"".join([MAGIC, size, head, keys.tobytes(), positions.tobytes()])

    def restore(self, partition: int, data: bytes) -> None:
        """The inverse of `snapshot`. Raises ValueError for data of another format or secret."""
        start = len(MAGIC) + 4
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError("not a snapshot of the reference index: unknown format")
        end = start + int.from_bytes(data[len(MAGIC) : start], "little")
        header = json.loads(data[start:end])
        if header["fingerprint"] != self._fingerprint:
            raise ValueError("the snapshot was written under another hash secret")
        entries = sum(header["sizes"])
        if len(data) != end + 12 * entries:
            raise ValueError(f"the snapshot has {len(data)} bytes for {entries} entries")
        keys = iter(np.frombuffer(data, "<u8", entries, end).tolist())
        positions = iter(np.frombuffer(data, "<u4", entries, end + 8 * entries).tolist())
        sizes = iter(header["sizes"])
        for rank in self.deserialize(partition, header["workers"]):
            rank.tiers = [{next(keys): next(positions) for _ in range(next(sizes))} for _ in Tier]

    def _apply_event(self, rank: _Rank, event: CacheEvent) -> None:
        if event.kind == EventKind.CLEARED:
            self.clear_cache(rank, complete=True)
            return
        tier = rank.tiers[event.tier]
        for index, key in enumerate(event.keys):
            if event.kind == EventKind.REMOVED:
                tier.pop(key, None)
            elif key not in tier and rank.block_count >= self._max_blocks:
                self.counters.rejected_blocks += 1
                rank.has_rejected_blocks = True
            else:
                tier.setdefault(key, event.position + index)


def block_digest(tag: int, key: int) -> int:
    """Digest of one block, an addend of the state hash: a u64.

    A key identifies a whole prefix, so the position need not be hashed.
    """
    h = ((key ^ tag) * P64_1) & M64
    h = ((h ^ (h >> 29)) * MIX_1) & M64
    return h ^ (h >> 32)
