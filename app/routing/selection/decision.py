"""Routing state, and the possible results of a decision.

Data and pure functions. `select.py` makes the decision; `pending.py` and routers act on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.policy_names import adds_load
from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.candidate_table import NO_CURVES, NO_SLOWDOWNS, CandidateTable
from kvlane.app.routing.selection.candidates import Candidates
from kvlane.app.routing.selection.cost_kernels import Floats, Ints
from kvlane.app.routing.selection.eligibility import CandidatePools
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.state.active_load import ActiveLoad, WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchRuns
from kvlane.app.routing.state.fleet import Fleet, WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.performance import (
    DEFAULT_OUTPUT_TOKENS,
    EngineProfile,
    FadingSums,
    PrefillShares,
    RecentPrefill,
)
from kvlane.app.routing.state.routed_prefixes import RoutedPrefixes
from kvlane.streams.records import Candidate, CandidateRows, EndCode, HandOverChoice, Phase


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """A place reserved for a request. `prefill_ms`: its own prefill there, with nothing beside it.
    `hold_until_ms`: the time after which it is no longer held, at any load there."""

    worker_rank: WorkerRank
    prefill_ms: float
    hold_until_ms: int


class PlannedReservations(msgspec.Struct, frozen=True, gc=False):
    """Reservations in the order of their requests' arrival: `numbers` i64 (reservations,), which of
    `worker_ranks` each is for, -1 for none; `prefill_ms` f64 (reservations,). `own`: the position
    of one that does not count, -1 for none. `worker_ranks` is replaced or continued, never changed.
    """

    worker_ranks: Sequence[WorkerRank]
    numbers: Ints
    prefill_ms: Floats
    own: int = -1


NOTHING_PLANNED = PlannedReservations((), np.empty(0, np.int64), np.empty(0))


class RoutingState(msgspec.Struct, frozen=True, gc=False):
    """The state of the deployment when a request is planned. `committed`: load by the ledger;
    `unconfirmed`: load of decisions taken here and not read back. `now_ms`: broker time. Only
    policy predictive uses the rest; see `PerformanceModel` and `TableInputs`. `reservations`: those
    of the other requests that are held here. `batch_runs`: those by the ledger."""

    fleet: Fleet
    pools: CandidatePools
    kv_index: KvIndexView
    committed: ActiveLoad
    unconfirmed: ActiveLoad
    now_ms: int
    mean_output_tokens: float = DEFAULT_OUTPUT_TOKENS
    slowdown: Mapping[str, float] = NO_SLOWDOWNS
    reservations: PlannedReservations = NOTHING_PLANNED
    count_output_tokens: bool = True
    stagger_ms: Mapping[str, float] = NO_SLOWDOWNS
    expected_followups: float = 1.0
    prefill_shares: PrefillShares | None = None
    transfer_token_ms: float | None = None
    recent_prefill: RecentPrefill | None = None
    batch_runs: BatchRuns | None = None
    curves: Mapping[str, PerfCurves] = NO_CURVES
    step_shares: PrefillShares | None = None
    routed: RoutedPrefixes | None = None
    usual_load: FadingSums[WorkerRank] | None = None

    def profile_of(self, worker: str, card_profile: EngineProfile) -> EngineProfile:
        """The profile of a worker as learned; `card_profile`: that by its card."""
        return card_profile._replace(
            curves=self.curves.get(worker, card_profile.curves),
            slowdown=self.slowdown.get(worker, 1.0),
        )


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """The forecast of policy predictive. `hold_ms`: for how long holding the request pays, from
    now; `waited_ms`: how long it has been queued; `ttft_ms`: time to its first token if it goes
    now; `itl_ms`: mean time between its tokens, 0 if it makes none.
    """

    reservation: Reservation | None = None
    hold_ms: int = 0
    waited_ms: int = 0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A place was chosen, with all inputs of the costs that are not in the request.
    `prefill_tokens`: what the request adds to the prefill there. `session_rank`: the place of the
    request's session, if affinity was considered. `overlap_blocks`: blocks of the prompt cached at
    its place, in any tier. `phase`: the part of the request that it is for; `choice`: whether that
    is all of it. `prefix_marks`: see `RoutedPrefixes`."""

    worker_rank: WorkerRank
    tokens: int
    cached_tokens: int
    prefill_tokens: int
    block_size: int
    policy: str
    params: dict[str, float]
    seed: int
    record: CandidateRows
    at_ms: int = 0
    forecast: Forecast = Forecast()
    session_rank: WorkerRank | None = None
    overlap_blocks: int = 0
    phase: Phase = "aggregated"
    choice: HandOverChoice | None = None
    prefix_marks: bytes = b""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The candidates to record: the best ones, and the chosen one."""
        return self.record.candidates

    @property
    def load(self) -> WorkerLoad:
        """The load that it adds to its place until it is read back."""
        tokens = self.tokens * adds_load(self.policy)
        return WorkerLoad(1, tokens, self.prefill_tokens, 1, self.at_ms)


class Wait(msgspec.Struct, frozen=True, gc=False):
    """The request has to wait in this router. `retry_at_ms`: broker time of the next try; None if
    only a record can help. `reservation`: that of policy predictive. `code`: the end of the request
    if its time is up before. `needs_new_worker`: no worker that is there could ever take it."""

    reason: str
    retry_at_ms: int | None = None
    reservation: Reservation | None = None
    code: EndCode = "deadline"
    needs_new_worker: bool = False


class Rejection(NamedTuple):
    """The request asks for something impossible."""

    code: EndCode
    message: str


Decision: TypeAlias = Placement | Wait | Rejection


def reservation_of(planned: Decision) -> Reservation | None:
    """The reservation of policy predictive for a request, whether it may go now or waits."""
    if isinstance(planned, Placement):
        return planned.forecast.reservation
    return planned.reservation if isinstance(planned, Wait) else None


def forecast(
    found: Sequence[float],
    among: CandidateTable | Candidates,
    chosen: int,
    now_ms: int,
    since_ms: float,
    config: RoutingConfig,
    deadline_ms: float | None,
    itl_ms: float = 0.0,
) -> Forecast:
    """The forecast for a request at the chosen place. `found`: a row of `Prediction.results`. Its
    turn there comes `stagger_ms` after the place is free, or after the request arrived."""
    until_ms = since_ms + config.predictive_weights.max_hold_ms
    if deadline_ms is not None:
        until_ms = min(until_ms, deadline_ms - found[cost_kernels.PREFILL])
    planned = Reservation(
        among.worker_ranks[chosen], found[cost_kernels.STANDALONE], math.floor(until_ms)
    )
    left_ms, spots = found[cost_kernels.HOLD], among.features
    if later_ms := spots.item(chosen, cost_kernels.STAGGER_MS):
        if spots.item(chosen, cost_kernels.PREFILL_RUNS):
            left_ms += later_ms if left_ms else 0.0
        else:
            left_ms = (
                max(since_ms, spots.item(chosen, cost_kernels.LAST_FIRST_TOKEN_MS))
                + later_ms
                - now_ms
            )
    left_ms = min(left_ms, planned.hold_until_ms - now_ms)
    ttft_ms = found[cost_kernels.WAIT] + found[cost_kernels.PREFILL]
    return Forecast(planned, max(math.ceil(left_ms), 0), int(now_ms - since_ms), ttft_ms, itl_ms)


def wait_for_rank(outlook: Forecast, now_ms: int) -> Wait | None:
    """The wait for the place, if queueing the request for it pays."""
    if outlook.hold_ms <= 0:
        return None
    return Wait("its worker is busy", now_ms + outlook.hold_ms, outlook.reservation)
