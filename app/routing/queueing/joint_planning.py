"""Joint planning of requests that wait or arrive together, with the costs of policy predictive.

The result is that of planning one after the other in the order of arrival, each with the
reservations of all others; no candidates are recorded. Requests that ask for certain workers are
planned one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from kvlane.app.routing.queueing.pending import PendingRequest, ReservedRequests
from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.candidate_table import CandidateTable
from kvlane.app.routing.selection.candidates import (
    NO_MULTIPLIER,
    expected_output_tokens,
    invalid_weight,
    latency_targets,
)
from kvlane.app.routing.selection.decision import (
    Decision,
    Rejection,
    Reservation,
    RoutingState,
    Wait,
    forecast,
    reservation_of,
    wait_for_rank,
)
from kvlane.app.routing.selection.eligibility import CandidatePool, filter_eligible
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.selection.select import part_of, refreshed_table, reservation_rows
from kvlane.indexer.xxh3 import M64

K = TypeVar("K", bound=Hashable)


class PlanningContext(NamedTuple):
    """The arguments of `select_worker` that are the same for all requests planned together."""

    state: RoutingState
    config: RoutingConfig
    full_workers: Collection[tuple[str, int]] = ()


class TentativePlan(msgspec.Struct, frozen=True, gc=False):
    """Where a request is to go, and its wait, if it has to wait for that place or for any."""

    reservation: Reservation | None
    wait: Wait | None = None


class PlannedOrder(msgspec.Struct, Generic[K], frozen=True, gc=False):
    """The result of joint planning. `order`: requests that may go, in the order of their dispatch;
    `waiting`: those that wait; `to_wake`: others whose turn has changed, to look next."""

    order: Sequence[K]
    waiting: Mapping[K, Wait]
    to_wake: Sequence[K]


def plan_together(
    looking: Iterable[PendingRequest[K]],
    pending: ReservedRequests[K],
    context: PlanningContext | None,
    plan_one: Callable[[PendingRequest[K]], Decision],
) -> PlannedOrder[K]:
    """Plan the requests that look at one moment, in the order of their arrival; none goes yet. Each
    reserves its worker in `pending` before the next group is planned. `context` is None with
    policies that queue requests for no place: nothing is planned then, and requests go by
    precedence. Neither is a single request, since it is planned when it goes."""
    looking = sorted(looking, key=lambda wanted: wanted.arrival)
    if len(looking) == 1:
        return PlannedOrder([looking[0].key], {}, [])
    waits: dict[K, Wait] = {}
    woken: dict[K, None] = {}
    groups = () if context is None else uniform_groups(looking, context)
    for pool, group in groups:
        if context is None or pool is None:
            plans = [_tentative(plan_one(wanted)) for wanted in group]
        else:
            plans = [*plan_uniform(group, pending, pool, context)]
        for wanted, each in zip(group, plans, strict=True):
            woken |= dict.fromkeys(
                pending.reserve(wanted, None if each is None else each.reservation)
            )
            if each is not None and each.wait is not None:
                waits[wanted.key] = each.wait
    for wanted in looking:
        woken.pop(wanted.key, None)
    free = [wanted for wanted in looking if wanted.key not in waits]
    return PlannedOrder(pending.dispatch_order(free), waits, list(woken))


def uniform_groups(
    looking: Sequence[PendingRequest[K]], by: PlanningContext
) -> Iterator[tuple[CandidatePool | None, list[PendingRequest[K]]]]:
    """Neighbours to which all places of one pool are the same, with that pool. Any other request is
    a group of its own, without a pool."""
    group: list[PendingRequest[K]] = []
    pool: CandidatePool | None = None
    for wanted in looking:
        model, phase = wanted.prompt.request.model, wanted.phase
        its_own = by.state.pools.pool(model, phase)
        is_plain = _is_plain(wanted, its_own, by)
        if group and (not is_plain or its_own is not pool):
            yield pool, group
            group = []
        if is_plain:
            pool = its_own
            group.append(wanted)
        else:
            yield None, [wanted]
    if group:
        yield pool, group


def _is_plain(wanted: PendingRequest[K], pool: CandidatePool, by: PlanningContext) -> bool:
    """Whether a request may go to every place of a pool, and asks for none."""
    request = wanted.prompt.request
    if (
        request.hints.session_control
        or request.hints.routing_constraints
        or invalid_weight(request)
        or wanted.phase == "decode"  # all of its prompt is handed over, with the cached part
    ):
        return False
    rows = filter_eligible(
        request, wanted.phase, pool, by.state.fleet,
        excluded=wanted.excluded, full=by.full_workers,
        loads=(by.state.committed, by.state.unconfirmed), has_output=wanted.prompt.has_output,
    )  # fmt: skip
    return rows is pool.rows


def plan_uniform(
    looking: Sequence[PendingRequest[K]],
    pending: ReservedRequests[K],
    pool: CandidatePool,
    by: PlanningContext,
) -> list[TentativePlan]:
    """Plan a group of requests in one pass of the kernel, each counting in those before it."""
    view, tuning, board = by.state, by.config, refreshed_table(pool, by.state)
    found = board.overlaps_of(
        view.kv_index, [each.prompt.local_hashes(pool.block_size) for each in looking]
    )
    joined = pending.joined(looking)
    others_at, others_ms = reservation_rows(board, joined.reservations)
    chosen = joined.positions
    requests = np.array([
        (
            each.prompt.tokens, pool.block_size,
            expected_output_tokens(each.prompt.request, view.mean_output_tokens),
            *latency_targets(each.prompt.request),
        )
        for each in looking
    ], np.float64)  # fmt: skip
    size, best = len(board.worker_ranks), np.empty((len(looking), cost_kernels.RESULTS))
    cost_kernels.plan_uniform_batch(
        board.features, board.hashes, *found, board.row_of_column, requests,
        np.array([each.seed & M64 for each in looking], np.uint64), chosen, others_at, others_ms,
        view.mean_output_tokens, view.expected_followups, tuning.predictive_weights.decode_weight,
        part_of(looking[0].phase),
        NO_MULTIPLIER,
        np.empty((size, 3)), np.empty(size), np.empty((size, cost_kernels.RESULTS)), best,
    )  # fmt: skip
    return _tentative_plans(looking, board, others_at[chosen].tolist(), best.tolist(), by)


def _tentative_plans(
    looking: Sequence[PendingRequest[K]], table: CandidateTable, chosen: list[int],
    best: list[list[float]],
    by: PlanningContext,
) -> list[TentativePlan]:  # fmt: skip
    now_ms = by.state.now_ms
    plans = []
    for wanted, at, found in zip(looking, chosen, best, strict=True):
        outlook = forecast(found, table, at, now_ms, wanted.since_ms, by.config, wanted.deadline_ms)
        assert outlook.reservation is not None
        plans.append(TentativePlan(outlook.reservation, wait_for_rank(outlook, now_ms)))
    return plans


def _tentative(plan: Decision) -> TentativePlan | None:
    if isinstance(plan, Rejection):
        return None
    return TentativePlan(reservation_of(plan), plan if isinstance(plan, Wait) else None)
