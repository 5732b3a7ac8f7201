"""The index: which caches hold how much of a prompt; follows events, answers in microseconds.

How a block is stored. Its key (`keys.py`) has one slot in the table of its tier (`table.py`), which
names the set of the caches that hold it (`sets.py`); a cache is a *column* of those sets. `stored`
and `removed` rows move blocks from one set to another (`changes.py`). What events count is decided
before, in `lives.py`.

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
from indexer.changes import ACCOUNT_WORDS, BLOCKS, DIGEST, GROW_STEPS, dump, load, sweep
from indexer.entries import NO_ROOM, Parts, apply_rows, deepen, match
from indexer.events import CLEARED, Columns, Event, Kind, Rows, Tier, encode, rows_of
from indexer.keys import LOOPBACK_SECRET, KeySecret, derive
from indexer.lives import Counters, Holder, Holding, Lives, Overlap, Rank
from indexer.search import FEW, RETRY, Scratch, new_scratch
from indexer.sets import GENERATION, WORD_BITS, Sets, new_sets, with_room
from indexer.table import CAPACITY, FRONTIER, Table, grow, grown, needs_room, new_table, settled
from indexer.xxh3 import M64, xxh3

MAX_BLOCKS = 1 << 24

SWEEP_STEPS = 4
LEAST_STEPS = 1 << 14
"""Slots copied or swept with any change: 30-60 microseconds."""
RETIRED_LIMIT = 4096
"""Retired columns at which sweeping is no longer put off."""
LONGEST_STEP = 1 << 20

_NO_COLUMN = -1


class Depths(NamedTuple):
    """The caches that hold the first block of a prompt, and how many blocks by tier.

    `columns`: i64 (n), see `Index.owners`. `depths`: i64 (n, tiers), blocks in that tier.
    """

    columns: NDArray[np.int64]
    depths: NDArray[np.int64]


class View:
    """A tier's arrays, as a reader takes them; also as plain tuples, for kernels."""

    def __init__(self, table: Table, sets: Sets) -> None:
        self.table = table
        self.sets = sets
        self.parts: tuple[Parts, Parts] = tuple(table), tuple(sets)


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


