"""KV cache index: which caches hold which prefix of a prompt, answered in microseconds.

Storage. The key of a block (`indexer/block_hashes.py`) has one slot in the table of its tier
(`indexer/blocks/block_table.py`), with the set of caches that hold the block
(`indexer/blocks/holder_sets.py`); a cache is a *column* of those sets. `stored` and `removed` rows
move blocks from one set to another (`indexer/blocks/updates.py`).

Lookup. `match_prefix` finds the positions along a prompt where the set of holders changes, and
derives the depth of every cache from them (`indexer/blocks/prefix_search.py`).

Removal of a whole cache (`cleared`, `end_epoch`, a new epoch) takes constant time: its column is
*retired*, masked out of all answers and of the state hash. The slots are swept with later changes;
then the column is used again.

*Closed* means that a cache holds no block of the device tier without its parent. Workers publish
blocks that way (`indexer/cache_events/event_normalizer.py`). A cache whose log does not start at a
`cleared`, or that had blocks rejected, may not be closed; while there is one, every block of a
prompt is looked up. Closed caches are only searched for a prompt whose first block was stored at
position 0.

One writer, and any number of threads that call `match_prefix` or `match_depths`: these take the
arrays of a tier as one tuple, run without the interpreter's lock, and retry when sets were
recycled. Everything else belongs to the writer's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.block_hashes import LOOPBACK_SECRET, KeySecret, derive_secret
from kvlane.indexer.blocks import snapshot_format
from kvlane.indexer.blocks.holder_sets import MIN_ROWS, WORD_BITS, empty_sets, with_capacity
from kvlane.indexer.blocks.kernel_entry import KernelArrays, extend_to_lower_tier, match_prefix
from kvlane.indexer.blocks.prefix_keys import new_scratch
from kvlane.indexer.blocks.prefix_search import RETRY, SCAN_THRESHOLD
from kvlane.indexer.blocks.tier_store import MAX_STEP_SLOTS, TierView, new_stores
from kvlane.indexer.blocks.updates import ACCOUNT_WORDS, BLOCK_COUNT, DIGEST_SUM
from kvlane.indexer.epochs import CacheId, CacheState, EpochTracker, Overlap, cache_tag
from kvlane.indexer.events import (
    CLEARED,
    CacheEvent,
    EventColumns,
    EventKind,
    EventRows,
    Tier,
    encode_events,
    parse_columns,
)
from kvlane.indexer.xxh3 import M64

MAX_CACHE_BLOCKS = 1 << 24

SWEEP_SLOTS_PER_KEY = 4
MIN_MAINTENANCE_SLOTS = 1 << 14
"""Minimum slots copied or swept with every change."""
MAX_RETIRED_COLUMNS = 4096
"""Retired columns at which the sweep is finished at once."""

_NO_COLUMN = -1


class MatchDepths(NamedTuple):
    """Caches that hold the first block of a prompt, and their matched blocks by tier. `columns`:
    i64 (n), see `Index.column_owners`. `depths`: i64 (n, tiers), in row-major order."""

    columns: NDArray[np.int64]
    depths: NDArray[np.int64]


class _ThreadScratch:
    """Scratch memory of a thread, for up to `blocks` blocks and `columns` columns. `found`,
    `depths`: the results of a kernel, i64 (columns) and (columns, tiers)."""

    def __init__(self, blocks: int, columns: int) -> None:
        arrays = new_scratch(blocks, columns)
        self.blocks = blocks
        self.columns = columns
        self.found = arrays.columns
        self.depths = arrays.depths.reshape(-1, len(Tier))
        self._arrays = KernelArrays(arrays)
        self.places = self._arrays.places


class _Cache(CacheState):
    """Rank whose blocks are a column of the table; with a tag and an account for each tier."""

    def __init__(self, index: Index, holder: CacheId) -> None:
        self.index = index
        self.holder = holder
        self.column = _NO_COLUMN
        self.tags = np.array([cache_tag(holder, tier) for tier in Tier], np.uint64)
        self.accounts = np.zeros((len(Tier), ACCOUNT_WORDS), np.uint64)

    @property
    def tier_block_counts(self) -> tuple[int, ...]:
        return tuple(self.accounts[:, BLOCK_COUNT].tolist())

    def drop_blocks(self) -> None:
        self.index.retire_column(self)


class Index(EpochTracker[_Cache]):
    """KV cache index: the cached prefix length of a prompt, for every cache.

    Args:
        secret: constants of the block keys, the same as in the events (`indexer/block_hashes.py`).
        max_blocks: limit of one cache; further blocks are rejected and counted.
        scan_all: look up every block, as if no cache were closed.

    `apply_events` is called by one thread; any number of others may call `match_prefix` meanwhile.
    The only error that a record of the log can raise is MalformedColumns.

    Example:
        secret = derive_secret(b"a secret of the deployment")
        index, hashes = Index(secret), hash_blocks(tokens, 16).local
        keys = tuple(prompt_keys(hashes, secret).tolist())
        events = [CLEARED, CacheEvent(EventKind.STORED, keys=keys)]
        index.apply_events(0, CacheId("worker-1", 0), 1, 0, encode_events(events))
        index.match_prefix(hashes)             # {CacheId("worker-1", 0): Overlap(device=...)}
    """

    def __init__(
        self, secret: KeySecret, *, max_blocks: int = MAX_CACHE_BLOCKS, scan_all: bool = False
    ) -> None:
        super().__init__(lambda holder: _Cache(self, holder))
        self._fingerprint = secret.fingerprint
        self._constants = np.array(
            [secret.start, secret.step, secret.first, secret.second], np.uint64
        )
        self._max_blocks = max_blocks
        self._scans = scan_all
        self._views, self._stores = new_stores(len(Tier))
        self._alive = np.zeros(1, np.uint64)
        self.column_owners: list[CacheId] = []
        """The cache of each column, or its last one. The list is replaced for every new cache."""
        self._free_columns: list[int] = []
        self._retired: list[int] = []
        self._leaving: list[int] = []
        """Columns of the sweep in progress."""
        self._is_tiered = False
        """Whether there was ever a block below the device tier."""
        self._open: set[int] = set()
        """Columns that may not be closed."""
        self._local = threading.local()

    # --- events ----------------------------------------------------------------------------------

    def apply_events(
        self,
        partition: int,
        holder: CacheId,
        epoch: int,
        first_event_id: int,
        columns: EventColumns,
    ) -> None:
        """Apply the events of one record. Raises MalformedColumns, with nothing applied."""
        rows = parse_columns(columns)
        cache = self.advance_to(partition, holder, epoch, first_event_id)
        if cache is None:
            self.counters.stale_events += len(rows.kinds)
            return
        skipped = self.skip_duplicates(cache, first_event_id, len(rows.kinds))
        for tier, part in _parts(columns, rows, skipped):
            if tier is None:
                self.clear_cache(cache, complete=True)
            else:
                self._apply_rows(cache, tier, part)
        self._update_openness(cache)
        self.maintain(max(SWEEP_SLOTS_PER_KEY * len(rows.keys), MIN_MAINTENANCE_SLOTS))

    def _apply_rows(self, cache: _Cache, tier: Tier, rows: EventRows) -> None:
        keys, column = len(rows.keys), self._column(cache)
        self._is_tiered |= tier != Tier.DEVICE
        if keys > self._max_blocks - cache.block_count:
            self._open.add(column)  # before readers see the table without the rejected blocks
        accounts = cache.accounts
        refused = self._stores[tier].apply_rows(
            column, cache.tags, rows, self._max_blocks, accounts, len(self.column_owners)
        )
        if refused:
            self.counters.rejected_blocks += refused
            cache.has_rejected_blocks = True

    # --- lookups ---------------------------------------------------------------------------------

    def match_prefix(self, local: NDArray[np.uint64]) -> dict[CacheId, Overlap]:
        """Overlap of a prompt, given by its local hashes, with each cache that holds its start."""
        while True:
            owners = self.column_owners
            columns, parts = self.match_depths(local)
            if owners is self.column_owners:  # else a column may have been given to another cache
                break
        return {
            owners[column]: Overlap(*depths)
            for column, depths in zip(columns.tolist(), parts.tolist(), strict=True)
        }

    def match_depths(self, local: NDArray[np.uint64]) -> MatchDepths:
        """The same as arrays, without an object per cache. `local`: u64 (blocks)."""
        if not local.flags.writeable or not local.flags.c_contiguous:
            local = local.copy()  # kernels are compiled for this layout only
        while True:
            found = self._depths(local)
            if found is not None:
                return found

    def _depths(self, local: NDArray[np.uint64]) -> MatchDepths | None:
        views = tuple(self._views)
        alive = self._alive  # later than the views: it has a word for each of theirs
        if not len(local):
            return MatchDepths(np.empty(0, np.int64), np.empty((0, len(Tier)), np.int64))
        scratch = self._scratch(len(local), WORD_BITS * len(alive))
        parts = views[Tier.DEVICE].kernel_arguments
        count = match_prefix(
            *parts, alive, self._constants, local, not (self._open or self._scans), scratch.places
        )
        if count == RETRY:
            return None
        found: MatchDepths | None = MatchDepths(
            scratch.found[:count].copy(), scratch.depths[:count].copy()
        )
        if self._is_tiered:
            found = self._below(views, alive, local, scratch, count)
        # Changes of the writer to newer arrays are not visible in the older ones.
        return found if tuple(self._views) == views else None

    def _below(
        self,
        views: tuple[TierView, ...],
        alive: NDArray[np.uint64],
        local: NDArray[np.uint64],
        scratch: _ThreadScratch,
        count: int,
    ) -> MatchDepths | None:
        """Extend the depths of the found caches into the lower tiers, one after the other."""
        reached = np.zeros((len(Tier) + 1, len(alive) * WORD_BITS), np.int64)
        reached[1, scratch.found[:count]] = scratch.depths[:count, 0]
        for tier in list(Tier)[Tier.HOST :]:
            reached[tier + 1] = reached[tier]
            if views[tier].table.used:
                got = extend_to_lower_tier(
                    *views[tier].kernel_arguments, alive, self._constants, local, reached[tier + 1],
                    scratch.places,
                )  # fmt: skip
                if got == RETRY:
                    return None
        found = np.flatnonzero(reached[-1])
        return MatchDepths(found, np.ascontiguousarray(np.diff(reached[:, found], axis=0).T))

    def _scratch(self, blocks: int, columns: int) -> _ThreadScratch:
        scratch: _ThreadScratch | None = getattr(self._local, "scratch", None)
        if scratch is None or scratch.blocks < blocks or scratch.columns < columns:
            scratch = self._local.scratch = _ThreadScratch(max(2 * blocks, 1024), columns)
        return scratch

    # --- inspection ------------------------------------------------------------------------------

    def blocks_of(self, holder: CacheId, tier: Tier) -> dict[int, int]:
        """Keys in one tier of a cache with their positions, sorted by position."""
        cache = self.find_cache(holder)
        if cache is None or cache.column == _NO_COLUMN:
            return {}
        keys, positions, _ = self._stores[tier].dump_blocks([cache.column])
        order = np.argsort(positions, kind="stable")
        return dict(zip(keys[order].tolist(), positions[order].tolist(), strict=True))

    def state_hash(self, partition: int) -> int:
        """Hash of the contents of a partition, independent of their order: a u64."""
        return M64 & sum(
            int(account[DIGEST_SUM])
            for _, cache in self.caches_of(partition)
            for account in cache.accounts
        )

    # --- columns ---------------------------------------------------------------------------------

    def _column(self, cache: _Cache) -> int:
        if cache.column == _NO_COLUMN:
            owners = self.column_owners.copy()  # readers may still use the old one
            if self._free_columns:
                cache.column = self._free_columns.pop()
                owners[cache.column] = cache.holder
            else:
                cache.column = len(owners)
                owners.append(cache.holder)
            self._update_openness(cache)
            if len(owners) > WORD_BITS * len(self._alive):
                self._alive = np.append(self._alive, np.zeros_like(self._alive))
            self.column_owners = owners
            self._alive[cache.column // WORD_BITS] |= _bit(cache.column)
        return cache.column

    def retire_column(self, cache: _Cache) -> None:
        """Drop all blocks of a cache: its column is retired, and the next block takes another."""
        column = cache.column
        if column == _NO_COLUMN:
            return
        self._alive[column // WORD_BITS] &= ~_bit(column)
        (self._retired if cache.block_count else self._free_columns).append(column)
        self._open.discard(column)
        cache.column = _NO_COLUMN
        cache.accounts[:] = 0
        if len(self._retired) > MAX_RETIRED_COLUMNS:
            self.maintain_fully()

    def _update_openness(self, cache: _Cache) -> None:
        if cache.column != _NO_COLUMN:
            if cache.is_complete and not cache.has_rejected_blocks:
                self._open.discard(cache.column)
            else:
                self._open.add(cache.column)

    # --- upkeep ----------------------------------------------------------------------------------

    def maintain(self, steps: int = MAX_STEP_SLOTS) -> bool:
        """Grow and sweep up to `steps` slots; returns whether more remains to be done. Every change
        does the share that it must."""
        growing = [store for store in self._stores if store.is_growing]
        for store in growing:
            store.grow_table(steps)
        if not growing and (self._leaving or self._retired):
            self._sweep(steps)
        for store in self._stores:
            store.release_old_views()
        return bool(growing or self._leaving or self._retired)

    def maintain_fully(self) -> None:
        while self.maintain():
            pass

    def _sweep(self, steps: int) -> None:
        """Remove retired columns from up to `steps` more slots of tables that are not growing."""
        if not self._leaving:
            self._leaving, self._retired = self._retired, []
            for store in self._stores:
                store.begin_sweep()
        for store in self._stores:
            store.sweep_columns(self._leaving, steps, len(self.column_owners))
        if all(store.is_swept for store in self._stores):
            for store in self._stores:
                store.bump_generation()
            self._free_columns += self._leaving
            self._leaving = []

    # --- snapshots -------------------------------------------------------------------------------

    def snapshot(self, partition: int) -> bytes:
        caches = [cache for _, cache in self.caches_of(partition)]
        columns = [cache.column for cache in caches]
        held = [column for column in columns if column != _NO_COLUMN]
        tiers = [store.snapshot_part(columns, held) for store in self._stores]
        return snapshot_format.encode_snapshot(self._fingerprint, self.serialize(partition), tiers)

    def restore(self, partition: int, data: bytes) -> None:
        """Restore a partition, the inverse of `snapshot`. Raises ValueError for another format or
        secret, or inconsistent data; the partition is then unchanged, or empty."""
        try:
            described, parts = snapshot_format.decode_snapshot(
                data, self._fingerprint, tiers=len(Tier)
            )
            caches = self.deserialize(partition, described)
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as e:
            raise ValueError(f"inconsistent snapshot of the index: {e!r}") from e
        columns = [self._column(cache) for cache in caches]
        for tier, part in zip(Tier, parts, strict=True):
            if not self._load(tier, caches, columns, part):
                self.drop_partition(partition)
                raise ValueError("inconsistent snapshot of the index: blocks of impossible caches")

    def _load(
        self, tier: Tier, caches: list[_Cache], columns: list[int], part: snapshot_format.TierPart
    ) -> bool:
        """Add a tier's blocks; False, with a part of them added, for inconsistent data."""
        if not len(part.keys):
            return True
        if part.rows.shape[1] * WORD_BITS < len(caches):
            return False
        self._is_tiered |= tier != Tier.DEVICE
        tags = [cache.tags[tier] for cache in caches]
        accounts, is_sound = self._stores[tier].load_blocks(
            part, len(self.column_owners), columns, tags
        )
        for cache in caches:
            cache.accounts[tier] = accounts[cache.column]
        return is_sound


