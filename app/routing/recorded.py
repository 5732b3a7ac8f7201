"""Options as decisions record them: candidates, and back.

What is recorded of the best candidates is all that a policy looks at, so a decision can be taken
again from them alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.routing.board import pace_columns
from app.routing.kernels import (
    BUSY_MS,
    CAPACITY,
    CHUNK,
    CURVE,
    LATER_MS,
    OPEN_TOKENS,
    PREFILL_RUNS,
    PREFILL_TOKENS,
    RUNS,
    SLOWNESS,
    SPOT,
    TOKENS,
)
from app.routing.paces import PUBLISHED, pace_told
from app.routing.policies import NEVER, Costs, Options, Place, tags_of
from streams.records import Candidate

RECORDED = 16
"""How many candidates a decision records: the best ones, and the chosen one if it is none."""

_PUBLISHED = PUBLISHED.numbers()


def candidates_of(
    options: Options, costs: Costs, chosen: int, *, is_timed: bool
) -> tuple[Candidate, ...]:
    """The best options that were considered, and the chosen one.

    `is_timed`: with what policy predictive looks at.
    """
    best: list[int] = np.argsort(costs, kind="stable")[:RECORDED].tolist()
    if chosen not in best:
        best.append(chosen)
    best = [i for i in best if costs[i] < NEVER or i == chosen]
    taints = options.taint_weights
    ahead: dict[int, list[float]] = {}
    for at, ms in zip(options.ahead_at.tolist(), options.ahead_ms.tolist(), strict=True):
        ahead.setdefault(at, []).append(ms)
    found = []
    for i, cost, spot, blocks in zip(
        best, costs[best].tolist(), options.spots[best].tolist(),
        options.blocks[best].astype(np.int64).tolist(), strict=True,
    ):  # fmt: skip
        place = options.places[i]
        weight = 0.0 if taints is None else float(taints[i])
        about = (
            place.worker, place.epoch, place.rank, cost, int(spot[RUNS]), int(spot[OPEN_TOKENS]),
            *blocks, int(spot[PREFILL_TOKENS]), weight,
        )  # fmt: skip
        if is_timed:
            curve = tuple(spot[CURVE:])
            about += (
                int(spot[TOKENS]), int(spot[PREFILL_RUNS]), spot[BUSY_MS],
                tuple(ahead.get(i, ())), spot[SLOWNESS], int(spot[CHUNK]), int(spot[CAPACITY]),
                () if curve == _PUBLISHED else curve, spot[LATER_MS],
            )  # fmt: skip
        found.append(Candidate(*about))  # by position: twice as fast, and there are 16 of them
    return tuple(found)


def options_of(candidates: Sequence[Candidate]) -> Options:
    """The inverse."""
    places = [Place(c.worker, c.epoch, c.rank) for c in candidates]
    spots = np.zeros((len(candidates), SPOT))
    for spot, c in zip(spots, candidates, strict=True):
        spot[RUNS], spot[TOKENS], spot[OPEN_TOKENS] = c.open_runs, c.prompt_tokens, c.open_tokens
        spot[PREFILL_TOKENS], spot[PREFILL_RUNS] = c.prefill_tokens, c.prefill_runs
        spot[BUSY_MS], spot[LATER_MS] = c.busy_ms, c.later_ms
        pace = pace_told(c)
        spot[SLOWNESS:] = pace_columns(pace)
    blocks = [(c.overlap_blocks, c.host_blocks, c.disk_blocks) for c in candidates]
    ahead = [(i, ms) for i, c in enumerate(candidates) for ms in c.ahead_ms]
    taints = [c.taint_weight for c in candidates]
    return Options(
        places, tags_of(places), spots, np.array(blocks, np.float64).reshape(-1, 3),
        np.array(taints) if any(taints) else None,
        np.array([i for i, _ in ahead], np.int64), np.array([ms for _, ms in ahead], np.float64),
    )  # fmt: skip