class Index:
    """See the module. Raises nothing for what a log may hold but MalformedColumns."""

    def __init__(self, secret: KeySecret, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._fingerprint = secret.fingerprint
        self._mixing = np.array([secret.start, secret.step, secret.first, secret.second], np.uint64)
        self._max_blocks = max_blocks
        self._lives = Lives(lambda holder: _Cache(self, holder))
        self._views = [View(new_table(), new_sets()) for _ in Tier]
        self._alive = np.zeros(1, np.uint64)
        self.owners: list[Holder] = []
        """The cache of each column, or the last one it was of. Another list for every new cache."""
        self._free_columns: list[int] = []
        self._retired: list[int] = []
        self._leaving: list[int] = []
        """Columns of the sweep that is under way."""
        self._swept_to = [0] * len(Tier)
        self._is_tiered = False
        """Whether there was ever a block below the device tier."""
        self._open: set[int] = set()
        """Columns that may not be closed."""
        self._local = threading.local()

    # --- what events do --------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """What was not taken as it came."""
        return self._lives.counters

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

    def _change(self, cache: _Cache, tier: Tier, rows: Rows) -> None:
        keys, column = len(rows.keys), self._column(cache)
        self._is_tiered |= tier != Tier.DEVICE
        if keys > self._max_blocks - cache.blocks:
            self._open.add(column)  # before readers see what is there without what was refused
        to: Parts = column, int(tier), cache.tags, tuple(rows), self._max_blocks, cache.accounts
        refused = apply_rows(*self._views[tier].parts, *to)
        if refused == NO_ROOM:
            self._make_room(tier, keys)
            refused = apply_rows(*self._views[tier].parts, *to)
            assert refused != NO_ROOM, "room was made"
        if refused:
            self.counters.refused_blocks += refused
            cache.overflowed = True
        if self._views[tier].table.is_growing:
            self._grow(tier, GROW_STEPS * keys)

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
        count = match(*parts, alive, self._mixing, local, not self._open, tuple(scratch))
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
        return Depths(found, np.diff(reached[:, found], axis=0).T)

    def _scratch(self, blocks: int, columns: int) -> Scratch:
        """This thread's memory for one search."""
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None or len(scratch.spare) < blocks + 2 or len(scratch.out) < columns:
            scratch = self._local.scratch = new_scratch(max(2 * blocks, 1024), columns)
        return scratch

    # --- what people ask -------------------------------------------------------------------------

    def holdings(self) -> dict[Holder, Holding]:
        """How much each cache holds."""
        return {holder: Holding(cache.tier_blocks, cache.complete) for holder, cache in self._lives}

    def entries(self, holder: Holder, tier: Tier) -> dict[int, int]:
        """The keys in one tier of a cache, with their positions, by which they are sorted."""
        cache = self._lives.find(holder)
        if cache is None or cache.column == _NO_COLUMN:
            return {}
        keys, positions, _ = self._dump(tier, [cache.column])
        order = np.argsort(positions, kind="stable")
        return dict(zip(keys[order].tolist(), positions[order].tolist(), strict=True))

    def is_complete(self, holder: Holder) -> bool:
        """Whether all that a cache holds was announced in what was read of the log."""
        cache = self._lives.find(holder)
        return cache is not None and cache.complete

    def blocks(self, holder: Holder) -> int:
        """Keys that a cache holds, over all tiers."""
        cache = self._lives.find(holder)
        return cache.blocks if cache else 0

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
        arrays = [
            array
            for view in self._views
            for array in (view.table.slots, view.sets.rows, view.sets.buckets)
        ]
        arrays += [view.table.larger for view in self._views if view.table.is_growing]
        return sum(array.nbytes for array in arrays)

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
        growing = [tier for tier, view in enumerate(self._views) if view.table.is_growing]
        for tier in growing:
            self._grow(Tier(tier), steps)
        if not growing and (self._leaving or self._retired):
            self._sweep(steps)
        return bool(growing or self._leaving or self._retired)

    def tidy_up(self) -> None:
        """Go on to the end: 3-10 ns for each slot."""
        while self.tidy():
            pass

    def _make_room(self, tier: Tier, blocks: int, rows: int = 1) -> None:
        """Room for so many blocks more, and for each set joined or left by so many rows."""
        view = self._views[tier]
        if needs_room(view.table, blocks):
            self._finish_growth(tier)
            table = self._views[tier].table
            if needs_room(table, blocks):
                self._views[tier] = View(grown(table, blocks), view.sets)
        growing = self._views[tier].table
        if growing.is_growing and GROW_STEPS * blocks > growing.state[CAPACITY]:
            self._finish_growth(tier)  # the smaller table would overflow
        self._make_sets_room(tier, min(blocks, (view.sets.used + 1) * rows))

    def _grow(self, tier: Tier, steps: int) -> None:
        view = self._views[tier]
        if grow(view.table, steps):
            self._views[tier] = View(settled(view.table), view.sets)
            if self._leaving:
                self._swept_to[tier] = len(self._views[tier].table.slots) // 2

    def _finish_growth(self, tier: Tier) -> None:
        while self._views[tier].table.is_growing:
            self._grow(tier, LONGEST_STEP)

    def _sweep(self, steps: int) -> None:
        """Go on taking retired columns out of the tables, where they do not grow just now."""
        if not self._leaving:
            self._leaving, self._retired = self._retired, []
            self._swept_to = [len(view.table.slots) // 2 for view in self._views]
        for tier in Tier:
            if self._swept_to[tier] and not self._views[tier].table.is_growing:
                self._make_sets_room(tier, self._views[tier].sets.used)
                table, sets = self._views[tier].table, self._views[tier].sets
                leaving = self._bits(self._leaving, sets.words)
                self._swept_to[tier] = sweep(table, sets, leaving, self._swept_to[tier], steps)
        if not any(self._swept_to):
            for view in self._views:
                view.sets.state[GENERATION] += 1  # what readers have in hand are the old columns
            self._free_columns += self._leaving
            self._leaving = []

    def _make_sets_room(self, tier: Tier, more: int) -> None:
        view = self._views[tier]
        sets = with_room(view.sets, more, len(self.owners))
        if sets is not view.sets:
            self._views[tier] = View(view.table, sets)

    def _bits(self, columns: Iterable[int], words: int) -> NDArray[np.uint64]:
        bits = np.zeros(max(words, len(self._alive)), np.uint64)
        for column in columns:
            bits[column // WORD_BITS] |= _bit(column)
        return bits

    # --- snapshots -------------------------------------------------------------------------------

    def snapshot(self, partition: int) -> bytes:
        """All that came from a partition. About 0.1 s for a million blocks."""
        caches = [cache for _, cache in self._lives.of(partition)]
        columns = [cache.column for cache in caches]
        held = [column for column in columns if column != _NO_COLUMN]
        tiers = []
        for tier in Tier:
            keys, positions, numbers = self._dump(tier, held)
            sets = self._views[tier].sets
            numbers, present = snapshots.compact(numbers, len(sets.references))
            rows = sets.rows.reshape(-1, sets.words)[present]
            tiers.append(snapshots.Part(keys, positions, numbers, snapshots.gather(rows, columns)))
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
        self._make_room(tier, len(part.keys), len(part.rows))
        self._finish_growth(tier)
        table, sets = self._views[tier].table, self._views[tier].sets
        tags = np.zeros(sets.columns, np.uint64)
        accounts = np.zeros((sets.columns, ACCOUNT_WORDS), np.uint64)
        tags[columns] = [cache.tags[tier] for cache in caches]
        rows = snapshots.scatter(part.rows, columns, sets.words)
        if not rows.any(axis=1).all():
            return False
        is_sound = load(
            table, sets, part.keys, part.positions, part.numbers, rows,
            self._bits(columns, sets.words), tags, accounts,
        )  # fmt: skip
        for cache in caches:
            cache.accounts[tier] = accounts[cache.column]
        return bool(is_sound)

    def _dump(
        self, tier: Tier, columns: Iterable[int]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]:
        """Keys, positions and sets of what these columns hold; of a growing table, in both."""
        table, sets = self._views[tier].table, self._views[tier].sets
        chosen, most = self._bits(columns, sets.words), table.used
        keys, positions = np.empty(most, np.uint64), np.empty(most, np.uint32)
        numbers, size = np.empty(most, np.uint32), 0
        parts = [(table.larger, 0)]
        if table.is_growing:
            parts.append((table.slots, int(table.state[FRONTIER])))
        for slots, start in parts:
            out = keys[size:], positions[size:], numbers[size:]
            size += dump(slots, start, sets, chosen, *out)
        return keys[:size], positions[:size], numbers[:size]


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


def cache_tag(holder: Holder, tier: Tier) -> int:
    """What tells one tier of one cache from all others in digests: a u64."""
    return xxh3(holder.worker.encode(), holder.rank * len(Tier) + tier)


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
