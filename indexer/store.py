"""The blocks of one tier: a table and its sets, and the room they have.

Owns how both grow, and how the columns of caches that are gone are swept out, always some slots at
a time. What readers take is a `View`, which is replaced as a whole when an array is: whoever has an
older one can go on with it, and finds out that it is older.

Which column is whose, and which are gone, is `index.py`'s. One writer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from indexer import snapshots
from indexer.changes import ACCOUNT_WORDS, GROW_STEPS, dump, load, sweep
from indexer.entries import NO_ROOM, Parts, apply_rows
from indexer.events import Rows
from indexer.sets import GENERATION, Sets, bits_of, new_sets, with_room
from indexer.table import CAPACITY, FRONTIER, Table, grow, grown, needs_room, new_table, settled

LONGEST_STEP = 1 << 20
"""Slots that are copied or swept at once where nobody waits for it: 3-10 ns for each."""

_UNREAD = 3
"""References to a view that no reader has: the list's, a loop's, and that of who counts them."""


class View:
    """A tier's arrays, as a reader takes them; also as plain tuples, for kernels."""

    def __init__(self, table: Table, sets: Sets) -> None:
        self.table = table
        self.sets = sets
        self.parts: tuple[Parts, Parts] = tuple(table), tuple(sets)


class Store:
    """See the module. `views`: where readers find the arrays of each tier, `tier`: which is ours.

    The caller says how many `columns` there are, wherever one of them may be new.
    """

    def __init__(self, views: list[View], tier: int) -> None:
        self._views = views
        self._tier = tier
        self._outgoing: list[View] = []
        """Views that readers may still have. To free a large one takes milliseconds, and is done by
        whoever lets go last: this keeps it from being a reader."""
        self._swept_to = 0

    @property
    def view(self) -> View:
        """The arrays as they are now."""
        return self._views[self._tier]

    @property
    def is_growing(self) -> bool:
        """Whether `grow` has something to do."""
        return self.view.table.is_growing

    @property
    def nbytes(self) -> int:
        """Memory of the arrays; what is touched of it may be less."""
        table, sets = self.view.table, self.view.sets
        arrays = [table.slots, sets.rows, sets.buckets]
        if table.is_growing:
            arrays.append(table.larger)
        return sum(array.nbytes for array in arrays)

    def _replace(self, table: Table, sets: Sets) -> None:
        self._outgoing.append(self.view)
        self._views[self._tier] = View(table, sets)

    def let_go(self) -> None:
        """Free the arrays that nobody reads any more."""
        if self._outgoing:
            self._outgoing = [view for view in self._outgoing if sys.getrefcount(view) > _UNREAD]

    # --- blocks ----------------------------------------------------------------------------------

    def apply(
        self,
        column: int,
        tags: NDArray[np.uint64],
        rows: Rows,
        max_blocks: int,
        accounts: NDArray[np.uint64],
        columns: int,
    ) -> int:
        """Take rows of this tier, all of them stored or removed; how many blocks were refused.

        `tags`: u64 (tiers), `accounts`: u64 (tiers, words): of the cache whose column it is, and
        which may hold `max_blocks` in all tiers.
        """
        to: Parts = column, self._tier, tags, tuple(rows), max_blocks, accounts
        refused = apply_rows(*self.view.parts, *to)
        if refused == NO_ROOM:
            self._make_room(len(rows.keys), columns)
            refused = apply_rows(*self.view.parts, *to)
            assert refused != NO_ROOM, "room was made"
        if self.is_growing:
            self.grow(GROW_STEPS * len(rows.keys))
        return refused

    def dump(
        self, columns: Iterable[int]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]:
        """Keys, positions and sets of what these columns hold; of a growing table, in both."""
        table, sets = self.view.table, self.view.sets
        chosen, most = bits_of(columns, sets.words), table.used
        keys, positions = np.empty(most, np.uint64), np.empty(most, np.uint32)
        numbers, size = np.empty(most, np.uint32), 0
        parts = [(table.larger, 0)]
        if table.is_growing:
            parts.append((table.slots, int(table.state[FRONTIER])))
        for slots, start in parts:
            out = keys[size:], positions[size:], numbers[size:]
            size += dump(slots, start, sets, chosen, *out)
        return keys[:size], positions[:size], numbers[:size]

    def part(self, columns: Sequence[int], held: Sequence[int]) -> snapshots.Part:
        """This tier of a snapshot: of these columns, of which so many hold something."""
        keys, positions, numbers = self.dump(held)
        sets = self.view.sets
        numbers, present = snapshots.compact(numbers, len(sets.references))
        rows = sets.rows.reshape(-1, sets.words)[present]
        return snapshots.Part(keys, positions, numbers, snapshots.gather(rows, columns))

    def load(
        self, part: snapshots.Part, columns: int, owned: Sequence[int], tags: Sequence[int]
    ) -> tuple[NDArray[np.uint64], bool]:
        """Add the blocks of a snapshot; False, in the middle, for what no dump has.

        `owned`: the columns of its caches, which hold nothing here yet, `tags` theirs. With it the
        accounts of what was added, by column, u64 (columns, words).
        """
        self._make_room(len(part.keys), columns, len(part.rows))
        self._finish_growth()
        table, sets = self.view.table, self.view.sets
        by_column = np.zeros(sets.columns, np.uint64)
        by_column[owned] = tags
        accounts = np.zeros((sets.columns, ACCOUNT_WORDS), np.uint64)
        rows = snapshots.scatter(part.rows, owned, sets.words)
        is_sound = rows.any(axis=1).all() and load(
            table, sets, part.keys, part.positions, part.numbers, rows,
            bits_of(owned, sets.words), by_column, accounts,
        )  # fmt: skip
        return accounts, bool(is_sound)

    # --- room ------------------------------------------------------------------------------------

    def grow(self, steps: int) -> None:
        """Copy so many more slots into the larger table."""
        table = self.view.table
        if grow(table, steps):
            self._replace(settled(table), self.view.sets)
            if self._swept_to:
                self._swept_to = len(self.view.table.slots) // 2

    def _make_room(self, blocks: int, columns: int, rows: int = 1) -> None:
        """Room for so many blocks more, and for each set joined or left by so many rows."""
        if needs_room(self.view.table, blocks):
            self._finish_growth()
            if needs_room(self.view.table, blocks):
                self._replace(grown(self.view.table, blocks), self.view.sets)
        table = self.view.table
        if table.is_growing and GROW_STEPS * blocks > table.state[CAPACITY]:
            self._finish_growth()  # the smaller table would overflow
        self._make_sets_room(min(blocks, (self.view.sets.used + 1) * rows), columns)

    def _make_sets_room(self, more: int, columns: int) -> None:
        sets = with_room(self.view.sets, more, columns)
        if sets is not self.view.sets:
            self._replace(self.view.table, sets)

    def _finish_growth(self) -> None:
        while self.is_growing:
            self.grow(LONGEST_STEP)

    # --- sweeping --------------------------------------------------------------------------------

    @property
    def is_swept(self) -> bool:
        """Whether the last sweep has come to its end."""
        return not self._swept_to

    def begin_sweep(self) -> None:
        """From now on `sweep` has all slots before it."""
        self._swept_to = len(self.view.table.slots) // 2

    def sweep(self, leaving: Iterable[int], steps: int, columns: int) -> None:
        """Take columns out of so many more slots; not while the table grows."""
        if self._swept_to and not self.is_growing:
            self._make_sets_room(self.view.sets.used, columns)
            table, sets = self.view.table, self.view.sets
            self._swept_to = sweep(table, sets, bits_of(leaving, sets.words), self._swept_to, steps)

    def renew(self) -> None:
        """Columns mean other caches from now on: readers notice that what they have is old."""
        self.view.sets.state[GENERATION] += 1


def new_stores(tiers: int) -> tuple[list[View], list[Store]]:
    """Empty stores, and the list in which readers find their views."""
    views = [View(new_table(), new_sets()) for _ in range(tiers)]
    return views, [Store(views, tier) for tier in range(tiers)]
