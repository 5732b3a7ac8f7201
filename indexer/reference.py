"""The index in plain dicts: what every record does to it, and what it answers.

Slow and obvious; the fast index is held against it, and where the two differ this one is right.

What a record does. All state belongs to the partition that the record came from:

- A worker has one epoch at a time. Blocks of a lower one are ignored; a higher one begins with
  nothing held, since a restarted engine has an empty cache. `lose` ends an epoch: what it held is
  gone, what still comes from it is ignored.
- Event ids are contiguous within (worker, epoch, rank). What was applied before is skipped, since
  records may stand twice in the log. A gap means that removals may have been missed: the rank's
  blocks are dropped, to be announced again, rather than believed. The first record of a rank may
  begin anywhere, because the log's start may have been deleted.
- *cleared* leaves a rank without blocks, in all tiers. From then on the rank is complete: all it
  has was announced in what was read. A gap, or a start in the middle, makes it incomplete.
- *stored* and *removed* say what is so, not how often: storing what is held or removing what is
  not changes nothing.
- A rank holds at most `max_blocks` keys; more are refused and counted, in the order they come.

What it answers. `match` gives for each (worker, rank) how many leading blocks of a prompt it holds:
without a gap from the first block on, in the device tier; from there on in the host tier; and so
on, never back to a nearer tier. A hole ends a tier's part, whatever lies behind it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from indexer.events import Event, Kind, Tier
from indexer.xxh3 import M64, MIX_1, P64_1, P64_2, xxh3

MAGIC = b"kvlane blocks 1\n"
MAX_BLOCKS = 1 << 24


class Holder(NamedTuple):
    """One cache: a rank of a worker."""

    worker: str
    rank: int


class Overlap(NamedTuple):
    """Leading blocks of a prompt by the tier they are in, one tier after the other."""

    device: int = 0
    host: int = 0
    disk: int = 0
    external: int = 0

    @property
    def blocks(self) -> int:
        """All of them."""
        return sum(self)


class Holding(NamedTuple):
    """Keys that a cache holds, over all tiers; `complete` as in `ReferenceIndex.is_complete`."""

    blocks: int
    complete: bool


@dataclass
class Counters:
    """What became of what came; since the process began, no part of the state."""

    applied_events: int = 0
    stale_events: int = 0
    repeated_events: int = 0
    gaps: int = 0
    refused_blocks: int = 0


@dataclass
class _Rank:
    next_event_id: int | None = None
    complete: bool = False
    tiers: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in Tier])
    """For each tier the positions of the keys in it."""

    def clear(self, *, complete: bool) -> None:
        for tier in self.tiers:
            tier.clear()
        self.complete = complete

    @property
    def blocks(self) -> int:
        return sum(len(tier) for tier in self.tiers)


@dataclass
class _Worker:
    epoch: int
    lost: bool = False
    ranks: dict[int, _Rank] = field(default_factory=dict)


class ReferenceIndex:
    """See the module. `fingerprint`: that of the secret behind the keys, for snapshots."""

    def __init__(self, *, fingerprint: str = "", max_blocks: int = MAX_BLOCKS) -> None:
        self.counters = Counters()
        self._fingerprint = fingerprint
        self._max_blocks = max_blocks
        self._partitions: dict[int, dict[str, _Worker]] = {}

    def apply(
        self,
        partition: int,
        holder: Holder,
        epoch: int,
        first_event_id: int,
        events: Sequence[Event],
    ) -> None:
        """Take the events of one record."""
        rank = self._rank(partition, holder, epoch)
        if rank is None:
            self.counters.stale_events += len(events)
            return
        self._expect(rank, first_event_id)
        assert rank.next_event_id is not None
        repeated = min(rank.next_event_id - first_event_id, len(events))
        self.counters.repeated_events += repeated
        self.counters.applied_events += len(events) - repeated
        for event in events[repeated:]:
            self._take(rank, event)
            rank.next_event_id += 1

    def heard(self, partition: int, holder: Holder, epoch: int, last_event_id: int) -> None:
        """A heartbeat says how far events have gone: a tail that is missing is a gap, too."""
        rank = self._rank(partition, holder, epoch)
        if rank is not None:
            self._expect(rank, last_event_id + 1)

    def lose(self, partition: int, worker: str, epoch: int) -> None:
        """An epoch of a worker is over."""
        workers = self._partitions.setdefault(partition, {})
        known = workers.get(worker)
        if known is None or known.epoch <= epoch:
            workers[worker] = _Worker(epoch, lost=True)

    def forget(self, partition: int) -> None:
        """Drop all that came from a partition."""
        self._partitions.pop(partition, None)

    def drop(self, partition: int, worker: str) -> None:
        """Forget a worker, as if nothing had come from it."""
        self._partitions.get(partition, {}).pop(worker, None)

    def match(self, keys: Sequence[int]) -> dict[Holder, Overlap]:
        """The overlap of a prompt, by its keys, with every cache that holds its first block."""
        found = {}
        for holder, rank in self._ranks():
            depth, parts = 0, []
            for tier in rank.tiers:
                start = depth
                while depth < len(keys) and keys[depth] in tier:
                    depth += 1
                parts.append(depth - start)
            if depth:
                found[holder] = Overlap(*parts)
        return found

    def holdings(self) -> dict[Holder, Holding]:
        """How much each cache holds."""
        return {holder: Holding(rank.blocks, rank.complete) for holder, rank in self._ranks()}

    def entries(self, holder: Holder, tier: Tier) -> dict[int, int]:
        """The keys in one tier of a cache, with their positions; a copy."""
        return {
            key: position
            for known, rank in self._ranks()
            if known == holder
            for key, position in rank.tiers[tier].items()
        }

    def is_complete(self, holder: Holder) -> bool:
        """Whether all that a cache holds was announced in what was read of the log."""
        return any(rank.complete for known, rank in self._ranks() if known == holder)

    def blocks(self, holder: Holder) -> int:
        """Keys that a cache holds, over all tiers."""
        return sum(rank.blocks for known, rank in self._ranks() if known == holder)

    def state_hash(self, partition: int) -> int:
        """A u64 that is equal for equal contents, in whatever order they came."""
        total = 0
        for worker, known in self._partitions.get(partition, {}).items():
            for number, rank in known.ranks.items():
                for tier in Tier:
                    tag = cache_tag(Holder(worker, number), tier)
                    for key, position in rank.tiers[tier].items():
                        total += entry_digest(tag, key, position)
        return total & M64

    # --- snapshots -------------------------------------------------------------------------------

    def snapshot(self, partition: int) -> bytes:
        """All that came from a partition."""
        workers = self._partitions.get(partition, {})
        tiers = [
            tier for known in workers.values() for rank in known.ranks.values()
            for tier in rank.tiers
        ]  # fmt: skip
        header = {
            "fingerprint": self._fingerprint,
            "workers": {worker: _described(known) for worker, known in workers.items()},
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
        entries = sum(
            sum(sizes) for known in header["workers"].values() for *_, sizes in known["ranks"]
        )
        if len(data) != end + 12 * entries:
            raise ValueError(f"{len(data)} bytes for {entries} entries")
        keys = iter(np.frombuffer(data, "<u8", entries, end).tolist())
        positions = iter(np.frombuffer(data, "<u4", entries, end + 8 * entries).tolist())
        workers = {}
        for worker, described in header["workers"].items():
            known = workers[worker] = _Worker(described["epoch"], described["lost"])
            for number, following, complete, sizes in described["ranks"]:
                tiers = [{next(keys): next(positions) for _ in range(size)} for size in sizes]
                known.ranks[number] = _Rank(following, complete, tiers)
        self._partitions[partition] = workers

    # --- rules -----------------------------------------------------------------------------------

    def _ranks(self) -> list[tuple[Holder, _Rank]]:
        return [
            (Holder(worker, number), rank)
            for workers in self._partitions.values()
            for worker, known in workers.items()
            for number, rank in known.ranks.items()
        ]

    def _rank(self, partition: int, holder: Holder, epoch: int) -> _Rank | None:
        """The rank of this epoch, which may begin here; None for an epoch that is over."""
        workers = self._partitions.setdefault(partition, {})
        known = workers.get(holder.worker)
        if known is None or known.epoch < epoch:
            known = workers[holder.worker] = _Worker(epoch)
        if known.epoch > epoch or known.lost:
            return None
        return known.ranks.setdefault(holder.rank, _Rank())

    def _expect(self, rank: _Rank, event_id: int) -> None:
        """The events below this id have gone by; some of them unseen, perhaps."""
        if rank.next_event_id is None:
            rank.next_event_id = event_id
        elif rank.next_event_id < event_id:
            self.counters.gaps += 1
            rank.clear(complete=False)
            rank.next_event_id = event_id

    def _take(self, rank: _Rank, event: Event) -> None:
        if event.kind == Kind.CLEARED:
            rank.clear(complete=True)
            return
        tier = rank.tiers[event.tier]
        for index, key in enumerate(event.keys):
            if event.kind == Kind.REMOVED:
                tier.pop(key, None)
            elif key in tier or rank.blocks < self._max_blocks:
                tier[key] = event.position + index
            else:
                self.counters.refused_blocks += 1


def cache_tag(holder: Holder, tier: Tier) -> int:
    """What tells one tier of one cache from all others in digests: a u64."""
    return xxh3(holder.worker.encode(), holder.rank * len(Tier) + tier)


def entry_digest(tag: int, key: int, position: int) -> int:
    """The share of one entry in the state hash: a u64, to be summed."""
    h = ((key ^ tag) * P64_1 + position * P64_2) & M64
    h = ((h ^ (h >> 29)) * MIX_1) & M64
    return h ^ (h >> 32)


def _described(known: _Worker) -> dict[str, Any]:
    """A worker without its keys."""
    ranks = [
        (number, rank.next_event_id, rank.complete, [len(tier) for tier in rank.tiers])
        for number, rank in known.ranks.items()
    ]
    return {"epoch": known.epoch, "lost": known.lost, "ranks": ranks}