def _parts(
    columns: EventColumns, rows: EventRows, skipped: int
) -> Iterable[tuple[Tier | None, EventRows]]:
    """Rows grouped by tier, in order; tier None for `cleared`."""
    kinds, tiers = columns.kinds[skipped:], columns.tiers[skipped:]
    if not kinds:
        return
    is_plain = tiers.count(tiers[0]) == len(tiers) and EventKind.CLEARED not in kinds
    if is_plain and not skipped:
        yield Tier(tiers[0]), rows
        return
    keys = np.append(0, np.cumsum(rows.counts, dtype=np.int64))  # before each row
    at = skipped
    for tier, group in groupby(
        None if kind == EventKind.CLEARED else Tier(tier)
        for kind, tier in zip(kinds, tiers, strict=True)
    ):
        until = at + sum(1 for _ in group)
        yield tier, EventRows(
            rows.kinds[at:until], rows.tiers[at:until], rows.positions[at:until],
            rows.counts[at:until], rows.keys[keys[at] : keys[until]],
        )  # fmt: skip
        at = until


def _bit(column: int) -> np.uint64:
    return np.uint64(1 << (column % WORD_BITS))


def warm_up() -> None:
    """Call every kernel once, with arguments of the types that it will get."""
    index = Index(derive_secret(LOOPBACK_SECRET))
    one, other = CacheId("one", 0), CacheId("other", 0)
    keys = tuple(range(1, 2 * SCAN_THRESHOLD))
    events = [CLEARED, *(CacheEvent(EventKind.STORED, tier, keys=keys) for tier in Tier)]
    for holder in (one, other):
        index.apply_events(
            0, holder, 1, 0, encode_events([*events, CacheEvent(EventKind.REMOVED, keys=(1,))])
        )
    local = np.zeros(2 * SCAN_THRESHOLD, np.uint64)
    index.match_prefix(local)
    many = tuple(range(1, 1 << 10))
    index.apply_events(
        0, one, 1, len(events) + 1, encode_events([CacheEvent(EventKind.STORED, keys=many)])
    )
    index.end_epoch(0, other.worker, 1)
    index.maintain_fully()
    index.restore(0, index.snapshot(0))
    with_capacity(empty_sets(), MIN_ROWS, 1)
