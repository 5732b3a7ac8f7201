"""KV index: the view of the cache events. Which rank of which worker caches which block, and where.

Passes the content of records on to the index (`indexer/index.py`; the rules: `indexer/epochs.py`).
Malformed columns, and keys made with another secret, are counted and skipped; the latter means a
misconfigured process, whose cache appears empty, and is logged as an error. A `Lost` drops the
blocks of its epoch; those of a worker that left otherwise are dropped a day after its last record.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvlane.app.routing.state.fleet import LastSeen
from kvlane.indexer.block_hashes import KeySecret
from kvlane.indexer.epochs import CacheId, CacheSize, Overlap
from kvlane.indexer.events import EventColumns, MalformedColumns, Tier
from kvlane.indexer.index import Index as BlockIndex
from kvlane.indexer.index import MatchDepths
from kvlane.streams.ports import Partition
from kvlane.streams.records import Blocks, Heartbeat, LogRecord, Lost

log = logging.getLogger(__name__)

REPORT_EVERY = 10_000
"""Records of one worker under another secret between two log messages."""
MAX_CACHED_LOOKUPS = 256
"""Prompts whose depths are remembered."""


@dataclass
class SkippedRecords:
    """Numbers of skipped records since the process began; no part of the state."""

    malformed: int = 0
    wrong_secret: int = 0
    """Under another hash secret; must stay 0."""


class KvIndexView:
    """Blocks by worker and rank; a `MaterializedView` (streams/views/view.py) over kv-events."""

    name = "index"

    def __init__(self, secret: KeySecret) -> None:
        """`secret`: the one behind the keys of all workers."""
        self.skipped = SkippedRecords()
        self.secret = secret
        self.blocks = BlockIndex(secret)
        self.publishing: set[str] = set()
        """Workers with cache events other than the `cleared` of an epoch."""
        self._foreign: dict[str, int] = {}
        self._signs: dict[Partition, LastSeen] = {}
        self._positions: dict[Partition, int] = {}
        self._found: dict[int, tuple[NDArray[np.uint64], MatchDepths]] = {}
        """By the identity of a prompt's hashes, unique for as long as they are here."""

    def depths(self, local: NDArray[np.uint64]) -> MatchDepths:
        """The cached prefix of a prompt by columns (see `MatchDepths`), remembered until the next
        event, since a waiting request is planned several times."""
        known = self._found.get(id(local))
        if known is None:
            if len(self._found) >= MAX_CACHED_LOOKUPS:
                self._found.clear()
            known = self._found[id(local)] = local, self.blocks.match_depths(local)
        return known[1]

    def overlaps(self, local: NDArray[np.uint64]) -> dict[CacheId, Overlap]:
        """The leading blocks of a prompt in each cache that holds any, by its local hashes."""
        return self.blocks.match_prefix(local)

    def cache_sizes(self) -> dict[CacheId, CacheSize]:
        return self.blocks.cache_sizes()

    def entries(self, holder: CacheId, tier: Tier) -> dict[int, int]:
        return self.blocks.blocks_of(holder, tier)

    @property
    def wrong_secret_workers(self) -> tuple[str, ...]:
        """Workers that have published keys under another secret."""
        return tuple(sorted(self._foreign))

    # --- the view --------------------------------------------------------------------------------

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        self._found.clear()
        for log_record in log_records:
            record = log_record.record
            if not isinstance(record, Blocks | Heartbeat | Lost):
                continue
            for gone in self._seen(source).touch(record.worker, log_record.timestamp_ms):
                self.blocks.drop_worker(source.partition, gone)
                self.publishing.discard(gone)
            if isinstance(record, Blocks):
                self._take(source, record)
            elif isinstance(record, Heartbeat):
                for rank, event_id in enumerate(record.last_event_ids):
                    holder = CacheId(record.worker, rank)
                    self._note_events(record.worker, event_id)
                    self.blocks.on_heartbeat(source.partition, holder, record.epoch, event_id)
            else:
                self.blocks.end_epoch(source.partition, record.worker, record.epoch)
        self._positions[source] = position

    def _seen(self, source: Partition) -> LastSeen:
        return self._signs.setdefault(source, LastSeen())

    def _note_events(self, worker: str, event_id: int) -> None:
        if event_id > 0:
            self.publishing.add(worker)

    def _take(self, source: Partition, record: Blocks) -> None:
        if record.hash_fingerprint != self.secret.fingerprint:
            self._report_wrong_secret(record)
            return
        columns = EventColumns(
            record.kinds, record.tiers, record.positions, record.counts, record.keys
        )
        holder = CacheId(record.worker, record.rank)
        self._note_events(record.worker, record.first_event_id)
        try:
            self.blocks.apply_events(
                source.partition, holder, record.epoch, record.first_event_id, columns
            )
        except MalformedColumns as e:
            self.skipped.malformed += 1
            log.warning("blocks of %s skipped: %s", record.worker, e)

    def _report_wrong_secret(self, record: Blocks) -> None:
        self.skipped.wrong_secret += 1
        seen = self._foreign[record.worker] = self._foreign.get(record.worker, 0) + 1
        if seen % REPORT_EVERY == 1:
            log.error(
                "the cache of worker %s is unknown: its keys are made with another secret "
                "(fingerprint %s, not %s); give all processes the same KVLANE_HASH_SECRET",
                record.worker, record.hash_fingerprint or "none", self.secret.fingerprint,
            )  # fmt: skip

    def position(self, source: Partition) -> int | None:
        return self._positions.get(source)

    def forget(self, source: Partition) -> None:
        self._positions.pop(source, None)
        self._signs.pop(source, None)
        self._found.clear()
        self.blocks.drop_partition(source.partition)

    def snapshot(self, source: Partition) -> bytes:
        blocks = self.blocks.snapshot(source.partition)
        return msgspec.msgpack.encode((list(self._seen(source).times.items()), blocks))

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        times, blocks = msgspec.msgpack.decode(data, type=tuple[list[tuple[str, int]], bytes])
        self._found.clear()
        self.blocks.restore(source.partition, blocks)
        self._signs[source] = LastSeen(dict(times))
        self._positions[source] = position

    def state_hash(self, source: Partition) -> str:
        """Equal for replicas at equal positions, in hex."""
        return f"{self.blocks.state_hash(source.partition):016x}"
