"""Options as decisions record them: candidates, and back.

What is recorded of the best candidates is all that a policy looks at, so a decision can be taken
again from them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from struct import Struct
from typing import Any

import msgspec
import numpy as np

from app.routing import kernels
from app.routing.board import curve_of, pace_columns
from app.routing.kernels import (
    BUSY_MS,
    LATER_MS,
    OPEN_TOKENS,
    PREFILL_RUNS,
    PREFILL_TOKENS,
    RUNS,
    SLOWNESS,
    SPOT,
    TOKENS,
)
from app.routing.paces import pace_told
from app.routing.policies import NOBODY, Costs, Options, Others, Place, tags_of
from streams.records import Candidate

RECORDED = 16
"""How many candidates a decision records: the best ones, and the chosen one if it is none."""

_ROW = Struct("qd10q3d")
"""As `kernels.record` fills it. Read so, 16 rows become candidates in 6 us, by columns in 12."""


class Inputs(msgspec.Struct, frozen=True, gc=False):
    """The best options that were considered, and the chosen one, as they were.

    They become candidates when they are asked for: that takes as long as a fifth of the decision,
    and not everybody who decides writes down all of them. `rows`: as `kernels.record` filled them,
    `is_timed`: with what policy predictive looks at.
    """

    rows: bytes
    places: Sequence[Place]
    curves: Sequence[tuple[float, ...]]
    taints: Sequence[float]
    others: Mapping[int, tuple[float, ...]]
    is_timed: bool

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All of them."""
        return tuple(self._candidates(_ROW.iter_unpack(self.rows)))

    def candidate(self, place: Place) -> Candidate | None:
        """The one at a place, if it is among them."""
        rows = (row for row in _ROW.iter_unpack(self.rows) if self.places[row[0]] == place)
        return next(iter(self._candidates(islice(rows, 1))), None)

    def _candidates(self, rows: Iterable[tuple[Any, ...]]) -> list[Candidate]:
        places, curves, taints = self.places, self.curves, self.taints
        others, is_timed = self.others, self.is_timed
        taint, found = 0.0, list[Candidate]()
        for (
            i, cost, runs, open_tokens, device, host, disk, prefill_tokens, prompt_tokens,
            prefill_runs, chunk_tokens, capacity_tokens, busy_ms, slowness, later_ms,
        ) in rows:  # fmt: skip
            worker, epoch, rank = places[i]
            if taints:
                taint = taints[i]
            if is_timed:
                found.append(Candidate(
                    worker, epoch, rank, cost, runs, open_tokens, device, host, disk,
                    prefill_tokens, taint, prompt_tokens, prefill_runs, busy_ms, others.get(i, ()),
                    slowness, chunk_tokens, capacity_tokens, curves[i], later_ms,
                ))  # fmt: skip
            else:
                found.append(Candidate(
                    worker, epoch, rank, cost, runs, open_tokens, device, host, disk,
                    prefill_tokens, taint,
                ))  # fmt: skip
        return found


def inputs_of(options: Options, costs: Costs, chosen: int, *, is_timed: bool) -> Inputs:
    """Of a decision between options."""
    rows = np.empty((RECORDED + 1, kernels.RECORD), np.int64)
    size = kernels.record(costs, chosen, options.spots, options.blocks, rows)
    taints = options.taint_weights
    return Inputs(
        rows[:size].tobytes(), options.places, options.curves,
        () if taints is None else taints.tolist(), _others(options), is_timed,
    )  # fmt: skip


def _others(options: Options) -> dict[int, tuple[float, ...]]:
    """By option, the prefill of the others that are planned for it."""
    found: dict[int, list[float]] = {}
    if options.others is NOBODY:
        return {}
    for at, ms in zip(options.others.at.tolist(), options.others.ms.tolist(), strict=True):
        found.setdefault(at, []).append(ms)
    return {at: tuple(each) for at, each in found.items()}


def options_of(candidates: Sequence[Candidate]) -> Options:
    """The inverse."""
    places = [Place(c.worker, c.epoch, c.rank) for c in candidates]
    spots = np.zeros((len(candidates), SPOT))
    for spot, c in zip(spots, candidates, strict=True):
        spot[RUNS], spot[TOKENS], spot[OPEN_TOKENS] = c.open_runs, c.prompt_tokens, c.open_tokens
        spot[PREFILL_TOKENS], spot[PREFILL_RUNS] = c.prefill_tokens, c.prefill_runs
        spot[BUSY_MS], spot[LATER_MS] = c.busy_ms, c.later_ms
        spot[SLOWNESS:] = pace_columns(pace_told(c))
    blocks = [(c.overlap_blocks, c.host_blocks, c.disk_blocks) for c in candidates]
    others = [(i, ms) for i, c in enumerate(candidates) for ms in c.ahead_ms]
    taints = [c.taint_weight for c in candidates]
    return Options(
        places, tags_of(places), [curve_of(pace_told(c)) for c in candidates], spots,
        np.array(blocks, np.float64).reshape(-1, 3), np.array(taints) if any(taints) else None,
        Others(
            np.array([i for i, _ in others], np.int64),
            np.array([ms for _, ms in others], np.float64),
        ),
    )  # fmt: skip
