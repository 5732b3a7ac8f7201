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
from typing import NamedTuple

from app.routing.paces import Spot

NEVER = math.inf
"""Cost of an option that the policy does not consider."""

_M64 = (1 << 64) - 1
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
_RUN_SHARE = 2.0**-20
"""What an open run weighs beside open tokens: less than one of them, for up to a million runs."""


class Place(NamedTuple):
    """A rank of one life of a worker."""

    worker: str
    epoch: int
    rank: int = 0


class Options(NamedTuple):
    """The places that may take a request, with everything a policy may look at; equal lengths.

    `overlap_blocks`: leading blocks of the prompt that a place holds on the device; `host_blocks`
    and `disk_blocks` are those it could load. `prefill_tokens`: prompt tokens of its open runs that
    are still to be computed. `open_tokens`: prompt and output tokens of its open runs.
    `taint_weights`: the sum of the weights of those preferred taints that it has. `spots`: what
    policy predictive looks at besides, empty for others.
    """

    places: Sequence[Place]
    overlap_blocks: Sequence[int]
    host_blocks: Sequence[int]
    disk_blocks: Sequence[int]
    prefill_tokens: Sequence[int]
    open_tokens: Sequence[int]
    open_runs: Sequence[int]
    taint_weights: Sequence[float]
    spots: Sequence[Spot] = ()


class Ask(NamedTuple):
    """What a policy may know of a request. `prompt_tokens`: all that is to be computed or loaded.

    `turn`: how many requests this router has dispatched, for policies that go in turn.
    `least_prefill_tokens`: the least of all options. `output_tokens`: how long its answer is
    expected to be, `mean_output_tokens`: others. `most_held_tokens`: of its prompt, where most are.
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


class DynamoWeights(NamedTuple):
    """Settings of the `dynamo` policy, with its documented defaults."""

    overlap_score_credit: float = 1.0
    prefill_load_scale: float = 1.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    active_request_weight: float = 0.0
    overlap_decay: float = 0.0
    temperature: float = 0.0


Costs = Sequence[float]
Policy = Callable[[Ask, Options, DynamoWeights], Costs]


def draws(seed: int, places: Sequence[Place]) -> list[int]:
    """A number below 2^64 for each place, as if drawn at random; epochs make no difference."""
    start = _mixed(seed & _M64)
    return [_mixed(start ^ _tag(each.worker, each.rank)) for each in places]


@lru_cache(maxsize=1 << 14)
def _tag(worker: str, rank: int) -> int:
    digest = blake2b(f"{worker}\0{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _M64
    x = ((x ^ (x >> 27)) * _MIX_2) & _M64
    return x ^ (x >> 31)


def dynamo(ask: Ask, options: Options, weights: DynamoWeights) -> Costs:
    """scale · max((prefill + prompt) / B - credit, 0) + decode blocks + w · open requests.

    credit = overlap_score_credit · δ · device + host_weight · host + disk_weight · disk, with
    δ = 1 / (1 + decay · x) and x the excess of open prefill over the least loaded option, in units
    of this request. A preferred taint multiplies the cost by exp(-tanh(Σ weights)).
    Source: the KV router documentation of NVIDIA Dynamo.
    """
    prompt, size = ask.prompt_tokens, ask.block_size
    scale, per_run = weights.prefill_load_scale, weights.active_request_weight
    costs = [
        scale * max((prefill + prompt) / size - credit, 0.0) - (-tokens // size) + per_run * runs
        for credit, prefill, tokens, runs in zip(
            _credits(ask, options, weights),
            options.prefill_tokens,
            options.open_tokens,
            options.open_runs,
            strict=True,
        )
    ]
    if any(options.taint_weights):
        return [
            cost * math.exp(-math.tanh(weight))
            for cost, weight in zip(costs, options.taint_weights, strict=True)
        ]
    return costs


def _credits(ask: Ask, options: Options, weights: DynamoWeights) -> Sequence[float]:
    """The blocks of the prompt that each option need not compute, as far as they count."""
    device = [weights.overlap_score_credit * blocks for blocks in options.overlap_blocks]
    if weights.overlap_decay:
        decay, least = weights.overlap_decay / max(ask.prompt_tokens, 1), ask.least_prefill_tokens
        device = [
            credit / (1 + decay * (prefill - least))
            for credit, prefill in zip(device, options.prefill_tokens, strict=True)
        ]
    if not any(options.host_blocks) and not any(options.disk_blocks):
        return device
    return [
        credit + weights.host_weight * host + weights.disk_weight * disk
        for credit, host, disk in zip(device, options.host_blocks, options.disk_blocks, strict=True)
    ]


def least_loaded(_: Ask, options: Options, __: DynamoWeights) -> Costs:
    """Open tokens; a run more counts less than a token."""
    return [
        tokens + runs * _RUN_SHARE
        for tokens, runs in zip(options.open_tokens, options.open_runs, strict=True)
    ]


def round_robin(ask: Ask, options: Options, _: DynamoWeights) -> Costs:
    """How far each option is ahead in the turn, which goes by name and rank."""
    count = len(options.places)
    order = sorted(range(count), key=lambda i: (options.places[i].worker, options.places[i].rank))
    costs = [0.0] * count
    for number, i in enumerate(order):
        costs[i] = float((number - ask.turn) % count)
    return costs


def at_random(ask: Ask, options: Options, _: DynamoWeights) -> Costs:
    """A draw for each option."""
    return draws(ask.seed, options.places)


def power_of_two(ask: Ask, options: Options, weights: DynamoWeights) -> Costs:
    """The load of two options drawn at random; the others are not considered."""
    drawn = draws(ask.seed, options.places)
    two = set(sorted(range(len(drawn)), key=drawn.__getitem__)[:2])
    loads = least_loaded(ask, options, weights)
    return [load if i in two else NEVER for i, load in enumerate(loads)]


def session_hash(ask: Ask, options: Options, _: DynamoWeights) -> Costs:
    """Rendezvous hashing: a place that goes takes only its own sessions along."""
    name = blake2b((ask.session or ask.id).encode(), digest_size=8).digest()
    return draws(int.from_bytes(name, "little"), options.places)


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
    finite = [cost for cost in costs if cost < NEVER]
    return max(finite) - min(finite) if finite else 0.0


def pick(costs: Costs, places: Sequence[Place], seed: int, noise: float = 0.0) -> int | None:
    """The index of the chosen option; None when there is none to consider.

    Without noise the least cost, ties by draw. With noise an option is chosen with a probability
    in proportion to exp(-cost / noise): by the least cost after subtracting Gumbel noise of that
    scale, which is the same and needs one draw an option.
    """
    low = min(costs, default=NEVER)
    if low == NEVER:
        return None
    if noise > 0:
        numbers = draws(seed, places)
        return min(
            (i for i, cost in enumerate(costs) if cost < NEVER),
            key=lambda i: (
                costs[i] + noise * math.log(-math.log(((numbers[i] >> 12) + 0.5) / 2**52))
            ),
        )
    ties = [i for i, cost in enumerate(costs) if cost == low]
    if len(ties) == 1:
        return ties[0]
    numbers = draws(seed, [places[i] for i in ties])
    return ties[numbers.index(min(numbers))]


def _gumbel(number: int) -> float:
    """A draw as a value of the Gumbel distribution; 52 bits of it, so that none becomes 0 or 1."""
    return -math.log(-math.log(((number >> 12) + 0.5) / 2**52))
