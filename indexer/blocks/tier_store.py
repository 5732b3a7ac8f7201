"""Block storage of one tier: a table, its sets, their growth in steps, the sweep of retired
columns.

One writer. Readers take a `TierView`, which is replaced as a whole: a reader with an older view can
finish with it, and detects that it is outdated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.blocks import snapshot_format
from kvlane.indexer.blocks.block_table import (
    CAPACITY,
    FRONTIER,
    BlockTable,
    copy_slots,
    empty_table,
    finish_growth,
    is_too_full,
    start_growth,
)
from kvlane.indexer.blocks.holder_sets import (
    GENERATION,
    HolderSets,
    bit_row,
    empty_sets,
    with_capacity,
)
from kvlane.indexer.blocks.kernel_entry import NO_ROOM, KernelArrays, KernelTuple, apply_rows
from kvlane.indexer.blocks.updates import (
    ACCOUNT_WORDS,
    GROW_SLOTS_PER_KEY,
    dump_blocks,
    load_blocks,
    sweep_slots,
)
from kvlane.indexer.events import EventRows

MAX_STEP_SLOTS = 1 << 20
"""Slots copied or swept at once where no request waits for it."""

_UNREAD = 3
"""Reference count of a view without readers: the list, the loop and `sys.getrefcount` itself."""


class TierView:
    """Arrays of a tier for readers; `kernel_arguments` are their addresses, for kernels."""

    def __init__(self, table: BlockTable, sets: HolderSets) -> None:
        self.table = table
        self.sets = sets
        self._arrays = KernelArrays(table), KernelArrays(sets)
        self.kernel_arguments = self._arrays[0].places, self._arrays[1].places


class TierStore:
    """Block storage of one `tier`. `views`: the list in which readers find the arrays by tier.
    Methods that may see a new column take the current number of `column_capacity`."""

    def __init__(self, views: list[TierView], tier: int) -> None:
        self._views = views
        self._tier = tier
        self._outgoing: list[TierView] = []
        """Old views that readers may still use; so none of these frees a large one, which takes
        milliseconds."""
        self._swept_to = 0

    @property
    def view(self) -> TierView:
        return self._views[self._tier]

    @property
    def is_growing(self) -> bool:
        return self.view.table.is_growing

    def _replace(self, table: BlockTable, sets: HolderSets) -> None:
        self._outgoing.append(self.view)
        self._views[self._tier] = TierView(table, sets)

    def release_old_views(self) -> None:
        """Free old arrays that have no readers left."""
        if self._outgoing:
            self._outgoing = [view for view in self._outgoing if sys.getrefcount(view) > _UNREAD]

    # --- blocks ----------------------------------------------------------------------------------

    def apply_rows(
        self,
        column: int,
        tags: NDArray[np.uint64],
        rows: EventRows,
        max_blocks: int,
        accounts: NDArray[np.uint64],
        columns: int,
    ) -> int:
        """Apply rows of this tier, all of them stored or removed; returns the rejected blocks.
        `tags`: u64 (tiers), `accounts`: u64 (tiers, words), `max_blocks`: of the column's cache."""
        arguments: KernelTuple = column, self._tier, tags, tuple(rows), max_blocks, accounts
        refused = apply_rows(*self.view.kernel_arguments, *arguments)
        if refused == NO_ROOM:
            self._make_room(len(rows.keys), columns)
            refused = apply_rows(*self.view.kernel_arguments, *arguments)
            assert refused != NO_ROOM, "_make_room has made room"
        if self.is_growing:
            self.grow_table(GROW_SLOTS_PER_KEY * len(rows.keys))
        return refused

    def dump_blocks(
        self, columns: Iterable[int]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]:
        """Keys, positions and sets of the blocks of these columns."""
        table, sets = self.view.table, self.view.sets
        chosen, most = bit_row(columns, sets.words), table.used
        keys, positions = np.empty(most, np.uint64), np.empty(most, np.uint32)
        numbers, size = np.empty(most, np.uint32), 0
        parts = [(table.larger, 0)]
        if table.is_growing:
            parts.append((table.slots, int(table.state[FRONTIER])))
        for slots, start in parts:
            out = keys[size:], positions[size:], numbers[size:]
            size += dump_blocks(slots, start, sets, chosen, *out)
        return keys[:size], positions[:size], numbers[:size]

    def snapshot_part(
        self, columns: Sequence[int], held: Sequence[int]
    ) -> snapshot_format.TierPart:
        """This tier of a snapshot of these columns; `held`: those of them that are in use."""
        keys, positions, numbers = self.dump_blocks(held)
        sets = self.view.sets
        numbers, present = snapshot_format.renumber_sets(numbers, len(sets.references))
        rows = sets.rows.reshape(-1, sets.words)[present]
        return snapshot_format.TierPart(
            keys, positions, numbers, snapshot_format.gather_columns(rows, columns)
        )

    def load_blocks(
        self,
        part: snapshot_format.TierPart,
        columns: int,
        owned: Sequence[int],
        tags: Sequence[int],
    ) -> tuple[NDArray[np.uint64], bool]:
        """Add the blocks of a snapshot; returns the accounts of the added blocks by column, u64
        (columns, words), and False, with a part of them added, for inconsistent data. `owned`: the
        columns of its caches, which are empty here; `tags`: their tags."""
        self._make_room(len(part.keys), columns, len(part.rows))
        self._finish_growth()
        table, sets = self.view.table, self.view.sets
        by_column = np.zeros(sets.column_capacity, np.uint64)
        by_column[owned] = tags
        accounts = np.zeros((sets.column_capacity, ACCOUNT_WORDS), np.uint64)
        rows = snapshot_format.scatter_columns(part.rows, owned, sets.words)
        is_sound = rows.any(axis=1).all() and load_blocks(
            table, sets, part.keys, part.positions, part.numbers, rows,
            bit_row(owned, sets.words), by_column, accounts,
        )  # fmt: skip
        return accounts, bool(is_sound)

    # --- capacity --------------------------------------------------------------------------------

    def grow_table(self, steps: int) -> None:
        """Copy up to `steps` more slots into the larger table."""
        table = self.view.table
        if copy_slots(table, steps):
            self._replace(finish_growth(table), self.view.sets)
            if self._swept_to:
                self._swept_to = len(self.view.table.slots) // 2

    def _make_room(self, blocks: int, columns: int, rows: int = 1) -> None:
        """Make room for more blocks, and for the sets that these rows may create."""
        if is_too_full(self.view.table, blocks):
            self._finish_growth()
            if is_too_full(self.view.table, blocks):
                self._replace(start_growth(self.view.table, blocks), self.view.sets)
        table = self.view.table
        if table.is_growing and GROW_SLOTS_PER_KEY * blocks > table.state[CAPACITY]:
            self._finish_growth()  # the smaller table would overflow
        self._make_sets_room(min(blocks, (self.view.sets.used_sets + 1) * rows), columns)

    def _make_sets_room(self, more: int, columns: int) -> None:
        sets = with_capacity(self.view.sets, more, columns)
        if sets is not self.view.sets:
            self._replace(self.view.table, sets)

    def _finish_growth(self) -> None:
        while self.is_growing:
            self.grow_table(MAX_STEP_SLOTS)

    # --- sweeping --------------------------------------------------------------------------------

    @property
    def is_swept(self) -> bool:
        return not self._swept_to

    def begin_sweep(self) -> None:
        self._swept_to = len(self.view.table.slots) // 2

    def sweep_columns(self, leaving: Iterable[int], steps: int, columns: int) -> None:
        """Remove columns from up to `steps` more slots; does nothing while the table grows."""
        if self._swept_to and not self.is_growing:
            self._make_sets_room(self.view.sets.used_sets, columns)
            table, sets = self.view.table, self.view.sets
            self._swept_to = sweep_slots(
                table, sets, bit_row(leaving, sets.words), self._swept_to, steps
            )

    def bump_generation(self) -> None:
        """Invalidate the reads in progress, since columns are given to other caches from now on."""
        self.view.sets.state[GENERATION] += 1


def new_stores(tiers: int) -> tuple[list[TierView], list[TierStore]]:
    """Empty stores, and the list in which readers find the views."""
    views = [TierView(empty_table(), empty_sets()) for _ in range(tiers)]
    return views, [TierStore(views, tier) for tier in range(tiers)]
