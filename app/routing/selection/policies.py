"""Policies: the cost of sending a request to each eligible place.

A policy is a function of a request, its options, and the weights of the settings, which only
`dynamo` uses; it returns one cost per option, lower being better. Eligibility is decided before
(`eligibility.py`), and costs become a choice in the same way for all (`choose`). Options are
columns, because a policy looks at every worker.

Randomness is a hash of the request's seed and the place alone. So a decision can be recomputed from
the places that were recorded, however many others there were.

    dynamo         prefill work left plus decode work under way, in blocks, cached blocks credited:
                   the documented cost of NVIDIA Dynamo's KV router, its defaults included
    least_loaded   open tokens, then open runs
    round_robin    in turn, by name
    random         at random
    power_of_two   the less loaded of two drawn at random
    session_hash   always the same place for a session (else for the request id) until it is lost
    predictive     the least cost in predicted milliseconds (`predictive.py`, called by `select.py`)
    direct         where the request says; one that does not say is refused before it comes here
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.routing.selection import cost_kernels
from app.routing.selection.cost_kernels import OPEN_TOKENS, RUNS, Floats, Ints, Words
from app.routing.worker_rank import WorkerRank
from indexer.xxh3 import M64

INELIGIBLE = math.inf
"""The cost of an option that the policy excludes."""
NO_MULTIPLIER: Floats = np.empty(0)
"""No factors on the costs."""

_RUN_SHARE = 2.0**-20
"""Weight of an open run compared with open tokens: less than one of them, for up to a million
runs."""


class Reservations(NamedTuple):
    """The reservations of the other requests in this router, in the order of their arrival: the
    option `rows` which each is planned, -1 for none of these, and its standalone prefill in
    `prefill_ms`.
    """

    rows: Ints
    prefill_ms: Floats


NO_RESERVATIONS = Reservations(np.empty(0, np.int64), np.empty(0))


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """The candidates for a request with all inputs of a policy; one row each.

    `hashes`: see `rank_hashes`; `curves`: see `recorded_curve`. `features`: load and speed;
    `blocks`: leading blocks of the prompt cached on the device, and those to load from host and
    disk; see `cost_kernels.py`. `taint_weights`: the sum of the weights of the preferred taints
    that a place has. Only policy predictive uses `reservations`.
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
        """The options with these numbers, in this order."""
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


