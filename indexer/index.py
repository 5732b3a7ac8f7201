"""The index: which caches hold how much of a prompt; follows events, answers in microseconds.

How a block is stored. Its key (`keys.py`) has one slot in the table of its tier (`table.py`), which
names the set of the caches that hold it (`sets.py`); a cache is a *column* of those sets. `stored`
and `removed` rows move blocks from one set to another (`changes.py`). Table and sets of a tier have
a `Store` that keeps room in them (`store.py`). What events count is decided before, in `lives.py`.

How it is found. `match` gets the hashes of a prompt's blocks, looks where along the prompt the set
of holders changes, and reads every cache's depth off those few places (`search.py`).

How all of a cache's blocks go (`cleared`, `lose`, a new epoch): at once, whatever it held. Its
column is *retired*: masked out of all answers, and out of the state hash, since its account is
dropped. The slots are swept later, some with every change. Then the column is used again.

*Closed* means that a cache holds no block of the device tier without the one before it. Bridges
announce blocks so (`bridge.py`), and no event is ever missed unnoticed. For a cache whose log does
not begin at a `cleared`, or that had blocks refused, it is not known; while there is such a cache,
every block of a prompt is looked at.

One writer, and any number of threads that call `match` or `depths` beside it: these take the arrays
of a tier as one tuple, run without the interpreter's lock, and look again when sets were recycled
under them. All else is for the writer's thread, or while it does nothing. Each cache has
`max_blocks` at most; positions are kept for people, answers do not depend on them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexer import snapshots
from indexer.changes import ACCOUNT_WORDS, BLOCKS, DIGEST
from indexer.entries import deepen, match
from indexer.events import CLEARED, Columns, Event, Kind, Rows, Tier, encode, rows_of
from indexer.keys import LOOPBACK_SECRET, KeySecret, derive
from indexer.lives import Follower, Holder, Overlap, Rank, cache_tag
from indexer.prefixes import Scratch, new_scratch
from indexer.search import FEW, RETRY
from indexer.sets import LEAST_ROWS, WORD_BITS, new_sets, with_room
from indexer.store import LONGEST_STEP, View, new_stores
from indexer.xxh3 import M64

MAX_BLOCKS = 1 << 24

SWEEP_STEPS = 4
LEAST_STEPS = 1 << 14
"""Slots copied or swept with any change: 30-60 microseconds."""
RETIRED_LIMIT = 4096
"""Retired columns at which sweeping is no longer put off."""

_NO_COLUMN = -1


class Depths(NamedTuple):
    """The caches that hold the first block of a prompt, and how many blocks by tier.

    `columns`: i64 (n), see `Index.owners`. `depths`: i64 (n, tiers), blocks in that tier, row by
    row in memory.
    """

    columns: NDArray[np.int64]
    depths: NDArray[np.int64]


class _Cache(Rank):
    """A rank in the table: its column, and for each tier its tag and its account."""

    def __init__(self, index: Index, holder: Holder) -> None:
        self.index = index
        self.holder = holder
        self.column = _NO_COLUMN
        self.tags = np.array([cache_tag(holder, tier) for tier in Tier], np.uint64)
        self.accounts = np.zeros((len(Tier), ACCOUNT_WORDS), np.uint64)

    @property
    def tier_blocks(self) -> tuple[int, ...]:
        return tuple(self.accounts[:, BLOCKS].tolist())

    def clear(self) -> None:
        self.index.retire(self)


class Index(Follower[_Cache]):
    """See the module. Raises nothing for what a log may hold but MalformedColumns.

    `max_blocks`: of one cache. `scans`: look at every block, as if no cache were closed.
    """

    def __init__(
        self, secret: KeySecret, *, max_blocks: int = MAX_BLOCKS, scans: bool = False
    ) -> None:
        super().__init__(lambda holder: _Cache(self, holder))
        self._fingerprint = secret.fingerprint
        self._mixing = np.array([secret.start, secret.step, secret.first, secret.second], np.uint64)
        self._max_blocks = max_blocks
        self._scans = scans
        self._views, self._stores = new_stores(len(Tier))
        self._alive = np.zeros(1, np.uint64)
        self.owners: list[Holder] = []
        """The cache of each column, or the last one it was of. Another list for every new cache."""
        self._free_columns: list[int] = []
        self._retired: list[int] = []
        self._leaving: list[int] = []
        """Columns of the sweep that is under way."""
        self._is_tiered = False
        """Whether there was ever a block below the device tier."""
        self._open: set[int] = set()
        """Columns that may not be closed."""
        self._local = threading.local()

    # --- what events do --------------------------------------------------------------------------

    def apply(
        self, partition: int, holder: Holder, epoch: int, first_event_id: int, columns: Columns
    ) -> None:
        """Take the events of one record. Raises MalformedColumns, with nothing taken."""
        rows = rows_of(columns)
        cache = self._lives.heard(partition, holder, epoch, first_event_id)
        if cache is None:
            self.counters.stale_events += len(rows.kinds)
            return
        skipped = self._lives.news(cache, first_event_id, len(rows.kinds))
        for tier, part in _parts(columns, rows, skipped):
            if tier is None:
                self._lives.clear(cache, complete=True)
            else:
                self._change(cache, tier, part)
        self._note(cache)
        self.tidy(max(SWEEP_STEPS * len(rows.keys), LEAST_STEPS))

    def _change(self, cache: _Cache, tier: Tier, rows: Rows) -> None:
        keys, column = len(rows.keys), self._column(cache)
        self._is_tiered |= tier != Tier.DEVICE
        if keys > self._max_blocks - cache.blocks:
            self._open.add(column)  # before readers see what is there without what was refused
        accounts = cache.accounts
        refused = self._stores[tier].apply(
            column, cache.tags, rows, self._max_blocks, accounts, len(self.owners)
        )
        if refused:
            self.counters.refused_blocks += refused
            cache.overflowed = True

    # --- what prompts ask ------------------------------------------------------------------------

    def match(self, local: NDArray[np.uint64]) -> dict[Holder, Overlap]:
        """The overlap of a prompt, by its local hashes, with every cache that holds its start."""
        while True:
            owners = self.owners
            columns, parts = self.depths(local)
            if owners is self.owners:  # else a column may have been given to another cache
                break
        return {
            owners[column]: Overlap(*depths)
            for column, depths in zip(columns.tolist(), parts.tolist(), strict=True)
        }

    def depths(self, local: NDArray[np.uint64]) -> Depths:
        """The same as arrays, without looking at each cache. `local`: u64 (blocks)."""
        if not local.flags.writeable or not local.flags.c_contiguous:
            local = local.copy()  # what kernels are compiled for
        while True:
            found = self._depths(local)
            if found is not None:
                return found

    def _depths(self, local: NDArray[np.uint64]) -> Depths | None:
        views = tuple(self._views)
        alive = self._alive  # later than the views: it has a word for each of theirs
        if not len(local):
            return Depths(np.empty(0, np.int64), np.empty((0, len(Tier)), np.int64))
        scratch = self._scratch(len(local), WORD_BITS * len(alive))
        parts = views[Tier.DEVICE].parts
        count = match(
            *parts, alive, self._mixing, local, not (self._open or self._scans), tuple(scratch)
        )
        if count == RETRY:
            return None
        packed = scratch.out[:count].view(np.int64)
        columns, depths = packed >> 32, np.zeros((count, len(Tier)), np.int64)
        depths[:, 0] = packed & 0xFFFFFFFF
        found: Depths | None = Depths(columns, depths)
        if self._is_tiered:
            found = self._below(views, alive, local, scratch, columns, depths[:, 0])
        # What the writer does to its newer arrays, the older ones do not tell.
        return found if tuple(self._views) == views else None

    def _below(
        self,
        views: tuple[View, ...],
        alive: NDArray[np.uint64],
        local: NDArray[np.uint64],
        scratch: Scratch,
        columns: NDArray[np.int64],
        device: NDArray[np.int64],
    ) -> Depths | None:
        """Go on where each cache's device tier ends, one tier after the other."""
        reached = np.zeros((len(Tier) + 1, len(alive) * WORD_BITS), np.int64)
        reached[1, columns] = device
        for tier in list(Tier)[Tier.HOST :]:
            reached[tier + 1] = reached[tier]
            if views[tier].table.used:
                got = deepen(
                    *views[tier].parts, alive, self._mixing, local, reached[tier + 1],
                    tuple(scratch),
                )  # fmt: skip
                if got == RETRY:
                    return None
        found = np.flatnonzero(reached[-1])
        return Depths(found, np.ascontiguousarray(np.diff(reached[:, found], axis=0).T))

    def _scratch(self, blocks: int, columns: int) -> Scratch:
        """This thread's memory for one search."""
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None or len(scratch.spare) < blocks + 2 or len(scratch.out) < columns:
            scratch = self._local.scratch = new_scratch(max(2 * blocks, 1024), columns)
        return scratch

    # --- what people ask -------------------------------------------------------------------------

    def entries(self, holder: Holder, tier: Tier) -> dict[int, int]:
        """The keys in one tier of a cache, with their positions, by which they are sorted."""
        cache = self._lives.find(holder)
        if cache is None or cache.column == _NO_COLUMN:
            return {}
        keys, positions, _ = self._stores[tier].dump([cache.column])
        order = np.argsort(positions, kind="stable")
        return dict(zip(keys[order].tolist(), positions[order].tolist(), strict=True))

    def state_hash(self, partition: int) -> int:
        """A u64 that is equal for equal contents, in whatever order they came."""
        return M64 & sum(
            int(account[DIGEST])
            for _, cache in self._lives.of(partition)
            for account in cache.accounts
        )

    @property
    def nbytes(self) -> int:
        """Memory of the tables and the sets; what is touched of it may be less."""
        return sum(store.nbytes for store in self._stores)

    # --- columns ---------------------------------------------------------------------------------

    def _column(self, cache: _Cache) -> int:
        if cache.column == _NO_COLUMN:
            owners = self.owners.copy()  # readers may still look at the old one
            if self._free_columns:
                cache.column = self._free_columns.pop()
                owners[cache.column] = cache.holder
            else:
                cache.column = len(owners)
                owners.append(cache.holder)
            self._note(cache)
            if len(owners) > WORD_BITS * len(self._alive):
                self._alive = np.append(self._alive, np.zeros_like(self._alive))
            self.owners = owners
            self._alive[cache.column // WORD_BITS] |= _bit(cache.column)
        return cache.column

    def retire(self, cache: _Cache) -> None:
        """A cache holds nothing any more; its column goes, and it gets another one when it must."""
        column = cache.column
        if column == _NO_COLUMN:
            return
        self._alive[column // WORD_BITS] &= ~_bit(column)
        (self._retired if cache.blocks else self._free_columns).append(column)
        self._open.discard(column)
        cache.column = _NO_COLUMN
        cache.accounts[:] = 0
        if len(self._retired) > RETIRED_LIMIT:
            self.tidy_up()

    def _note(self, cache: _Cache) -> None:
        """Keep in mind whether a cache is closed."""
        if cache.column != _NO_COLUMN:
            if cache.complete and not cache.overflowed:
                self._open.discard(cache.column)
            else:
                self._open.add(cache.column)

    # --- upkeep ----------------------------------------------------------------------------------

    def tidy(self, steps: int = LONGEST_STEP) -> bool:
        """Go on with growing and sweeping, so many slots of them; whether there is more to do.

        Changes do so by themselves, as much as they have to.
        """
        growing = [store for store in self._stores if store.is_growing]
        for store in growing:
            store.grow(steps)
        if not growing and (self._leaving or self._retired):
            self._sweep(steps)
        for store in self._stores:
            store.let_go()
        return bool(growing or self._leaving or self._retired)

    def tidy_up(self) -> None:
        """Go on to the end: 3-10 ns for each slot."""
        while self.tidy():
            pass

    def _sweep(self, steps: int) -> None:
        """Go on taking retired columns out of the tables, where they do not grow just now."""
        if not self._leaving:
            self._leaving, self._retired = self._retired, []
            for store in self._stores:
                store.begin_sweep()
        for store in self._stores:
            store.sweep(self._leaving, steps, len(self.owners))
        if all(store.is_swept for store in self._stores):
            for store in self._stores:
                store.renew()
            self._free_columns += self._leaving
            self._leaving = []

    # --- snapshots -------------------------------------------------------------------------------

    def snapshot(self, partition: int) -> bytes:
        """All that came from a partition. About 0.1 s for a million blocks."""
        caches = [cache for _, cache in self._lives.of(partition)]
        columns = [cache.column for cache in caches]
        held = [column for column in columns if column != _NO_COLUMN]
        tiers = [store.part(columns, held) for store in self._stores]
        return snapshots.encode(self._fingerprint, self._lives.described(partition), tiers)

    def restore(self, partition: int, data: bytes) -> None:
        """The inverse of `snapshot`.

        Raises ValueError for data of another kind or secret, or that no index wrote; then what came
        from the partition is as it was, or forgotten.
        """
        try:
            described, parts = snapshots.decode(data, self._fingerprint, tiers=len(Tier))
            caches = self._lives.restored(partition, described)
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as e:
            raise ValueError(f"a snapshot of what no index holds: {e!r}") from e
        columns = [self._column(cache) for cache in caches]
        for tier, part in zip(Tier, parts, strict=True):
            if not self._load(tier, caches, columns, part):
                self._lives.forget(partition)
                raise ValueError("a snapshot of what no index holds")

    def _load(
        self, tier: Tier, caches: list[_Cache], columns: list[int], part: snapshots.Part
    ) -> bool:
        """Add a tier's blocks; False, in the middle, for what no dump has."""
        if not len(part.keys):
            return True
        if part.rows.shape[1] * WORD_BITS < len(caches):
            return False
        self._is_tiered |= tier != Tier.DEVICE
        tags = [cache.tags[tier] for cache in caches]
        accounts, is_sound = self._stores[tier].load(part, len(self.owners), columns, tags)
        for cache in caches:
            cache.accounts[tier] = accounts[cache.column]
        return is_sound


def _parts(columns: Columns, rows: Rows, skipped: int) -> Iterable[tuple[Tier | None, Rows]]:
    """Rows of one tier each, in order; None for a cleared one."""
    kinds, tiers = columns.kinds[skipped:], columns.tiers[skipped:]
    if not kinds:
        return
    is_plain = tiers.count(tiers[0]) == len(tiers) and Kind.CLEARED not in kinds
    if is_plain and not skipped:
        yield Tier(tiers[0]), rows
        return
    keys = np.append(0, np.cumsum(rows.counts, dtype=np.int64))  # before each row
    at = skipped
    for tier, group in groupby(
        None if kind == Kind.CLEARED else Tier(tier)
        for kind, tier in zip(kinds, tiers, strict=True)
    ):
        until = at + sum(1 for _ in group)
        yield tier, Rows(
            rows.kinds[at:until], rows.tiers[at:until], rows.positions[at:until],
            rows.counts[at:until], rows.keys[keys[at] : keys[until]],
        )  # fmt: skip
        at = until


def _bit(column: int) -> np.uint64:
    return np.uint64(1 << (column % WORD_BITS))


def warm_up() -> None:
    """Call every kernel once, with what it will be called with: an index in small."""
    index = Index(derive(LOOPBACK_SECRET))
    one, other = Holder("one", 0), Holder("other", 0)
    keys = tuple(range(1, 2 * FEW))
    events = [CLEARED, *(Event(Kind.STORED, tier, keys=keys) for tier in Tier)]
    for holder in (one, other):
        index.apply(0, holder, 1, 0, encode([*events, Event(Kind.REMOVED, keys=(1,))]))
    local = np.zeros(2 * FEW, np.uint64)
    index.match(local)
    many = tuple(range(1, 1 << 10))
    index.apply(0, one, 1, len(events) + 1, encode([Event(Kind.STORED, keys=many)]))
    index.lose(0, other.worker, 1)
    index.tidy_up()
    index.restore(0, index.snapshot(0))
    with_room(new_sets(), LEAST_ROWS, 1)
