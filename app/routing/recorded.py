"""Options as decisions record them: candidates, and back.

What is recorded of the best candidates is all that a policy looks at, so a decision can be taken
again from them alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.routing import kernels
from app.routing.board import pace_columns
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
from app.routing.paces import PUBLISHED, pace_told
from app.routing.policies import Costs, Options, Place, tags_of
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
    best = np.empty(RECORDED + 1, np.int64)
    counts = np.empty((kernels.COUNTS, len(best)), np.int64)
    times = np.empty((kernels.TIMES, len(best)))
    size = kernels.record(costs, chosen, options.spots, options.blocks, best, counts, times)
    numbers: list[int] = best[:size].tolist()
    places, taints = options.places, options.taint_weights
    cost, busy_ms, slowness, later_ms, *curve = times[:, :size].tolist()
    *about, prefill_tokens, prompt_tokens, prefill_runs, chunk_tokens, capacity_tokens = counts[
        :, :size
    ].tolist()
    columns = [
        *zip(*[places[i] for i in numbers], strict=True), cost, *about, prefill_tokens,
        [0.0] * size if taints is None else taints[numbers].tolist(),
    ]  # fmt: skip
    if is_timed:
        columns += [
            prompt_tokens, prefill_runs, busy_ms, _ahead(options, numbers), slowness, chunk_tokens,
            capacity_tokens, [() if c == _PUBLISHED else c for c in zip(*curve, strict=True)],
            later_ms,
        ]  # fmt: skip
    return tuple(map(Candidate, *columns))


def _ahead(options: Options, numbers: list[int]) -> list[tuple[float, ...]]:
    """For each of these options the prefill of those who are planned for it before."""
    if not len(options.ahead_at):
        return [()] * len(numbers)
    ahead: dict[int, list[float]] = {}
    for at, ms in zip(options.ahead_at.tolist(), options.ahead_ms.tolist(), strict=True):
        ahead.setdefault(at, []).append(ms)
    return [tuple(ahead.get(number, ())) for number in numbers]


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
