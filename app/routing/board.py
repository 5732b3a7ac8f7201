"""The places of a pool in columns, as policies look at them, kept up to date change by change.

Between two decisions few places change, and only their rows are written again; so a decision among
many places takes hardly longer than one among few. What stands here is what the folds say and no
more: a board asks each of them what has changed since it looked last, and reads all of it where
that is too long ago.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from struct import Struct
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.routing import kernels
from app.routing.burdens import NOTHING as NO_BURDEN
from app.routing.burdens import Burdens
from app.routing.changes import Changes, Noted
from app.routing.index import Index
from app.routing.kernels import Floats, Ints
from app.routing.paces import PUBLISHED, Pace
from app.routing.policies import Place, tags_of
from indexer.index import Depths
from indexer.lives import Holder

_LOAD = Struct(f"{kernels.BUSY_MS}d")
"""A spot up to `BUSY_MS`. Packing takes a third of the time of assigning to a slice."""
_SPOT_BYTES = 8 * kernels.SPOT
NOWHERE = -1
"""The row of places of other pools."""
NOTHING: Mapping[str, float] = MappingProxyType({})


class Standing(Protocol):
    """What is known of a place for good: a row of a pool."""

    @property
    def place(self) -> Place:
        """Where it is."""

    @property
    def holder(self) -> Holder:
        """Its cache."""

    @property
    def pace(self) -> Pace:
        """How fast it is, by its card."""

    @property
    def ranks(self) -> int:
        """Of its worker."""

    @property
    def shows_blocks(self) -> bool:
        """Whether what its cache holds is known in blocks of the pool."""


class Beating(Protocol):
    """What a board reads of a worker's last heartbeat."""

    @property
    def output_tokens(self) -> int:
        """Of answers under way, of all ranks."""


class Sources(msgspec.Struct, frozen=True, gc=False):
    """What a board reads. `told` and `own`: burdens. `beats`: heartbeats by worker, `beaten`: their
    changes, and whether they count. `slowness`: of workers that were measured; one that changes is
    `Noted`. `later_ms`: by how much later than other routers this one counts on a worker; constant.
    """

    told: Burdens
    own: Burdens
    beats: Mapping[str, Beating]
    beaten: Changes[str]
    counts_output: bool = True
    slowness: Mapping[str, float] = NOTHING
    later_ms: Mapping[str, float] = NOTHING

    def are(self, others: Sources) -> bool:
        """Whether these are the same ones, whatever is in them."""
        return (
            self.told is others.told and self.own is others.own and self.beats is others.beats
            and self.beaten is others.beaten and self.counts_output is others.counts_output
            and self.slowness is others.slowness and self.later_ms is others.later_ms
        )  # fmt: skip


class Found(NamedTuple):
    """What the index found of prompts: for each, `columns` and their `depths` (see `Depths`) from
    one of `starts` to the next.
    """

    starts: Ints
    columns: Ints
    depths: Ints


def pace_columns(pace: Pace) -> tuple[float, ...]:
    """The part of a spot from SLOWNESS on."""
    return (pace.slowness, pace.chunk_tokens, pace.capacity_tokens, *pace.curves.numbers())


def curve_of(pace: Pace) -> tuple[float, ...]:
    """Its curve as decisions record it: nothing for the published one."""
    return () if pace.curves == PUBLISHED else pace.curves.numbers()


