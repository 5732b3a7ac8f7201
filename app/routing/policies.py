"""The policies: what it costs to send a request to each place that may take it.

A policy is a function from a request and its options to one cost an option, lower being better; who
is eligible was decided before (`eligibility.py`), and how costs become a choice is decided after,
the same way for all (`pick`). Options are columns, because a policy looks at every worker.

Chance is a draw for each place, made of the request's seed and the place alone. So a decision can
be recomputed from the places that were recorded, however many others there were.

    dynamo         prefill work left plus decode work under way, in blocks, cached blocks credited:
                   the documented cost of NVIDIA Dynamo's KV router, its defaults included
    least_loaded   open tokens, then open runs
    round_robin    in turn, by name
    random         at random
    power_of_two   the less loaded of two drawn at random
    session_hash   always the same place for a session (else for the request id) while it lives
    predictive     the least cost in predicted milliseconds (`predictive.py`)
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

from app.routing import kernels
from app.routing.kernels import (
    OPEN_TOKENS,
    RUNS,
    Floats,
    Ints,
    Words,
)
from indexer.xxh3 import M64

NEVER = math.inf
"""Cost of an option that the policy does not consider."""
UNCHANGED: Floats = np.empty(0)
"""The factors on costs that stay as they are."""

_RUN_SHARE = 2.0**-20
"""What an open run weighs beside open tokens: less than one of them, for up to a million runs."""


class Place(NamedTuple):
    """A rank of one life of a worker."""

    worker: str
    epoch: int
    rank: int = 0


class Others(NamedTuple):
    """The other requests that are held in this router, in the order of their arrival: for which
    option each is planned, `at` -1 for none of these, and its prefill there, alone, in `ms`.
    """

    at: Ints
    ms: Floats


NOBODY = Others(np.empty(0, np.int64), np.empty(0))


class Options(msgspec.Struct, frozen=True, gc=False):
    """The places that may take a request, with everything a policy may look at; a row each.

    `tags`: see `tags_of`; `curves`: see `curve_of`. `spots`: what lies on each and how fast it is,
    `blocks`: leading blocks of the prompt that it holds on the device, and those it could load from
    host and disk; see `kernels.py`. `taint_weights`: the sum of the weights of those preferred
    taints that it has. Of `others` only policy predictive knows.
    """

    places: Sequence[Place]
    tags: Words
    curves: Sequence[tuple[float, ...]]
    spots: Floats
    blocks: Floats
    taint_weights: Floats | None = None
    others: Others = NOBODY

    @property
    def liking(self) -> Floats:
        """By what preferred taints multiply costs: exp(-tanh(Σ weights)); empty without any."""
        if self.taint_weights is None:
            return UNCHANGED
        return np.array([math.exp(-math.tanh(w)) for w in self.taint_weights.tolist()])

    def only(self, numbers: Ints) -> Options:
        """These of them alone, in this order."""
        position = np.full(len(self.places) + 1, -1)  # the last one is for places of other pools
        position[numbers] = np.arange(len(numbers))
        which = numbers.tolist()
        return Options(
            [self.places[i] for i in which], self.tags[numbers], [self.curves[i] for i in which],
            self.spots[numbers], self.blocks[numbers],
            None if self.taint_weights is None else self.taint_weights[numbers],
            Others(position[self.others.at], self.others.ms),
        )  # fmt: skip


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What a policy may know of a request. `prompt_tokens`: all that is to be computed or loaded.

    `turn`: how many requests this router has dispatched, for policies that go in turn.
    `least_prefill_tokens`: the least of all options. `output_tokens`: how long its answer is
    expected to be, `mean_output_tokens`: others. `most_held_tokens`: of its prompt, where most are;
    UNKNOWN before that was looked up. `leads_to`: how many requests one comes to, itself included.
    Targets: times to its first token, and from token to token, that it asks for.
    """

    id: str
    prompt_tokens: int
    block_size: int
    seed: int
    turn: int = 0
    session: str = ""
    least_prefill_tokens: int = 0
    output_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    most_held_tokens: float = 0.0
    leads_to: float = 1.0
    ttft_target_ms: float = math.inf
    itl_target_ms: float = math.inf


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
Policy = Callable[[Ask, Options, DynamoWeights], Costs]


def tags_of(places: Sequence[Place]) -> Words:
    """What tells places apart in draws; their epochs make no difference."""
    return np.array([_tag(each.worker, each.rank) for each in places], np.uint64)


