"""The candidates of a decision: `Candidate` for people and audits, `CandidateRows` as written.

Rows of numbers take less space and time than named fields; every router reads all decisions.
"""

# ruff: noqa: RUF012 - msgspec gives each struct its own copy of an empty default

from __future__ import annotations

from struct import Struct
from typing import Any

from kvlane.streams.record_base import InternalRecord

Place = tuple[str, int, int]
"""Worker, epoch and rank."""

ROW, TIMED_ROW, JOINING_ROW = Struct("<d6q"), Struct("<d10q5d"), Struct("<3q")
"""A candidate in `CandidateRows`: its cost and the load and blocks there; and with the inputs of
policy predictive; and the tokens, number and age of the runs that join a step there. In the order
of `record_candidates` in app/routing/selection/cost_kernels.py."""


class Candidate(InternalRecord, frozen=True, kw_only=False):
    """A candidate worker with the inputs of its cost, so that the cost can be recomputed.

    `open_tokens`: of prompts and answers of its open runs; `prefill_tokens`: of these prompts,
    neither computed nor expected in the cache.

    From `prompt_tokens` on inputs of policy predictive. `prompt_tokens`: of the open runs.
    `prefill_runs`: without a first token; `busy_ms`: how long the worker has been at their prompts.
    `ahead_ms`: prefill of each request that waited in the router to go there; of more than 16
    `planned_ms`: the sum. Then its pace (`EngineProfile`); without `curve` the published one.
    `later_ms`: by how much later than others the router counted on it. `prefill_share`: of its time
    lately. `batch_ms`: delay by its batch runs. `joining_tokens`, `joining_runs`: those after the
    last first token there, `joining_ms` ago in the mean. `shares_steps`: whether prompts were
    expected to share a step. `usual_tokens`: in the cache there lately, in the mean.
    """

    worker: str
    epoch: int
    rank: int = 0
    cost: float = 0.0
    open_runs: int = 0
    open_tokens: int = 0
    overlap_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    prefill_tokens: int = 0
    taint_weight: float = 0.0
    prompt_tokens: int = 0
    prefill_runs: int = 0
    busy_ms: float = 0.0
    ahead_ms: tuple[float, ...] = ()
    slowness: float = 1.0
    chunk_tokens: int = 0
    capacity_tokens: int = 0
    curve: tuple[float, ...] = ()
    later_ms: float = 0.0
    planned_ms: float | None = None
    prefill_share: float = 0.0
    batch_ms: float = 0.0
    joining_tokens: int = 0
    joining_runs: int = 0
    joining_ms: int = 0
    shares_steps: bool = False
    usual_tokens: float = 0.0


NO_SHARE: float
NO_BATCH: float
NO_SHARE, NO_BATCH = Candidate.__struct_defaults__[-7:-5]
NO_JOINING: tuple[int, int, int] = Candidate.__struct_defaults__[-5:-2]
NO_USUAL_LOAD: float = Candidate.__struct_defaults__[-1]
"""The defaults themselves: a record omits a float only if it is the same object."""


class CandidateRows(InternalRecord, frozen=True):
    """The candidates of a decision, the least cost first; the chosen one may be the last.

    `is_timed`: with the inputs of policy predictive. `rows`: a `TIMED_ROW` for each of `places`, or
    a `ROW`. `curves`, `taint_weights`, `usual_tokens`, `joining_rows` (`JOINING_ROW`): by
    candidate, or empty; another number is malformed. `ahead_ms`, `planned_ms`: by the position of a
    candidate. `shares_steps`: of all.
    """

    places: tuple[Place, ...] = ()
    rows: bytes = b""
    curves: tuple[tuple[float, ...], ...] = ()
    taint_weights: tuple[float, ...] = ()
    ahead_ms: dict[int, tuple[float, ...]] = {}
    planned_ms: dict[int, float] = {}
    is_timed: bool = False
    shares_steps: bool = False
    joining_rows: bytes = b""
    usual_tokens: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.places)
        size = TIMED_ROW.size if self.is_timed else ROW.size
        if (
            len(self.rows) != count * size
            or len(self.curves or self.places) != count
            or len(self.taint_weights or self.places) != count
            or len(self.joining_rows) not in (0, count * JOINING_ROW.size)
            or len(self.usual_tokens or self.places) != count
        ):
            raise ValueError(f"rows, curves or taint weights do not match the {count} places")

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        rows = self._row.iter_unpack(self.rows)
        return tuple([self._candidate(i, row) for i, row in enumerate(rows)])

    def candidate(self, place: Place) -> Candidate | None:
        try:
            i = self.places.index(place)
        except ValueError:
            return None
        row = self._row
        return self._candidate(i, row.unpack_from(self.rows, i * row.size))

    @property
    def _row(self) -> Struct:
        return TIMED_ROW if self.is_timed else ROW

    def _candidate(self, i: int, row: tuple[Any, ...]) -> Candidate:
        worker, epoch, rank = self.places[i]
        taint = self.taint_weights[i] if self.taint_weights else 0.0
        cost, runs, open_tokens, device, host, disk, prefill_tokens, *timed = row
        if not timed:
            return Candidate(
                worker, epoch, rank, cost, runs, open_tokens, device, host, disk,
                prefill_tokens, taint,
            )  # fmt: skip
        joining = NO_JOINING
        if self.joining_rows:
            joining = JOINING_ROW.unpack_from(self.joining_rows, i * JOINING_ROW.size)
        usual = self.usual_tokens[i] if self.usual_tokens else 0.0
        (
            prompt_tokens, prefill_runs, chunk_tokens, capacity_tokens, busy_ms, slowness,
            later_ms, prefill_share, batch_ms,
        ) = timed  # fmt: skip
        return Candidate(
            worker, epoch, rank, cost, runs, open_tokens, device, host, disk, prefill_tokens, taint,
            prompt_tokens, prefill_runs, busy_ms, self.ahead_ms.get(i, ()), slowness, chunk_tokens,
            capacity_tokens, self.curves[i] if self.curves else (), later_ms,
            self.planned_ms.get(i), prefill_share or NO_SHARE, batch_ms or NO_BATCH,
            *joining, self.shares_steps, usual or NO_USUAL_LOAD,
        )  # fmt: skip
