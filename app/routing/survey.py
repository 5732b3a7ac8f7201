"""What many requests that are held, or come together, are to do: `plan` for all of them at once.

The same as planning one after the other in the order of their arrival, each knowing what all others
have in mind; but nothing is written down, since most of them stay where they are. Only policy
predictive holds requests, so only that is here. Requests that ask for certain workers are planned
one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from app.routing import kernels
from app.routing.board import Board
from app.routing.decisions import Hold, Plan, Tuning, View, intention
from app.routing.eligibility import Pool, eligible
from app.routing.held import Held, Sketch, Wanted
from app.routing.plan import (
    board_of,
    expected_output_tokens,
    fault_of,
    hold_of,
    outlook_of,
    targets_of,
)
from app.routing.policies import UNCHANGED
from indexer.xxh3 import M64

K = TypeVar("K", bound=Hashable)


class Surveyor(NamedTuple):
    """What a survey needs besides: see `plan`, whose arguments these are."""

    view: View
    tuning: Tuning
    full: Collection[tuple[str, int]] = ()


def survey(
    looking: Sequence[Wanted[K]], held: Held[K], by: Surveyor, alone: Callable[[Wanted[K]], Plan]
) -> Iterator[Sketch | None]:
    """What each is to do, in the order in which they are given; None for who finds no place.

    Lazy: what one has in mind must be in `held` before the next is asked for. `alone` plans one.
    """
    waiting: list[Wanted[K]] = []
    pool: Pool | None = None
    for wanted in looking:
        model = wanted.prompt.request.model
        its_own = by.view.pools.pool(model, "aggregated", by.view.now_ms)
        plain = _is_plain(wanted, its_own, by)
        if waiting and (not plain or its_own is not pool):
            assert pool is not None
            yield from _together(waiting, held, pool, by)
            waiting = []
        if plain:
            pool = its_own
            waiting.append(wanted)
        else:
            yield _sketch(alone(wanted))
    if waiting:
        assert pool is not None
        yield from _together(waiting, held, pool, by)


def _is_plain(wanted: Wanted[K], pool: Pool, by: Surveyor) -> bool:
    """Whether all places of a pool are the same to a request."""
    request = wanted.prompt.request
    if request.hints.session_control or request.hints.routing_constraints or fault_of(request):
        return False
    rows = eligible(
        request, "aggregated", pool, by.view.fleet,
        excluded=wanted.excluded, full=by.full, burdens=(by.view.told, by.view.own),
    )  # fmt: skip
    return rows is pool.rows


def _together(
    looking: Sequence[Wanted[K]], held: Held[K], pool: Pool, by: Surveyor
) -> list[Sketch]:
    view, tuning, board = by.view, by.tuning, board_of(pool, by.view)
    found = board.found(view.caches, [each.prompt.local(pool.block_size) for each in looking])
    line = held.line({each.key: each.number for each in looking})
    others_at = board.rows_at([planned.place if planned else None for planned in line.planned])
    others_ms = np.array([planned.prefill_ms if planned else 0.0 for planned in line.planned])
    asks = np.array([
        (
            each.prompt.tokens, pool.block_size,
            expected_output_tokens(each.prompt.request, view.output_tokens),
            *targets_of(each.prompt.request),
        )
        for each in looking
    ], np.float64)  # fmt: skip
    size, best = len(board.places), np.empty((len(looking), kernels.FOUND))
    chosen = np.array([line.places[each.key] for each in looking], np.int64)
    kernels.survey(
        board.spots, board.tags, *found, board.column_rows, asks,
        np.array([each.seed & M64 for each in looking], np.uint64), chosen, others_at, others_ms,
        view.output_tokens, view.leads_to, tuning.predictive.decode_weight, UNCHANGED,
        np.empty((size, 3)), np.empty(size), np.empty((size, kernels.FOUND)), best,
    )  # fmt: skip
    return _sketches(looking, board, others_at[chosen].tolist(), best.tolist(), by)


def _sketches(
    looking: Sequence[Wanted[K]], board: Board, chosen: list[int], best: list[list[float]],
    by: Surveyor,
) -> list[Sketch]:  # fmt: skip
    now_ms = by.view.now_ms
    sketches = []
    for wanted, at, found in zip(looking, chosen, best, strict=True):
        outlook = outlook_of(
            found, board, at, now_ms, wanted.since_ms, by.tuning, wanted.deadline_ms
        )  # fmt: skip
        assert outlook.planned is not None
        sketches.append(Sketch(outlook.planned, hold_of(outlook, now_ms)))
    return sketches


def _sketch(plan: Plan) -> Sketch | None:
    planned = intention(plan)
    return None if planned is None else Sketch(planned, plan if isinstance(plan, Hold) else None)