@lru_cache(maxsize=1 << 14)
def _tag(worker: str, rank: int) -> int:
    digest = blake2b(f"{worker}\0{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draws(seed: int, tags: Words) -> Words:
    """A number below 2^64 for each place, as if drawn at random."""
    drawn = np.empty_like(tags)
    kernels.draw(word_of(seed), tags, drawn)
    return drawn


def word_of(seed: int) -> Any:
    """A seed as kernels take it."""
    return np.uint64(seed & M64)


def _shares(drawn: Words) -> Floats:
    """Draws as numbers from 0 to 1, without either: 52 bits of them."""
    shares: Floats = ((drawn >> np.uint64(12)) + 0.5) / 2**52
    return shares


def dynamo(ask: Ask, options: Options, weights: DynamoWeights) -> Costs:
    """scale · max((prefill + prompt) / B - credit, 0) + decode blocks + w · open requests.

    credit = overlap_score_credit · δ · device + host_weight · host + disk_weight · disk, with
    δ = 1 / (1 + decay · x) and x the excess of open prefill over the least loaded option, in units
    of this request. A preferred taint multiplies the cost by exp(-tanh(Σ weights)).
    Source: the KV router documentation of NVIDIA Dynamo.
    """
    costs = np.empty(len(options.spots))
    worth = (weights.overlap_score_credit, weights.host_weight, weights.disk_weight)
    kernels.dynamo(
        options.spots, options.blocks, ask.prompt_tokens, ask.block_size,
        weights.prefill_load_scale, weights.active_request_weight, np.array(worth),
        weights.overlap_decay / max(ask.prompt_tokens, 1), float(ask.least_prefill_tokens), costs,
    )  # fmt: skip
    return costs if options.taint_weights is None else costs * options.liking


def least_loaded(_: Ask, options: Options, __: DynamoWeights) -> Costs:
    """Open tokens; a run more counts less than a token."""
    costs: Costs = options.spots[:, OPEN_TOKENS] + options.spots[:, RUNS] * _RUN_SHARE
    return costs


def round_robin(ask: Ask, options: Options, _: DynamoWeights) -> Costs:
    """How far each option is ahead in the turn, which goes by name and rank."""
    count = len(options.places)
    order = sorted(range(count), key=lambda i: (options.places[i].worker, options.places[i].rank))
    costs = np.empty(count)
    costs[order] = (np.arange(count) - ask.turn) % count
    return costs


def at_random(ask: Ask, options: Options, _: DynamoWeights) -> Costs:
    """A draw for each option."""
    return _shares(draws(ask.seed, options.tags))


def power_of_two(ask: Ask, options: Options, weights: DynamoWeights) -> Costs:
    """The load of two options drawn at random; the others are not considered."""
    two = np.argsort(draws(ask.seed, options.tags), kind="stable")[:2]
    costs = np.full(len(options.spots), NEVER)
    costs[two] = least_loaded(ask, options, weights)[two]
    return costs


def session_hash(ask: Ask, options: Options, _: DynamoWeights) -> Costs:
    """Rendezvous hashing: a place that goes takes only its own sessions along."""
    name = blake2b((ask.session or ask.id).encode(), digest_size=8).digest()
    return _shares(draws(int.from_bytes(name, "little"), options.tags))


POLICIES: Mapping[str, Policy] = {
    "dynamo": dynamo,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "random": at_random,
    "power_of_two": power_of_two,
    "session_hash": session_hash,
    "direct": least_loaded,
}


def span(costs: Costs) -> float:
    """How far apart the costs lie, of the options that are considered."""
    finite = costs[costs < NEVER]
    return float(finite.max() - finite.min()) if len(finite) else 0.0


def pick(costs: Costs, tags: Words, seed: int, noise: float = 0.0) -> int | None:
    """The index of the chosen option; None when there is none to consider.

    Without noise the least cost, ties by draw. With noise an option is chosen with a probability
    in proportion to exp(-cost / noise): by the least cost after subtracting Gumbel noise of that
    scale, which is the same and needs one draw an option.
    """
    if noise > 0:
        shares = _shares(draws(seed, tags)).tolist()
        costs = costs + np.array([noise * math.log(-math.log(share)) for share in shares])
    chosen: int = kernels.least(costs, word_of(seed), tags)
    return chosen if chosen >= 0 else None
