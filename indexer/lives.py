"""Which events count: the lives of workers, and what was already heard of them.

The rules of the log, the same for every index (`indexer/reference.py` in dicts, `indexer/index.py`
in a table). All state belongs to the partition that a record came from:

- A worker has one epoch at a time. Blocks of a lower one are ignored; a higher one begins with
  nothing held, since a restarted engine has an empty cache. `lose` ends an epoch: what it held is
  gone, what still comes from it is ignored.
- Event ids are contiguous within (worker, epoch, rank). What was applied before is skipped, since
  records may stand twice in the log. A gap means that removals may have been missed: the rank's
  blocks are dropped, to be announced again, rather than believed. The first record of a rank may
  begin anywhere, because the log's start may have been deleted.
- *cleared* leaves a rank without blocks, in all tiers. From then on the rank is complete: all it
  has was announced in what was read. A gap, or a start in the middle, makes it incomplete.

Knows no blocks: a `Rank` of each index holds those, and what an index says of its ranks without
looking at blocks, `Follower` says for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from indexer.events import Tier
from indexer.xxh3 import xxh3


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
    """Keys that a cache holds in each tier; `complete` as in `Rank`."""

    tiers: tuple[int, ...]
    complete: bool

    @property
    def blocks(self) -> int:
        """Those of all tiers together."""
        return sum(self.tiers)


@dataclass
class Counters:
    """What became of what came; since the process began, no part of the state."""

    applied_events: int = 0
    stale_events: int = 0
    repeated_events: int = 0
    gaps: int = 0
    refused_blocks: int = 0


class Rank:
    """How far one cache's events were heard. A child holds its blocks."""

    next_event_id: int | None = None
    complete: bool = False
    """Whether all that it holds was announced in what was read of the log."""
    overflowed: bool = False
    """Whether blocks were refused since it was cleared, so that some are missing in between."""

    @property
    def tier_blocks(self) -> tuple[int, ...]:
        """Keys it holds in each tier."""
        raise NotImplementedError

    @property
    def blocks(self) -> int:
        """Keys it holds, over all tiers."""
        return sum(self.tier_blocks)

    def clear(self) -> None:
        """Drop all blocks."""
        raise NotImplementedError


R = TypeVar("R", bound=Rank)


@dataclass
class _Worker(Generic[R]):
    epoch: int
    lost: bool = False
    ranks: dict[int, R] = field(default_factory=dict)


class Lives(Generic[R]):
    """Workers by partition. `begin` makes the rank of a holder, without blocks."""

    def __init__(self, begin: Callable[[Holder], R]) -> None:
        self.counters = Counters()
        self._begin = begin
        self._partitions: dict[int, dict[str, _Worker[R]]] = {}

    def __iter__(self) -> Iterator[tuple[Holder, R]]:
        for partition in self._partitions:
            yield from self.of(partition)

    def of(self, partition: int) -> Iterator[tuple[Holder, R]]:
        """The caches that a partition speaks of."""
        for worker, known in self._partitions.get(partition, {}).items():
            for number, rank in known.ranks.items():
                yield Holder(worker, number), rank

    def find(self, holder: Holder) -> R | None:
        """A cache, in whatever partition."""
        return next((rank for known, rank in self if known == holder), None)

    def heard(self, partition: int, holder: Holder, epoch: int, event_id: int) -> R | None:
        """The rank, whose events below this id have gone by; None for an epoch that is over."""
        rank = self._rank(partition, holder, epoch)
        if rank is None:
            return None
        if rank.next_event_id is None:
            rank.next_event_id = event_id
        elif rank.next_event_id < event_id:
            self.counters.gaps += 1
            self.clear(rank, complete=False)
            rank.next_event_id = event_id
        return rank

    def news(self, rank: R, first_event_id: int, events: int) -> int:
        """How many of these events were taken before; the others count as taken from now on."""
        assert rank.next_event_id is not None
        repeated = min(rank.next_event_id - first_event_id, events)
        self.counters.repeated_events += repeated
        self.counters.applied_events += events - repeated
        rank.next_event_id += events - repeated
        return repeated

    def clear(self, rank: R, *, complete: bool) -> None:
        """A rank holds nothing from here on."""
        rank.clear()
        rank.complete, rank.overflowed = complete, False

    def lose(self, partition: int, worker: str, epoch: int) -> None:
        """An epoch of a worker is over."""
        workers = self._partitions.setdefault(partition, {})
        known = workers.get(worker)
        if known is None or known.epoch <= epoch:
            self._end(known)
            workers[worker] = _Worker(epoch, lost=True)

    def forget(self, partition: int) -> None:
        """Drop all that came from a partition."""
        for known in self._partitions.pop(partition, {}).values():
            self._end(known)

    def drop(self, partition: int, worker: str) -> None:
        """Forget a worker, as if nothing had come from it."""
        self._end(self._partitions.get(partition, {}).pop(worker, None))

    # --- snapshots -------------------------------------------------------------------------------

    def described(self, partition: int) -> dict[str, Any]:
        """The workers of a partition, without their blocks; plain values, for JSON."""
        return {
            worker: {
                "epoch": known.epoch,
                "lost": known.lost,
                "ranks": [
                    (number, rank.next_event_id, rank.complete, rank.overflowed)
                    for number, rank in known.ranks.items()
                ],
            }
            for worker, known in self._partitions.get(partition, {}).items()
        }

    def restored(self, partition: int, described: dict[str, Any]) -> list[R]:
        """The inverse, in the place of what is there: the ranks in order, without blocks.

        Raises ValueError for what `described` never gives, with nothing changed.
        """
        _check(described)
        self.forget(partition)
        workers = self._partitions[partition] = {}
        ranks = []
        for worker, said in described.items():
            known = workers[worker] = _Worker[R](said["epoch"], said["lost"])
            for number, following, complete, overflowed in said["ranks"]:
                rank = known.ranks[number] = self._begin(Holder(worker, number))
                rank.next_event_id, rank.complete = following, complete
                rank.overflowed = overflowed
                ranks.append(rank)
        return ranks

    # --- epochs ----------------------------------------------------------------------------------

    def _rank(self, partition: int, holder: Holder, epoch: int) -> R | None:
        """The rank of this epoch, which may begin here; None for an epoch that is over."""
        workers = self._partitions.setdefault(partition, {})
        known = workers.get(holder.worker)
        if known is None or known.epoch < epoch:
            self._end(known)
            known = workers[holder.worker] = _Worker(epoch)
        if known.epoch > epoch or known.lost:
            return None
        rank = known.ranks.get(holder.rank)
        if rank is None:
            rank = known.ranks[holder.rank] = self._begin(holder)
        return rank

    def _end(self, known: _Worker[R] | None) -> None:
        if known is not None:
            for rank in known.ranks.values():
                rank.clear()


