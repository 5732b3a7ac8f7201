"""Options as decisions record them: candidates, and back.

The record of the best candidates has every input of a policy, so a decision can be recomputed
from them alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.candidate_table import profile_columns, recorded_curve
from kvlane.app.routing.selection.candidates import NO_RESERVATIONS, Candidates, Reservations
from kvlane.app.routing.selection.choice import Costs, rank_hashes
from kvlane.app.routing.selection.cost_kernels import (
    BATCH_MS,
    BUSY_MS,
    FEATURES,
    JOINING_COLUMNS,
    JOINING_MS,
    JOINING_RUNS,
    JOINING_TOKENS,
    OPEN_TOKENS,
    PLANNED,
    PLANNED_MS,
    PREFILL_RUNS,
    PREFILL_SHARE,
    PREFILL_TOKENS,
    RECORD_COLUMNS,
    RUNS,
    SHARING,
    SLOWDOWN,
    STAGGER_MS,
    TIMED_RECORD_COLUMNS,
    TOKENS,
    USUAL_TOKENS,
    Floats,
    Ints,
)
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.performance import recorded_profile
from kvlane.streams.records import Candidate, CandidateRows

MAX_RECORDED_CANDIDATES = 16
"""Number of candidates that a decision records: the best ones, and the chosen one besides."""

MAX_RECORDED_RESERVATIONS = 16
"""Reservations at a candidate up to which each is recorded, and beyond which only their sums."""
_NUMBER = np.dtype("<i8")
"""Little endian on the wire; kernels take no other order than the machine's."""


def record_decision(
    options: Candidates, costs: Costs, chosen: int, results: Floats | None = None
) -> CandidateRows:
    """The best options of a decision, and the chosen one. `results`: of policy predictive."""
    columns = RECORD_COLUMNS if results is None else TIMED_RECORD_COLUMNS
    rows = np.empty((MAX_RECORDED_CANDIDATES + 1, columns), _NUMBER)
    recorded = np.empty(MAX_RECORDED_CANDIDATES + 1, np.int64)
    joining = np.empty((MAX_RECORDED_CANDIDATES + 1, JOINING_COLUMNS), _NUMBER)
    usual = np.empty(MAX_RECORDED_CANDIDATES + 1)
    size, is_joined, has_usual = cost_kernels.record_candidates(
        costs, chosen, options.features, options.blocks, recorded, rows, joining, usual
    )
    recorded = recorded[:size]
    numbers: list[int] = recorded.tolist()
    ranks, weights = options.worker_ranks, options.taint_weights
    places, content = tuple([ranks[i] for i in numbers]), rows[:size].tobytes()
    taints = () if weights is None else tuple(weights[recorded].tolist())
    if results is None:
        return CandidateRows(places=places, rows=content, taint_weights=taints)
    has_curves = any(map(options.curves.__getitem__, numbers))
    curves = tuple([options.curves[i] for i in numbers]) if has_curves else ()
    ahead, sums = _reservations(options, recorded, results)
    return CandidateRows(
        places=places, rows=content, curves=curves, taint_weights=taints, ahead_ms=ahead,
        planned_ms=sums, is_timed=True, shares_steps=True,
        joining_rows=joining[:size].tobytes() if is_joined else b"",
        usual_tokens=tuple(usual[:size].tolist()) if has_usual else (),
    )  # fmt: skip


def _reservations(
    options: Candidates, recorded: Ints, results: Floats
) -> tuple[dict[int, tuple[float, ...]], dict[int, float]]:
    """By recorded option, the prefill of the others that are planned for it, or their sum."""
    each: dict[int, tuple[float, ...]] = {}
    sums: dict[int, float] = {}
    if options.reservations is NO_RESERVATIONS:
        return each, sums
    ahead = np.empty((len(recorded), 1 + MAX_RECORDED_RESERVATIONS))
    positions = np.empty(len(options.worker_ranks), np.int64)
    positions.fill(-1)
    cost_kernels.record_reservations(recorded, *options.reservations, positions, ahead)
    for at, count in enumerate(map(int, ahead[:, 0].tolist())):
        if count > MAX_RECORDED_RESERVATIONS:
            sums[at] = results.item(recorded.item(at), PLANNED)
        elif count:
            each[at] = tuple(ahead[at, 1 : 1 + count].tolist())
    return each, sums


def candidates_from_record(candidates: Sequence[Candidate]) -> Candidates:
    places = [WorkerRank(c.worker, c.epoch, c.rank) for c in candidates]
    spots = np.zeros((len(candidates), FEATURES))
    for spot, c in zip(spots, candidates, strict=True):
        spot[RUNS], spot[TOKENS], spot[OPEN_TOKENS] = c.open_runs, c.prompt_tokens, c.open_tokens
        spot[PREFILL_TOKENS], spot[PREFILL_RUNS] = c.prefill_tokens, c.prefill_runs
        spot[BUSY_MS], spot[STAGGER_MS] = c.busy_ms, c.later_ms
        spot[PLANNED_MS], spot[PREFILL_SHARE] = c.planned_ms or 0.0, c.prefill_share
        spot[BATCH_MS], spot[SHARING] = c.batch_ms, c.shares_steps
        spot[JOINING_TOKENS], spot[JOINING_RUNS] = c.joining_tokens, c.joining_runs
        spot[JOINING_MS], spot[USUAL_TOKENS] = c.joining_ms, c.usual_tokens
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
