"""The candidate table: the places of a pool in columns, updated incrementally.

Between two decisions few places change, and only their rows are written again; so a decision among
many places takes hardly longer than one among few. The table holds the state of the views and
nothing else: it reads from each view the changes since the last time, or all of it where that
is too long ago.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from struct import Struct
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.candidates import Candidates, Reservations
from kvlane.app.routing.selection.choice import rank_hashes
from kvlane.app.routing.selection.cost_kernels import Floats, Ints
from kvlane.app.routing.state.active_load import NO_LOAD, ActiveLoad
from kvlane.app.routing.state.batch_runs import BatchRuns, batch_delay_ms
from kvlane.app.routing.state.change_log import ChangeLog, TrackedDict
from kvlane.app.routing.state.fleet import LastHeartbeat, WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.performance import (
    PUBLISHED_CURVES,
    USUAL_LOAD_MS,
    EngineProfile,
    FadingSums,
    PrefillShares,
)
from kvlane.app.routing.state.routed_prefixes import RoutedPrefixes
from kvlane.indexer.epochs import CacheId
from kvlane.indexer.events import Tier
from kvlane.indexer.index import MatchDepths
from kvlane.streams.records import WorkerCard

_LOAD = Struct(f"{cost_kernels.BUSY_MS}d")
"""The columns before `BUSY_MS`. Packing takes a third of the time of assigning to a slice."""
_SPOT_BYTES = 8 * cost_kernels.FEATURES
NO_ROW = -1
"""The row of places of other pools."""
MIN_ESTIMATE = 4.0
"""Least length of an estimate that counts, as a multiple of the longest prefix in the index. With
less, parallel calls of an agent would all go to the worker of the first one."""
NO_BLOCKS = (0,) * len(Tier)
NO_SLOWDOWNS: Mapping[str, float] = MappingProxyType({})
NO_CURVES: Mapping[str, PerfCurves] = MappingProxyType({})


class CandidateRow(NamedTuple):
    """A place in a pool. `worker_number` and `rank_count`: the worker's. `has_known_cache`: the
    index has its cache, by blocks of the pool's size. `profile` and `card`: its own report."""

    worker_rank: WorkerRank
    cache_id: CacheId
    worker_number: str
    taints: frozenset[str]
    has_known_cache: bool
    rank_count: int
    profile: EngineProfile
    card: WorkerCard


class TableInputs(msgspec.Struct, frozen=True, gc=False):
    """The inputs of a table. `committed` and `unconfirmed`: load by the ledger, and of decisions
    not read back. `heartbeats`: heartbeats by worker, `changed_heartbeats`: their changes,
    `count_output_tokens`: whether they count. `slowdown`: of measured workers, `TrackedDict` if it
    can change. `stagger_ms`: by worker, the delay of this router behind others; an immutable
    mapping. `curves`: learned ones by worker, which change together with `slowdown`. `routed`:
    prompts that count as cached already. `usual_load`: by place; it changes together with
    `committed`.
    """

    committed: ActiveLoad
    unconfirmed: ActiveLoad
    heartbeats: Mapping[str, LastHeartbeat]
    changed_heartbeats: ChangeLog[str]
    count_output_tokens: bool = True
    slowdown: Mapping[str, float] = NO_SLOWDOWNS
    stagger_ms: Mapping[str, float] = NO_SLOWDOWNS
    curves: Mapping[str, PerfCurves] = NO_CURVES
    routed: RoutedPrefixes | None = None
    usual_load: FadingSums[WorkerRank] | None = None

    def is_same(self, others: TableInputs) -> bool:
        """Whether these are the same objects; their content is not compared."""
        return (
            self.committed is others.committed and self.unconfirmed is others.unconfirmed
            and self.heartbeats is others.heartbeats
            and self.changed_heartbeats is others.changed_heartbeats
            and self.count_output_tokens is others.count_output_tokens
            and self.slowdown is others.slowdown and self.stagger_ms is others.stagger_ms
            and self.curves is others.curves and self.routed is others.routed
            and self.usual_load is others.usual_load
        )  # fmt: skip


class BatchOverlap(NamedTuple):
    """Cached prefixes of several prompts: prompt i has the `columns` and `depths` (see
    `MatchDepths`) from `starts[i]` to `starts[i + 1]`.
    """

    starts: Ints
    columns: Ints
    depths: Ints