class Board:
    """One pool's. Its `places`, `tags`, `curves` and `spots` are those of `Options`."""

    def __init__(self, rows: Sequence[Standing]) -> None:
        self.places = [row.place for row in rows]
        self.tags = tags_of(self.places)
        self.curves = [curve_of(row.pace) for row in rows]
        self.spots = np.zeros((len(rows), kernels.SPOT))
        self._memory = self.spots.data
        for spot, row in zip(self.spots, rows, strict=True):
            spot[kernels.SLOWNESS :] = pace_columns(row.pace)
        self._ranks = [row.ranks for row in rows]
        self._outputs = [0] * len(rows)
        self._unmeasured = set(range(len(rows)))
        kinds = {curve: n for n, curve in enumerate(dict.fromkeys(self.curves))}
        self._kinds = np.array([kinds[curve] for curve in self.curves], np.int64)
        self._row_of = {place: n for n, place in enumerate(self.places)}
        self._rows_of: dict[str, list[int]] = {}
        for n, place in enumerate(self.places):
            self._rows_of.setdefault(place.worker, []).append(n)
        self._shown = {row.holder: n for n, row in enumerate(rows) if row.shows_blocks}
        self._read: Sources | None = None
        self._seen = (-1, -1, -1, -1)
        """How many changes of each source were seen."""
        self._owners: Sequence[Holder] = ()
        self.column_rows: Ints = np.empty(0, np.int64)
        """The row of each column of the index; -1 for those of no place here."""

    def rows_at(self, places: Iterable[Place | None]) -> Ints:
        """The numbers of their rows; -1 for places of other pools, and for none."""
        row_of = self._row_of
        return np.array([row_of.get(place, NOWHERE) for place in places], np.int64)  # type: ignore[arg-type]

    def found(self, caches: Index, prompts: Sequence[NDArray[np.uint64]]) -> Found:
        """What the index says of prompts, by their local hashes, one after the other."""
        each = self._depths(caches, prompts)
        return Found(
            np.array([0, *accumulate([len(one.columns) for one in each])], np.int64),
            np.concatenate([one.columns for one in each]),
            np.concatenate([one.depths for one in each]),
        )

    def blocks(self, caches: Index, local: NDArray[np.uint64]) -> Floats:
        """Leading blocks of a prompt at each place: on the device, the host and the disk."""
        (found,), blocks = self._depths(caches, (local,)), np.empty((len(self.places), 3))
        kernels.spread(found.columns, found.depths, self.column_rows, blocks)
        return blocks

    def _depths(self, caches: Index, prompts: Sequence[NDArray[np.uint64]]) -> list[Depths]:
        """The same for each of them, with `column_rows` as they are in all of it."""
        index = caches.blocks
        while True:
            owners = index.owners
            each = [caches.depths(local) for local in prompts]
            if owners is index.owners:  # else a column may have been given to another cache
                break
        if owners is not self._owners:
            self._owners = owners
            self.column_rows = np.array([self._shown.get(o, NOWHERE) for o in owners], np.int64)
        return each

    def refresh(self, sources: Sources, now_ms: int) -> None:
        """Take in what has changed since the last time, and how the time has passed."""
        counts = (
            sources.told.changes.count, sources.own.changes.count, sources.beaten.count,
            sources.slowness.changes.count if isinstance(sources.slowness, Noted) else -1,
        )  # fmt: skip
        if self._read is None or not self._read.are(sources):
            self._read_all(sources)
        elif counts != self._seen:
            self._read_changes(sources)
        self._read, self._seen = sources, counts
        kernels.elapse(self.spots, float(now_ms))

    def _read_all(self, sources: Sources) -> None:
        self._read_beats(sources, self._rows_of)
        self._read_slowness(sources, self._rows_of)
        self._read_burdens(sources, self.places)
        for worker, rows in self._rows_of.items():
            self.spots[rows, kernels.LATER_MS] = sources.later_ms.get(worker, 0.0)

    def _read_changes(self, sources: Sources) -> None:
        seen_told, seen_own, seen_beats, seen_slowness = self._seen
        told = sources.told.changes.since(seen_told)
        own = sources.own.changes.since(seen_own)
        beats = sources.beaten.since(seen_beats)
        if told is None or own is None or beats is None:
            self._read_beats(sources, self._rows_of)
            self._read_burdens(sources, self.places)
        else:
            places = {*told, *own}
            if beats:
                self._read_beats(sources, beats)
                rows = chain.from_iterable(self._rows_of.get(worker, ()) for worker in beats)
                places.update(self.places[n] for n in rows)
            self._read_burdens(sources, places)
        if isinstance(sources.slowness, Noted):
            changed = sources.slowness.changes.since(seen_slowness)
            if changed is None or changed:
                self._read_slowness(sources, self._rows_of if changed is None else changed)

    def _read_beats(self, sources: Sources, workers: Iterable[str]) -> None:
        for worker in workers:
            beat = sources.beats.get(worker) if sources.counts_output else None
            for n in self._rows_of.get(worker, ()):
                self._outputs[n] = beat.output_tokens // self._ranks[n] if beat else 0

    def _read_slowness(self, sources: Sources, workers: Iterable[str]) -> None:
        for worker in workers:
            slowness = sources.slowness.get(worker)
            for n in self._rows_of.get(worker, ()):
                if slowness is None:
                    self._unmeasured.add(n)
                else:
                    self._unmeasured.discard(n)
                    self.spots[n, kernels.SLOWNESS] = slowness
        if self._unmeasured:
            self._suppose_slowness()

    def _suppose_slowness(self) -> None:
        """Take who was not measured to be like the fastest with the same curve; see `paces.py`."""
        is_known = np.ones(len(self.places), bool)
        is_known[[*self._unmeasured]] = False
        for kind in np.unique(self._kinds[~is_known]):
            alike = self._kinds == kind
            known = self.spots[alike & is_known, kernels.SLOWNESS]
            self.spots[alike & ~is_known, kernels.SLOWNESS] = known.min() if len(known) else 1.0

    def _read_burdens(self, sources: Sources, places: Iterable[Place]) -> None:
        told, own = sources.told.by_place.get, sources.own.by_place.get
        prefilled_ms = sources.told.prefilled_ms.get
        row_of, outputs, spots, pack = self._row_of, self._outputs, self._memory, _LOAD.pack_into
        for place in places:
            if (n := row_of.get(place)) is None:  # of another pool
                continue
            burden = told(place, NO_BURDEN)
            if (ours := own(place)) is not None:  # few places have any
                burden = burden.plus(ours)
            waiting, tokens = burden.prefill_runs, burden.tokens
            pack(
                spots, n * _SPOT_BYTES,
                burden.runs, tokens, tokens + outputs[n], burden.prefill_tokens, waiting,
                burden.prefill_since_ms / waiting if waiting else 0.0, prefilled_ms(place, 0),
            )  # fmt: skip