class Follower(Generic[R]):
    """What both indexes have in common: lives that are told of, and asked about."""

    def __init__(self, begin: Callable[[Holder], R]) -> None:
        self._lives = Lives(begin)

    @property
    def counters(self) -> Counters:
        """What was not taken as it came."""
        return self._lives.counters

    def heard(self, partition: int, holder: Holder, epoch: int, last_event_id: int) -> None:
        """A heartbeat says how far events have gone: a tail that is missing is a gap, too."""
        self._lives.heard(partition, holder, epoch, last_event_id + 1)

    def lose(self, partition: int, worker: str, epoch: int) -> None:
        """An epoch of a worker is over."""
        self._lives.lose(partition, worker, epoch)

    def forget(self, partition: int) -> None:
        """Drop all that came from a partition."""
        self._lives.forget(partition)

    def drop(self, partition: int, worker: str) -> None:
        """Forget a worker, as if nothing had come from it."""
        self._lives.drop(partition, worker)

    def holdings(self) -> dict[Holder, Holding]:
        """How much each cache holds."""
        return {holder: Holding(rank.tier_blocks, rank.complete) for holder, rank in self._lives}

    def is_complete(self, holder: Holder) -> bool:
        """Whether all that a cache holds was announced in what was read of the log."""
        rank = self._lives.find(holder)
        return rank is not None and rank.complete

    def blocks(self, holder: Holder) -> int:
        """Keys that a cache holds, over all tiers."""
        rank = self._lives.find(holder)
        return rank.blocks if rank else 0


def cache_tag(holder: Holder, tier: Tier) -> int:
    """What tells one tier of one cache from all others in digests: a u64."""
    return xxh3(holder.worker.encode(), holder.rank * len(Tier) + tier)


def _check(described: Any) -> None:
    """Raise ValueError for what no index tells of its workers."""
    if not isinstance(described, dict):
        raise ValueError("workers that are none")  # noqa: TRY004 - of bytes
    for worker, said in described.items():
        worker.encode()  # a name that is no text
        if not isinstance(said, dict) or said.keys() != {"epoch", "lost", "ranks"}:
            raise ValueError(f"worker {worker!r} that is none")
        _check_number(said["epoch"], "epoch")
        numbers = set()
        for number, following, complete, overflowed in said["ranks"]:
            _check_number(number, "rank")
            if following is not None:
                _check_number(following, "event id", least=-1 << 63)
            if not (isinstance(complete, bool) and isinstance(overflowed, bool)):
                raise ValueError("a rank that is none")  # noqa: TRY004 - of bytes
            numbers.add(number)
        if len(numbers) != len(said["ranks"]):
            raise ValueError(f"worker {worker!r} with a rank twice")


def _check_number(value: Any, name: str, least: int = 0) -> None:
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{name} {value!r}")