def profile_columns(profile: EngineProfile) -> tuple[float, ...]:
    """The columns of a row from `SLOWDOWN` on."""
    return (
        profile.slowdown,
        profile.chunk_tokens,
        profile.capacity_tokens,
        *profile.curves.coefficients(),
    )


def recorded_curve(profile: EngineProfile) -> tuple[float, ...]:
    """The curve as decisions record it: empty for the published one."""
    return () if profile.curves == PUBLISHED_CURVES else profile.curves.coefficients()


class CandidateTable:
    """The candidates of one pool; the public columns are those of `Candidates`."""

    def __init__(self, rows: Sequence[CandidateRow]) -> None:
        self.worker_ranks = [row.worker_rank for row in rows]
        self.hashes = rank_hashes(self.worker_ranks)
        self.curves = [recorded_curve(row.profile) for row in rows]
        self.features = np.zeros((len(rows), cost_kernels.FEATURES))
        self._memory = self.features.data
        for spot, row in zip(self.features, rows, strict=True):
            spot[cost_kernels.SHARING] = 1.0
            spot[cost_kernels.SLOWDOWN :] = profile_columns(row.profile)
        self._card_profiles = [row.profile for row in rows]
        self._profiles = [*self._card_profiles]
        self._ranks = [row.rank_count for row in rows]
        self._outputs = [0] * len(rows)
        self._unmeasured = set(range(len(rows)))
        kinds = {curve: n for n, curve in enumerate(dict.fromkeys(self.curves))}
        self._kinds = np.array([kinds[curve] for curve in self.curves], np.int64)
        self._row_of = {rank: n for n, rank in enumerate(self.worker_ranks)}
        self._rows_of: dict[str, list[int]] = {}
        for n, rank in enumerate(self.worker_ranks):
            self._rows_of.setdefault(rank.worker, []).append(n)
        self._shown = {row.cache_id: n for n, row in enumerate(rows) if row.has_known_cache}
        self._read: TableInputs | None = None
        self._seen = (-1, -1, -1, -1)
        """Number of changes taken in from each input."""
        self._batch_runs: BatchRuns | None = None
        self._batch_changes = 0
        self._owners: Sequence[CacheId] = ()
        self._reserved: Sequence[WorkerRank] = ()
        self._reserved_rows: Ints = np.empty(0, np.int64)
        self.row_of_column: Ints = np.arange(len(rows))
        """The row of each column of the index, -1 for caches that are not in this pool; behind
        these, a column for each row, for estimates."""
        self.estimated_blocks: dict[WorkerRank, int] = {}
        """Of the last prompt, the blocks at a place beyond those by the index."""
        self._now_ms = 0

    def rows_of(self, ranks: Iterable[WorkerRank | None]) -> Ints:
        """The row numbers of these places; -1 for None and for places of other pools."""
        row_of = self._row_of
        return np.array([row_of.get(rank, NO_ROW) for rank in ranks], np.int64)  # type: ignore[arg-type]

    def rows_of_reserved(self, ranks: Sequence[WorkerRank]) -> Ints:
        """The row numbers of the places of reservations, then -1 for none; remembered, since such a
        list is replaced or continued, never changed."""
        if ranks is not self._reserved or len(self._reserved_rows) != len(ranks) + 1:
            self._reserved, self._reserved_rows = ranks, self.rows_of((*ranks, None))
        return self._reserved_rows

    def overlaps_of(
        self, caches: KvIndexView, prompts: Sequence[NDArray[np.uint64]]
    ) -> BatchOverlap:
        each = self._depths(caches, prompts)
        return BatchOverlap(
            np.array([0, *accumulate([len(one.columns) for one in each])], np.int64),
            np.concatenate([one.columns for one in each]),
            np.concatenate([one.depths for one in each]),
        )

    def overlap_blocks(self, caches: KvIndexView, local: NDArray[np.uint64]) -> Floats:
        """Cached leading blocks of a prompt at each place: on the device, the host and the disk."""
        (found,), blocks = self._depths(caches, (local,)), np.empty((len(self.worker_ranks), 3))
        cost_kernels.scatter_overlap(found.columns, found.depths, self.row_of_column, blocks)
        return blocks

    def select(
        self, ranks: Sequence[WorkerRank] | None, blocks: Floats, taint_weights: Floats | None,
        others: Reservations,
    ) -> Candidates:  # fmt: skip
        """The candidates at these places, in this order; None: at all places of the pool. The other
        arguments are about all rows, as in `Candidates`."""
        every = Candidates(
            self.worker_ranks,
            self.hashes,
            self.curves,
            self.features,
            blocks,
            taint_weights,
            others,
        )
        return every if ranks is None else every.subset(self.rows_of(ranks))

    def _depths(
        self, caches: KvIndexView, prompts: Sequence[NDArray[np.uint64]]
    ) -> list[MatchDepths]:
        """The cached prefix of each prompt, all by one state of `row_of_column`."""
        index = caches.blocks
        while True:
            owners = index.column_owners
            each = [caches.depths(local) for local in prompts]
            if owners is index.column_owners:  # else a column may have been given to another cache
                break
        if owners is not self._owners:
            self._owners = owners
            shown = [self._shown.get(owner, NO_ROW) for owner in owners]
            self.row_of_column = np.append(np.array(shown, np.int64), np.arange(len(self._ranks)))
        routed = None if self._read is None else self._read.routed
        if routed is None or not len(routed):
            self.estimated_blocks = {}
            return each
        return [
            self._with_estimates(depths, routed.find(local, self._now_ms))
            for depths, local in zip(each, prompts, strict=True)
        ]

    def _with_estimates(
        self, known: MatchDepths, routed: Collection[tuple[WorkerRank, int]]
    ) -> MatchDepths:
        """The cached prefix of a prompt, at least as long as estimated, which is on the device."""
        self.estimated_blocks = {}
        if not routed:
            return known
        columns, depths = [], []
        rows = self.row_of_column[known.columns].tolist()
        of_row = dict(zip(rows, known.depths.tolist(), strict=True))
        least = MIN_ESTIMATE * known.depths.sum(axis=1).max(initial=0)
        for place, blocks in routed:
            if blocks <= least or (row := self._row_of.get(place)) is None:
                continue
            ends = [*accumulate(of_row.get(row, NO_BLOCKS))]
            if blocks > ends[0]:
                longer = [max(end, blocks) for end in ends]
                columns.append(len(self._owners) + row)
                depths.append([blocks, *(b - a for a, b in pairwise(longer))])
                if blocks > ends[-1]:
                    self.estimated_blocks[place] = blocks - ends[-1]
        if not columns:
            return known
        return MatchDepths(np.append(known.columns, columns), np.vstack((known.depths, depths)))

    def refresh(self, sources: TableInputs, now_ms: int) -> None:
        """Apply the changes since the last call, and the passing of time."""
        self._now_ms = now_ms
        counts = (
            sources.committed.changes.count, sources.unconfirmed.changes.count,
            sources.changed_heartbeats.count,
            sources.slowdown.changes.count if isinstance(sources.slowdown, TrackedDict) else -1,
        )  # fmt: skip
        if self._read is None or not self._read.is_same(sources):
            self._read_all(sources)
        elif counts != self._seen:
            self._read_changes(sources)
        self._read, self._seen = sources, counts
        cost_kernels.update_times(self.features, float(now_ms), USUAL_LOAD_MS)

    def update_prefill_shares(self, shares: PrefillShares, now_ms: int) -> None:
        """Set the part of its time that each worker spends on prefill."""
        column = self.features[:, cost_kernels.PREFILL_SHARE]
        for worker, rows in self._rows_of.items():
            column[rows] = shares.share(worker, now_ms)

    def update_batch_steps(self, runs: BatchRuns, mean_output_tokens: float) -> None:
        ranks: Iterable[WorkerRank] | None = None
        if runs is self._batch_runs:
            ranks = runs.changes.since(self._batch_changes)
        self._batch_runs, self._batch_changes = runs, runs.changes.count
        for rank in dict.fromkeys(self.worker_ranks if ranks is None else ranks):
            if (n := self._row_of.get(rank)) is not None:
                spot = self.features[n]
                profile = self._profiles[n]._replace(slowdown=spot.item(cost_kernels.SLOWDOWN))
                spot[cost_kernels.BATCH_MS] = batch_delay_ms(
                    profile, runs.load(rank), mean_output_tokens
                )

    def _read_all(self, sources: TableInputs) -> None:
        self._read_beats(sources, self._rows_of)
        self._read_slowdown(sources, self._rows_of)
        self._read_loads(sources, self.worker_ranks)
        for worker, rows in self._rows_of.items():
            self.features[rows, cost_kernels.STAGGER_MS] = sources.stagger_ms.get(worker, 0.0)

    def _read_changes(self, sources: TableInputs) -> None:
        seen_committed, seen_own, seen_beats, seen_slowdown = self._seen
        committed = sources.committed.changes.since(seen_committed)
        own = sources.unconfirmed.changes.since(seen_own)
        beats = sources.changed_heartbeats.since(seen_beats)
        if committed is None or own is None or beats is None:
            self._read_beats(sources, self._rows_of)
            self._read_loads(sources, self.worker_ranks)
        else:
            ranks = {*committed, *own}
            if beats:
                self._read_beats(sources, beats)
                rows = chain.from_iterable(self._rows_of.get(worker, ()) for worker in beats)
                ranks.update(self.worker_ranks[n] for n in rows)
            self._read_loads(sources, ranks)
        if isinstance(sources.slowdown, TrackedDict):
            changed = sources.slowdown.changes.since(seen_slowdown)
            if changed is None or changed:
                self._read_slowdown(sources, self._rows_of if changed is None else changed)

    def _read_beats(self, sources: TableInputs, workers: Iterable[str]) -> None:
        for worker in workers:
            beat = sources.heartbeats.get(worker) if sources.count_output_tokens else None
            for n in self._rows_of.get(worker, ()):
                self._outputs[n] = beat.output_tokens // self._ranks[n] if beat else 0

    def _read_slowdown(self, sources: TableInputs, workers: Iterable[str]) -> None:
        for worker in workers:
            slowdown, curves = sources.slowdown.get(worker), sources.curves.get(worker)
            for n in self._rows_of.get(worker, ()):
                self._set_curves(n, curves)
                if slowdown is None:
                    self._unmeasured.add(n)
                else:
                    self._unmeasured.discard(n)
                    self.features[n, cost_kernels.SLOWDOWN] = slowdown
        if self._unmeasured:
            self._assume_slowdown()

    def _set_curves(self, n: int, curves: PerfCurves | None) -> None:
        """Let a row have these curves, or those of its card."""
        if curves is None:
            curves = self._card_profiles[n].curves
        if curves is not self._profiles[n].curves:
            self._profiles[n] = profile = self._profiles[n]._replace(curves=curves)
            self.curves[n] = recorded_curve(profile)
            self.features[n, cost_kernels.CURVE :] = curves.coefficients()

    def _assume_slowdown(self) -> None:
        """Take an unmeasured worker to be like the fastest with the same curve
        (`performance.py`)."""
        is_known = np.ones(len(self.worker_ranks), bool)
        is_known[[*self._unmeasured]] = False
        for kind in np.unique(self._kinds[~is_known]):
            alike = self._kinds == kind
            known = self.features[alike & is_known, cost_kernels.SLOWDOWN]
            self.features[alike & ~is_known, cost_kernels.SLOWDOWN] = (
                known.min() if len(known) else 1.0
            )

    def _read_loads(self, sources: TableInputs, ranks: Iterable[WorkerRank]) -> None:
        committed, own = sources.committed.by_rank.get, sources.unconfirmed.by_rank.get
        prefilled_ms = sources.committed.last_first_token_ms.get
        begun_of = sources.committed.begun.get
        usual_load = sources.usual_load
        row_of, outputs, spots, pack = self._row_of, self._outputs, self._memory, _LOAD.pack_into
        for rank in ranks:
            if (n := row_of.get(rank)) is None:  # of another pool
                continue
            load = committed(rank, NO_LOAD)
            if (ours := own(rank)) is not None:  # few places have any
                load = load.add(ours)
            waiting, tokens, begun = load.prefill_runs, load.tokens, begun_of(rank, NO_LOAD)
            joining, joining_tokens, joined_ms = waiting - begun.prefill_runs, 0, 0.0
            if joining > 0:
                joining_tokens = max(load.prefill_tokens - begun.prefill_tokens, 0)
                joined_ms = (load.prefill_since_ms - begun.prefill_since_ms) / joining
            usual, usual_at_ms = (0.0, 0) if usual_load is None else usual_load.last(rank)
            pack(
                spots, n * _SPOT_BYTES,
                load.runs, tokens, tokens + outputs[n], load.prefill_tokens, waiting,
                load.prefill_since_ms / waiting if waiting else 0.0, prefilled_ms(rank, 0),
                joining_tokens, max(joining, 0), joined_ms, usual, usual_at_ms,
            )  # fmt: skip
