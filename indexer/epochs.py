"""Epoch tracker: which cache events are applied, by worker epoch and event id.

The rules of every index (`indexer/index.py`, `workbench/reference_index.py`), whose blocks are in a
subclass of `CacheState`. All state belongs to the partition that a record came from:

- A worker has one epoch at a time. Events of a lower epoch are ignored; a higher one starts with
  an empty cache. `end_epoch` ends an epoch: its blocks are dropped, and its later events ignored.
- Event ids are contiguous within (worker, epoch, rank). Events that were applied before are
  skipped. A gap means that removals may have been missed: the blocks of the rank are dropped until
  they are announced again. The first record of a rank may have any event id.
- *cleared* leaves a rank without blocks, in all tiers. From then on the rank is complete: all its
  blocks were announced in the records read. A gap, or a start in the middle, makes it incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from kvlane.indexer.events import Tier
from kvlane.indexer.xxh3 import xxh3


class CacheId(NamedTuple):
    """Identity of a cache: a rank of a worker."""

    worker: str
    rank: int


class Overlap(NamedTuple):
    """Cached leading blocks of a prompt by tier; each tier continues the one before it."""

    device: int = 0
    host: int = 0
    disk: int = 0
    external: int = 0

    @property
    def total_blocks(self) -> int:
        return sum(self)


class CacheSize(NamedTuple):
    """Number of blocks in each tier of a cache; `is_complete` as in `CacheState`."""

    tiers: tuple[int, ...]
    complete: bool

    @property
    def total_blocks(self) -> int:
        return sum(self.tiers)


@dataclass
class IndexCounters:
    """Counts of events and blocks since the start of the process; not part of the state."""

    applied_events: int = 0
    stale_events: int = 0
    duplicate_events: int = 0
    gaps: int = 0
    rejected_blocks: int = 0


class CacheState:
    """Event position of one cache. A subclass holds its blocks."""

    next_event_id: int | None = None
    is_complete: bool = False
    """Whether all its blocks were announced in the records read."""
    has_rejected_blocks: bool = False
    """Whether blocks were rejected since it was cleared, so that prefixes may have gaps."""

    @property
    def tier_block_counts(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def block_count(self) -> int:
        return sum(self.tier_block_counts)

    def drop_blocks(self) -> None:
        raise NotImplementedError


R = TypeVar("R", bound=CacheState)


@dataclass
class _Worker(Generic[R]):
    epoch: int
    lost: bool = False
    ranks: dict[int, R] = field(default_factory=dict)


class EpochTracker(Generic[R]):
    """Workers by partition; the part of an index that needs no blocks. `begin` creates an empty
    rank."""

    def __init__(self, begin: Callable[[CacheId], R]) -> None:
        self.counters = IndexCounters()
        self._new_rank = begin
        self._partitions: dict[int, dict[str, _Worker[R]]] = {}

    def caches(self) -> Iterator[tuple[CacheId, R]]:
        for partition in self._partitions:
            yield from self.caches_of(partition)

    def caches_of(self, partition: int) -> Iterator[tuple[CacheId, R]]:
        for worker, known in self._partitions.get(partition, {}).items():
            for number, rank in known.ranks.items():
                yield CacheId(worker, number), rank

    def find_cache(self, holder: CacheId) -> R | None:
        return next((rank for known, rank in self.caches() if known == holder), None)

    def advance_to(self, partition: int, holder: CacheId, epoch: int, event_id: int) -> R | None:
        """Advance to an event id, and return the rank; None for an epoch that has ended. Events
        below the id that were not seen are a gap: the blocks of the rank are dropped."""
        rank = self._rank(partition, holder, epoch)
        if rank is None:
            return None
        if rank.next_event_id is None:
            rank.next_event_id = event_id
        elif rank.next_event_id < event_id:
            self.counters.gaps += 1
            self.clear_cache(rank, complete=False)
            rank.next_event_id = event_id
        return rank

    def skip_duplicates(self, rank: R, first_event_id: int, events: int) -> int:
        """Mark events as applied; returns how many leading ones were applied before."""
        assert rank.next_event_id is not None
        repeated = min(rank.next_event_id - first_event_id, events)
        self.counters.duplicate_events += repeated
        self.counters.applied_events += events - repeated
        rank.next_event_id += events - repeated
        return repeated

    def clear_cache(self, rank: R, *, complete: bool) -> None:
        rank.drop_blocks()
        rank.is_complete, rank.has_rejected_blocks = complete, False

    def end_epoch(self, partition: int, worker: str, epoch: int) -> None:
        workers = self._partitions.setdefault(partition, {})
        known = workers.get(worker)
        if known is None or known.epoch <= epoch:
            self._end(known)
            workers[worker] = _Worker(epoch, lost=True)

    def drop_partition(self, partition: int) -> None:
        for known in self._partitions.pop(partition, {}).values():
            self._end(known)

    def drop_worker(self, partition: int, worker: str) -> None:
        """Drop a worker, as if it had never published an event."""
        self._end(self._partitions.get(partition, {}).pop(worker, None))

    def on_heartbeat(self, partition: int, holder: CacheId, epoch: int, last_event_id: int) -> None:
        """Apply the last event id of a heartbeat: a missing tail is a gap too."""
        self.advance_to(partition, holder, epoch, last_event_id + 1)

    def cache_sizes(self) -> dict[CacheId, CacheSize]:
        return {
            holder: CacheSize(rank.tier_block_counts, rank.is_complete)
            for holder, rank in self.caches()
        }

    def is_complete(self, holder: CacheId) -> bool:
        """Whether all blocks of a cache were announced in the records read."""
        rank = self.find_cache(holder)
        return rank is not None and rank.is_complete

    def block_count(self, holder: CacheId) -> int:
        rank = self.find_cache(holder)
        return rank.block_count if rank else 0

    # --- snapshots -------------------------------------------------------------------------------

    def serialize(self, partition: int) -> dict[str, Any]:
        """The workers of a partition without their blocks, as JSON values."""
        return {
            worker: {
                "epoch": known.epoch,
                "lost": known.lost,
                "ranks": [
                    (number, rank.next_event_id, rank.is_complete, rank.has_rejected_blocks)
                    for number, rank in known.ranks.items()
                ],
            }
            for worker, known in self._partitions.get(partition, {}).items()
        }

    def deserialize(self, partition: int, described: dict[str, Any]) -> list[R]:
        """Replace a partition by the output of `serialize`; returns its empty ranks in order.
        Raises ValueError for any other value, with nothing changed."""
        _check(described)
        self.drop_partition(partition)
        workers = self._partitions[partition] = {}
        ranks = []
        for worker, fields in described.items():
            known = workers[worker] = _Worker[R](fields["epoch"], fields["lost"])
            for number, next_event_id, complete, overflowed in fields["ranks"]:
                rank = known.ranks[number] = self._new_rank(CacheId(worker, number))
                rank.next_event_id, rank.is_complete = next_event_id, complete
                rank.has_rejected_blocks = overflowed
                ranks.append(rank)
        return ranks

    # --- epochs ----------------------------------------------------------------------------------

    def _rank(self, partition: int, holder: CacheId, epoch: int) -> R | None:
        """The rank of an epoch, created if it is new; None for an epoch that has ended."""
        workers = self._partitions.setdefault(partition, {})
        known = workers.get(holder.worker)
        if known is None or known.epoch < epoch:
            self._end(known)
            known = workers[holder.worker] = _Worker(epoch)
        if known.epoch > epoch or known.lost:
            return None
        rank = known.ranks.get(holder.rank)
        if rank is None:
            rank = known.ranks[holder.rank] = self._new_rank(holder)
        return rank

    def _end(self, known: _Worker[R] | None) -> None:
        if known is not None:
            for rank in known.ranks.values():
                rank.drop_blocks()


def cache_tag(holder: CacheId, tier: Tier) -> int:
    """Tag of one tier of one cache in digests: a u64."""
    return xxh3(holder.worker.encode(), holder.rank * len(Tier) + tier)


def _check(described: Any) -> None:
    """Raise ValueError for anything but the output of `serialize`."""
    if not isinstance(described, dict):
        raise ValueError("the workers are not an object")  # noqa: TRY004 - of bytes
    for worker, fields in described.items():
        worker.encode()  # raises for lone surrogates
        if not isinstance(fields, dict) or fields.keys() != {"epoch", "lost", "ranks"}:
            raise ValueError(f"worker {worker!r} does not have epoch, lost and ranks")
        _check_number(fields["epoch"], "epoch")
        numbers = set()
        for number, next_event_id, complete, overflowed in fields["ranks"]:
            _check_number(number, "rank")
            if next_event_id is not None:
                _check_number(next_event_id, "event id", least=-1 << 63)
            if not (isinstance(complete, bool) and isinstance(overflowed, bool)):
                raise ValueError(f"a flag of rank {number} is not a bool")  # noqa: TRY004 - of bytes
            numbers.add(number)
        if len(numbers) != len(fields["ranks"]):
            raise ValueError(f"worker {worker!r} has a rank twice")


def _check_number(value: Any, name: str, least: int = 0) -> None:
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{name} {value!r} is not an integer from {least} to 2^63 - 1")