class RequestFeatures(msgspec.Struct, frozen=True, gc=False):
    """A request as policies see it. `prompt_tokens`: all tokens that are to be computed or loaded.

    `dispatched_count`: number of requests this router has dispatched, for policies that go in turn.
    `least_prefill_tokens`: the least of all options. `output_tokens`: expected length of its
    answer, `mean_output_tokens`: of any answer. `most_cached_tokens`: the largest number of prompt
    tokens cached at any one option; UNKNOWN if not computed yet. `expected_followups`: see
    `PerformanceModel`. Targets: the request's own, for the time to its first token and between
    tokens. `part`: of the request, see `cost_kernels.py`; `transfer_ms`: until its prompt is there.
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
    expected_followups: float = 1.0
    ttft_target_ms: float = math.inf
    itl_target_ms: float = math.inf
    part: int = cost_kernels.WHOLE
    transfer_ms: float = 0.0


class DynamoWeights(NamedTuple):
    """Settings of the `dynamo` policy, with its documented defaults."""

    overlap_score_credit: float = 1.0
    prefill_load_scale: float = 1.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    active_request_weight: float = 0.0
    overlap_decay: float = 0.0
    temperature: float = 0.0


Costs = Floats
Policy = Callable[[RequestFeatures, Candidates, DynamoWeights], Costs]


def rank_hashes(places: Sequence[WorkerRank]) -> Words:
    """Hashes of places for random draws, without their epochs."""
    return np.array([_tag(each.worker, each.rank) for each in places], np.uint64)


@lru_cache(maxsize=1 << 14)
def _tag(worker: str, rank: int) -> int:
    digest = blake2b(f"{worker}\0{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def random_u64(seed: int, tags: Words) -> Words:
    """A number below 2^64 for each place, as if drawn at random."""
    drawn = np.empty_like(tags)
    cost_kernels.draw_random(as_u64(seed), tags, drawn)
    return drawn


def as_u64(seed: int) -> Any:
    """A seed as kernels take it."""
    return np.uint64(seed & M64)


def _shares(drawn: Words) -> Floats:
    """Draws as numbers from 0 to 1, without either: 52 bits of them."""
    shares: Floats = ((drawn >> np.uint64(12)) + 0.5) / 2**52
    return shares


def dynamo(features: RequestFeatures, options: Candidates, weights: DynamoWeights) -> Costs:
    """scale · max((prefill + prompt) / B - credit, 0) + decode blocks + w · open requests.

    credit = overlap_score_credit · δ · device + host_weight · host + disk_weight · disk, with
    δ = 1 / (1 + decay · x) and x the excess of open prefill over the least loaded option, in units
    of this request. A preferred taint multiplies the cost by exp(-tanh(Σ weights)).
    Source: the KV router documentation of NVIDIA Dynamo.
    """
    costs = np.empty(len(options.features))
    worth = (weights.overlap_score_credit, weights.host_weight, weights.disk_weight)
    cost_kernels.dynamo_costs(
        options.features, options.blocks, features.prompt_tokens, features.block_size,
        weights.prefill_load_scale, weights.active_request_weight, np.array(worth),
        weights.overlap_decay / max(features.prompt_tokens, 1),
        float(features.least_prefill_tokens), costs,
    )  # fmt: skip
    return costs if options.taint_weights is None else costs * options.taint_multiplier


def least_loaded(_: RequestFeatures, options: Candidates, __: DynamoWeights) -> Costs:
    """Open tokens; a run counts less than a token."""
    costs: Costs = options.features[:, OPEN_TOKENS] + options.features[:, RUNS] * _RUN_SHARE
    return costs


def round_robin(features: RequestFeatures, options: Candidates, _: DynamoWeights) -> Costs:
    """The distance of each option from the next one in turn, by name and rank."""
    count = len(options.worker_ranks)
    order = sorted(
        range(count), key=lambda i: (options.worker_ranks[i].worker, options.worker_ranks[i].rank)
    )
    costs = np.empty(count)
    costs[order] = (np.arange(count) - features.dispatched_count) % count
    return costs


def random_choice(features: RequestFeatures, options: Candidates, _: DynamoWeights) -> Costs:
    """A random number for each option."""
    return _shares(random_u64(features.seed, options.hashes))


def power_of_two(features: RequestFeatures, options: Candidates, weights: DynamoWeights) -> Costs:
    """The load of two options drawn at random; the others are not considered."""
    two = np.argsort(random_u64(features.seed, options.hashes), kind="stable")[:2]
    costs = np.full(len(options.features), INELIGIBLE)
    costs[two] = least_loaded(features, options, weights)[two]
    return costs


def session_hash(features: RequestFeatures, options: Candidates, _: DynamoWeights) -> Costs:
    """Rendezvous hashing: a place that goes takes only its own sessions along."""
    name = blake2b((features.session or features.id).encode(), digest_size=8).digest()
    return _shares(random_u64(int.from_bytes(name, "little"), options.hashes))


POLICIES: Mapping[str, Policy] = {
    "dynamo": dynamo,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "random": random_choice,
    "power_of_two": power_of_two,
    "session_hash": session_hash,
    "direct": least_loaded,
}


def cost_range(costs: Costs) -> float:
    """The range of the costs, without excluded options."""
    finite = costs[costs < INELIGIBLE]
    return float(finite.max() - finite.min()) if len(finite) else 0.0


def choose(costs: Costs, tags: Words, seed: int, noise: float = 0.0) -> int | None:
    """The index of the chosen option; None if all are excluded.

    Without noise the least cost, ties by draw. With noise an option is chosen with a probability
    in proportion to exp(-cost / noise): by the least cost after subtracting Gumbel noise of that
    scale, which is the same and needs one draw an option.
    """
    if noise > 0:
        shares = _shares(random_u64(seed, tags)).tolist()
        costs = costs + np.array([noise * math.log(-math.log(share)) for share in shares])
    chosen: int = cost_kernels.argmin(costs, as_u64(seed), tags)
    return chosen if chosen >= 0 else None
