"""Index: the fold of the cache events. Which rank of which worker holds which block, in which tier.

Passes what records carry on to the index proper (`indexer/index.py`; the rules are in
`indexer/lives.py`). Records that say nothing to us are counted and skipped: columns that no events
give, and keys made with another secret. The latter means that a process was configured wrongly; its
worker seems to hold nothing, and all of its requests are computed from new, so it is said loudly.

A worker that leaves says no more; what it held is dropped a day later, as Fleet forgets it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.routing.signs import Signs
from indexer.events import Columns, MalformedColumns, Tier
from indexer.index import Depths
from indexer.index import Index as BlockIndex
from indexer.keys import KeySecret
from indexer.lives import Holder, Holding, Overlap
from streams.ports import Partition
from streams.records import Blocks, Fact, Heartbeat, Lost

log = logging.getLogger(__name__)

COMPLAIN_EVERY = 10_000
"""Records of one worker under another secret between two complaints."""
FOUND = 256
"""Prompts whose depths are remembered."""


@dataclass
class Skipped:
    """Records that were not taken, since the process began; no part of the state."""

    malformed: int = 0
    foreign: int = 0
    """Under another hash secret; must stay 0."""


class Index:
    """Blocks by worker and rank; a `Fold` (streams/follow.py) over kv-events."""

    name = "index"

    def __init__(self, secret: KeySecret) -> None:
        """`secret`: the one behind the keys of all workers."""
        self.skipped = Skipped()
        self.blocks = BlockIndex(secret)
        self._fingerprint = secret.fingerprint
        self._foreign: dict[str, int] = {}
        self._signs: dict[Partition, Signs] = {}
        self._positions: dict[Partition, int] = {}
        self._found: dict[int, tuple[NDArray[np.uint64], Depths]] = {}
        """By the identity of a prompt's hashes, which is theirs for as long as they stand here."""

    def depths(self, local: NDArray[np.uint64]) -> Depths:
        """The same by columns (see `indexer/index.py`), found once until something is told.

        Who waits is planned several times between two events: with the others who look, and alone.
        """
        known = self._found.get(id(local))
        if known is None:
            if len(self._found) >= FOUND:
                self._found.clear()
            known = self._found[id(local)] = local, self.blocks.depths(local)
        return known[1]

    def overlaps(self, local: NDArray[np.uint64]) -> dict[Holder, Overlap]:
        """The leading blocks of a prompt in each cache that holds any, by its local hashes."""
        return self.blocks.match(local)

    def holdings(self) -> dict[Holder, Holding]:
        """How much each cache holds."""
        return self.blocks.holdings()

    def entries(self, holder: Holder, tier: Tier) -> dict[int, int]:
        """The keys in one tier of a cache, with their positions; a copy."""
        return self.blocks.entries(holder, tier)

    @property
    def foreign_workers(self) -> tuple[str, ...]:
        """Those that have published keys under another secret."""
        return tuple(sorted(self._foreign))

    # --- the fold --------------------------------------------------------------------------------

    def apply(self, source: Partition, facts: Sequence[Fact], position: int) -> None:
        """Take in records of one partition; `position` is the next offset after them."""
        self._found.clear()
        for fact in facts:
            record = fact.record
            if not isinstance(record, Blocks | Heartbeat | Lost):
                continue
            for gone in self._heard(source).note(record.worker, fact.timestamp_ms):
                self.blocks.drop(source.partition, gone)
            if isinstance(record, Blocks):
                self._take(source, record)
            elif isinstance(record, Heartbeat):
                for rank, event_id in enumerate(record.last_event_ids):
                    holder = Holder(record.worker, rank)
                    self.blocks.heard(source.partition, holder, record.epoch, event_id)
            else:
                self.blocks.lose(source.partition, record.worker, record.epoch)
        self._positions[source] = position

    def _heard(self, source: Partition) -> Signs:
        return self._signs.setdefault(source, Signs())

    def _take(self, source: Partition, record: Blocks) -> None:
        if record.hash_fingerprint != self._fingerprint:
            self._complain(record)
            return
        columns = Columns(record.kinds, record.tiers, record.positions, record.counts, record.keys)
        holder = Holder(record.worker, record.rank)
        try:
            self.blocks.apply(
                source.partition, holder, record.epoch, record.first_event_id, columns
            )
        except MalformedColumns as e:
            self.skipped.malformed += 1
            log.warning("blocks of %s skipped: %s", record.worker, e)

    def _complain(self, record: Blocks) -> None:
        self.skipped.foreign += 1
        seen = self._foreign[record.worker] = self._foreign.get(record.worker, 0) + 1
        if seen % COMPLAIN_EVERY == 1:
            log.error(
                "the cache of %s is unknown: its keys are of another secret (fingerprint %s, ours "
                "is %s): give all processes the same KVLANE_HASH_SECRET",
                record.worker, record.hash_fingerprint or "none", self._fingerprint,
            )  # fmt: skip

    def position(self, source: Partition) -> int | None:
        """Next offset to read; None before the first."""
        return self._positions.get(source)

    def forget(self, source: Partition) -> None:
        """Drop what came from one partition."""
        self._positions.pop(source, None)
        self._signs.pop(source, None)
        self._found.clear()
        self.blocks.forget(source.partition)

    def snapshot(self, source: Partition) -> bytes:
        """What came from one partition."""
        blocks = self.blocks.snapshot(source.partition)
        return msgspec.msgpack.encode((list(self._heard(source).times.items()), blocks))

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        """The inverse of `snapshot`. Raises ValueError for data of another kind or secret."""
        times, blocks = msgspec.msgpack.decode(data, type=tuple[list[tuple[str, int]], bytes])
        self._found.clear()
        self.blocks.restore(source.partition, blocks)
        self._signs[source] = Signs(dict(times))
        self._positions[source] = position

    def state_hash(self, source: Partition) -> str:
        """Equal for replicas at equal positions, in hex."""
        return f"{self.blocks.state_hash(source.partition):016x}"
