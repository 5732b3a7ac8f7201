"""Options as decisions record them: candidates, and back.

The record of the best candidates has every input of a policy, so a decision can be recomputed
from them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from struct import Struct
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from app.routing.selection import cost_kernels
from app.routing.selection.candidate_table import profile_columns, recorded_curve
from app.routing.selection.cost_kernels import (
    BATCH_MS,
    BUSY_MS,
    FEATURES,
    OPEN_TOKENS,
    PLANNED,
    PLANNED_MS,
    PREFILL_RUNS,
    PREFILL_SHARE,
    PREFILL_TOKENS,
    RUNS,
    SLOWDOWN,
    STAGGER_MS,
    TOKENS,
    Floats,
    Ints,
)
from app.routing.selection.policies import (
    NO_RESERVATIONS,
    Candidates,
    Costs,
    Reservations,
    rank_hashes,
)
from app.routing.state.performance import recorded_profile
from app.routing.worker_rank import WorkerRank
from streams.records import Candidate

MAX_RECORDED_CANDIDATES = 16
"""Number of candidates that a decision records: the best ones, and the chosen one besides."""

MAX_RECORDED_RESERVATIONS = 16
"""Reservations at a candidate up to which each is recorded, and beyond which only their
sums: 4096 waiting requests would fill each decision with 40 KB."""

_ROW = Struct("qd10q5d")
"""As `cost_kernels.record_candidates` fills it. Read so, 16 rows become candidates in 6 us, by
columns in 12.
"""


NOT_SUMMED: Mapping[int, float] = MappingProxyType({})


NO_SHARE: float
NO_BATCH: float
NO_SHARE, NO_BATCH = Candidate.__struct_defaults__[-2:]
"""The defaults themselves: a record omits a float only if it is the same object."""


class DecisionRecord(msgspec.Struct, frozen=True, gc=False):
    """The best options of a decision, and the chosen one, as they were.

    They are converted to `Candidate` on access: that takes as long as a fifth of the decision, and
    not every caller records it. `rows`: as `cost_kernels.record_candidates` filled them,
    `is_timed`: with the inputs of policy predictive. By option, `reservations` of others there, or
    in `planned_ms` the wait for them.
    """

    rows: bytes
    worker_ranks: Sequence[WorkerRank]
    curves: Sequence[tuple[float, ...]]
    taints: Sequence[float]
    reservations: Mapping[int, tuple[float, ...]]
    is_timed: bool
    planned_ms: Mapping[int, float] = NOT_SUMMED

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All of them."""
        return tuple(self._candidates(_ROW.iter_unpack(self.rows)))

    def candidate(self, place: WorkerRank) -> Candidate | None:
        """The one at a place, if it is among them."""
        rows = (row for row in _ROW.iter_unpack(self.rows) if self.worker_ranks[row[0]] == place)
        return next(iter(self._candidates(islice(rows, 1))), None)

    def _candidates(self, rows: Iterable[tuple[Any, ...]]) -> list[Candidate]:
        places, curves, taints = self.worker_ranks, self.curves, self.taints
        others, sums, is_timed = self.reservations, self.planned_ms, self.is_timed
        taint, found = 0.0, list[Candidate]()
        for (
            i, cost, runs, open_tokens, device, host, disk, prefill_tokens, prompt_tokens,
            prefill_runs, chunk_tokens, capacity_tokens, busy_ms, slowness, later_ms,
            prefill_share, batch_ms,
        ) in rows:  # fmt: skip
            worker, epoch, rank = places[i]
            if taints:
                taint = taints[i]
            if is_timed:
                found.append(Candidate(
                    worker, epoch, rank, cost, runs, open_tokens, device, host, disk,
                    prefill_tokens, taint, prompt_tokens, prefill_runs, busy_ms, others.get(i, ()),
                    slowness, chunk_tokens, capacity_tokens, curves[i], later_ms,
                    sums.get(i), prefill_share or NO_SHARE, batch_ms or NO_BATCH,
                ))  # fmt: skip
            else:
                found.append(Candidate(
                    worker, epoch, rank, cost, runs, open_tokens, device, host, disk,
                    prefill_tokens, taint,
                ))  # fmt: skip
        return found


def record_decision(
    options: Candidates, costs: Costs, chosen: int, results: Floats | None = None
) -> DecisionRecord:
    """Of a decision between options; `results`: of policy predictive."""
    rows = np.empty((MAX_RECORDED_CANDIDATES + 1, cost_kernels.RECORD_COLUMNS), np.int64)
    size = cost_kernels.record_candidates(costs, chosen, options.features, options.blocks, rows)
    taints = options.taint_weights
    ahead, sums = _reservations(options, rows, size, results)
    return DecisionRecord(
        rows[:size].tobytes(), options.worker_ranks, options.curves,
        () if taints is None else taints.tolist(), ahead, results is not None, sums,
    )  # fmt: skip


def _reservations(
    options: Candidates, rows: Ints, size: int, results: Floats | None
) -> tuple[Mapping[int, tuple[float, ...]], Mapping[int, float]]:
    """By recorded option, the prefill of the others that are planned for it, or their sum."""
    if results is None or options.reservations is NO_RESERVATIONS:
        return {}, NOT_SUMMED
    ahead = np.empty((size, 1 + MAX_RECORDED_RESERVATIONS))
    positions = np.empty(len(options.worker_ranks), np.int64)
    positions.fill(-1)
    cost_kernels.record_reservations(rows, size, *options.reservations, positions, ahead)
    each: dict[int, tuple[float, ...]] = {}
    sums: dict[int, float] = {}
    for row, count in enumerate(map(int, ahead[:, 0].tolist())):
        if not count:
            continue
        i = rows.item(row, 0)
        if count > MAX_RECORDED_RESERVATIONS:
            sums[i] = results.item(i, PLANNED)
        else:
            each[i] = tuple(ahead[row, 1 : 1 + count].tolist())
    return each, sums


def candidates_from_record(candidates: Sequence[Candidate]) -> Candidates:
    """The inverse."""
    places = [WorkerRank(c.worker, c.epoch, c.rank) for c in candidates]
    spots = np.zeros((len(candidates), FEATURES))
    for spot, c in zip(spots, candidates, strict=True):
        spot[RUNS], spot[TOKENS], spot[OPEN_TOKENS] = c.open_runs, c.prompt_tokens, c.open_tokens
        spot[PREFILL_TOKENS], spot[PREFILL_RUNS] = c.prefill_tokens, c.prefill_runs
        spot[BUSY_MS], spot[STAGGER_MS] = c.busy_ms, c.later_ms
        spot[PLANNED_MS], spot[PREFILL_SHARE] = c.planned_ms or 0.0, c.prefill_share
        spot[BATCH_MS] = c.batch_ms
        spot[SLOWDOWN:] = profile_columns(recorded_profile(c))
    blocks = [(c.overlap_blocks, c.host_blocks, c.disk_blocks) for c in candidates]
    others = [(i, ms) for i, c in enumerate(candidates) for ms in c.ahead_ms]
    taints = [c.taint_weight for c in candidates]
    return Candidates(
        places, rank_hashes(places), [recorded_curve(recorded_profile(c)) for c in candidates],
        spots,
        np.array(blocks, np.float64).reshape(-1, 3), np.array(taints) if any(taints) else None,
        Reservations(
            np.array([i for i, _ in others], np.int64),
            np.array([ms for _, ms in others], np.float64),
        ),
    )  # fmt: skip
