"""Inputs of a policy: the features of a request, and its candidates, the eligible places with the
inputs of their costs in columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvlane.app.routing.policy_names import MAX_WEIGHT
from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.cost_kernels import Floats, Ints, Words
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.streams.request import Request

COST_SETTINGS = "overlap_score_credit", "prefill_load_scale", "router_temperature"
"""Fields of `RouterConfigOverride` that costs depend on."""


class RequestFeatures(msgspec.Struct, frozen=True, gc=False):
    """A request as policies see it. `prompt_tokens`: all tokens that are to be computed or loaded.

    `dispatched_count`: requests this router has dispatched, for policies that go in turn.
    `least_prefill_tokens`: of all options. `output_tokens`: expected length of its answer,
    `mean_output_tokens`: of any answer. `most_cached_tokens`: cached at any one option,
    `least_runs`: at any one; UNKNOWN if not computed yet. `expected_followups`: see
    `PerformanceModel`. Targets: for the time to its first token and between tokens. `part`: see
    `cost_kernels.py`; `transfer_ms`: until its prompt is there.
    """

    id: str
    prompt_tokens: int
    block_size: int
    seed: int
    dispatched_count: int = 0
    session: str = ""
    least_prefill_tokens: int = 0
    output_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    most_cached_tokens: float = 0.0
    least_runs: float = math.inf
    expected_followups: float = 1.0
    ttft_target_ms: float = math.inf
    itl_target_ms: float = math.inf
    part: int = cost_kernels.WHOLE
    transfer_ms: float = 0.0


def expected_output_tokens(request: Request, mean: float) -> float:
    """The expected length of its answer; `mean`: that of all answers."""
    expected: float | None = request.hints.expected_output_tokens
    expected, limit = mean if expected is None else max(expected, 1), request.stop.max_tokens
    return float(expected if limit is None else min(expected, max(limit, 1)))


def latency_targets(request: Request) -> tuple[float, float]:
    """The latency targets of a request, to the first token and between tokens, in ms."""
    wishes = request.router
    if wishes is None:
        return math.inf, math.inf
    ttft_ms, itl_ms = wishes.ttft_target, wishes.itl_target
    return math.inf if ttft_ms is None else ttft_ms, math.inf if itl_ms is None else itl_ms


def cost_settings(request: Request) -> list[str]:
    """The settings of the cost function that a request sets for itself, by name."""
    override = request.router_config_override
    return [name for name in COST_SETTINGS if override and getattr(override, name) is not None]


def invalid_weight(request: Request) -> str:
    """The name of a number in the request that would make costs incomparable; mostly empty."""
    override, constraints = request.router_config_override, request.hints.routing_constraints
    if override is not None:
        for name in COST_SETTINGS:
            value = getattr(override, name)
            if value is not None and not 0 <= value <= MAX_WEIGHT:  # nor is it NaN
                return name
    if constraints is not None:
        for taint, weight in constraints.preferred_taints.items():
            if not abs(weight) <= MAX_WEIGHT:
                return f"the weight of preferred taint {taint}"
    return ""


NO_MULTIPLIER: Floats = np.empty(0)
"""No factors on the costs."""


class Reservations(NamedTuple):
    """The reservations of the other requests in this router, in the order of their arrival: `rows`,
    the option of each, -1 for none of these; `prefill_ms`, its standalone prefill."""

    rows: Ints
    prefill_ms: Floats


NO_RESERVATIONS = Reservations(np.empty(0, np.int64), np.empty(0))


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """Candidates for a request with all inputs of a policy; one row each. `hashes`: see
    `rank_hashes`; `curves`: see `recorded_curve`. `features`: load and speed, the `spots` of
    `cost_kernels.py`; `blocks`: leading blocks of the prompt in three columns: cached on the
    device, to load from host, from disk. `taint_weights`: the sum of the weights of a place's
    preferred taints. Only policies with a forecast use `reservations`.
    """

    worker_ranks: Sequence[WorkerRank]
    hashes: Words
    curves: Sequence[tuple[float, ...]]
    features: Floats
    blocks: Floats
    taint_weights: Floats | None = None
    reservations: Reservations = NO_RESERVATIONS

    @property
    def taint_multiplier(self) -> Floats:
        """The factors of preferred taints on costs: exp(-tanh(Σ weights)); empty without any."""
        if self.taint_weights is None:
            return NO_MULTIPLIER
        return np.array([math.exp(-math.tanh(w)) for w in self.taint_weights.tolist()])

    def subset(self, numbers: Ints) -> Candidates:
        position = np.full(
            len(self.worker_ranks) + 1, -1
        )  # the last one is for places of other pools
        position[numbers] = np.arange(len(numbers))
        which = numbers.tolist()
        return Candidates(
            [self.worker_ranks[i] for i in which], self.hashes[numbers],
            [self.curves[i] for i in which],
            self.features[numbers], self.blocks[numbers],
            None if self.taint_weights is None else self.taint_weights[numbers],
            Reservations(position[self.reservations.rows], self.reservations.prefill_ms),
        )  # fmt: skip
