"""The index in plain dicts: what every record does to it, and what it answers.

Slow and obvious; the fast index (`indexer/index.py`) is held against it, and where the two differ
this one is right. Which events count says `indexer/lives.py`. What an event does:

- *stored* and *removed* say what is so, not how often: storing what is held or removing what is
  not changes nothing.
- *cleared* empties all tiers.
- A rank holds at most `max_blocks` keys; more are refused and counted, in the order they come.

What it answers. `match` gives for each (worker, rank) how many leading blocks of a prompt it holds:
without a gap from the first block on, in the device tier; from there on in the host tier; and so
on, never back to a nearer tier. A hole ends a tier's part, whatever lies behind it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from indexer.events import Event, Kind, Tier
from indexer.lives import Follower, Holder, Overlap, Rank, cache_tag
from indexer.xxh3 import M64, MIX_1, P64_1

MAGIC = b"kvlane blocks 1\n"
MAX_BLOCKS = 1 << 24


class _Rank(Rank):
    def __init__(self) -> None:
        self.tiers: list[dict[int, int]] = [{} for _ in Tier]
        """For each tier the positions of the keys in it."""

    def clear(self) -> None:
        for tier in self.tiers:
            tier.clear()

    @property
    def tier_blocks(self) -> tuple[int, ...]:
        return tuple(len(tier) for tier in self.tiers)


class ReferenceIndex(Follower[_Rank]):
    """See the module. `fingerprint`: that of the secret behind the keys, for snapshots."""

    def __init__(self, *, fingerprint: str = "", max_blocks: int = MAX_BLOCKS) -> None:
        super().__init__(lambda _holder: _Rank())
        self._fingerprint = fingerprint
        self._max_blocks = max_blocks

    def apply(
        self,
        partition: int,
        holder: Holder,
        epoch: int,
        first_event_id: int,
        events: Sequence[Event],
    ) -> None:
        """Take the events of one record."""
        rank = self._lives.heard(partition, holder, epoch, first_event_id)
        if rank is None:
            self.counters.stale_events += len(events)
            return
        for event in events[self._lives.news(rank, first_event_id, len(events)) :]:
            self._take(rank, event)

    def match(self, keys: Sequence[int]) -> dict[Holder, Overlap]:
        """The overlap of a prompt, by its keys, with every cache that holds its first block."""
        found = {}
        for holder, rank in self._lives:
            depth, parts = 0, []
            for tier in rank.tiers:
                start = depth
                while depth < len(keys) and keys[depth] in tier:
                    depth += 1
                parts.append(depth - start)
            if depth:
                found[holder] = Overlap(*parts)
        return found

    def entries(self, holder: Holder, tier: Tier) -> dict[int, int]:
        """The keys in one tier of a cache, with their positions; a copy."""
        rank = self._lives.find(holder)
        return dict(rank.tiers[tier]) if rank else {}

    def state_hash(self, partition: int) -> int:
        """A u64 that is equal for equal contents, in whatever order they came."""
        total = 0
        for holder, rank in self._lives.of(partition):
            for tier in Tier:
                tag = cache_tag(holder, tier)
                total += sum(digest(tag, key) for key in rank.tiers[tier])
        return total & M64

    # --- snapshots -------------------------------------------------------------------------------

    def snapshot(self, partition: int) -> bytes:
        """All that came from a partition."""
        tiers = [tier for _, rank in self._lives.of(partition) for tier in rank.tiers]
        header = {
            "fingerprint": self._fingerprint,
            "workers": self._lives.described(partition),
            "sizes": [len(tier) for tier in tiers],
        }
        keys = np.array([key for tier in tiers for key in tier], "<u8")
        positions = np.array([p for tier in tiers for p in tier.values()], "<u4")
        head = json.dumps(header).encode()
        size = len(head).to_bytes(4, "little")
        return b"".join([MAGIC, size, head, keys.tobytes(), positions.tobytes()])

    def restore(self, partition: int, data: bytes) -> None:
        """The inverse of `snapshot`. Raises ValueError for data of another kind or secret."""
        start = len(MAGIC) + 4
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError("not a snapshot of blocks")
        end = start + int.from_bytes(data[len(MAGIC) : start], "little")
        header = json.loads(data[start:end])
        if header["fingerprint"] != self._fingerprint:
            raise ValueError("a snapshot under another hash secret")
        entries = sum(header["sizes"])
        if len(data) != end + 12 * entries:
            raise ValueError(f"{len(data)} bytes for {entries} entries")
        keys = iter(np.frombuffer(data, "<u8", entries, end).tolist())
        positions = iter(np.frombuffer(data, "<u4", entries, end + 8 * entries).tolist())
        sizes = iter(header["sizes"])
        for rank in self._lives.restored(partition, header["workers"]):
            rank.tiers = [{next(keys): next(positions) for _ in range(next(sizes))} for _ in Tier]

    def _take(self, rank: _Rank, event: Event) -> None:
        if event.kind == Kind.CLEARED:
            self._lives.clear(rank, complete=True)
            return
        tier = rank.tiers[event.tier]
        for index, key in enumerate(event.keys):
            if event.kind == Kind.REMOVED:
                tier.pop(key, None)
            elif key not in tier and rank.blocks >= self._max_blocks:
                self.counters.refused_blocks += 1
                rank.overflowed = True
            else:
                tier.setdefault(key, event.position + index)


def digest(tag: int, key: int) -> int:
    """The share of one block in the state hash: a u64, to be summed.

    A key stands for a whole prefix, so it says the position, too.
    """
    h = ((key ^ tag) * P64_1) & M64
    h = ((h ^ (h >> 29)) * MIX_1) & M64
    return h ^ (h >> 32)
