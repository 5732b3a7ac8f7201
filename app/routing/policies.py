"""The policies: what it costs to send a request to each worker that may take it.

A policy is a function from a request and its options to one cost an option, lower being better; who
is eligible was decided before (`plan.py`), and how costs become a choice is decided after, the same
way for all (`pick`). So every decision can be recorded and recomputed from its inputs.

    dynamo         prefill work left plus decode work under way, in blocks, cached blocks credited:
                   the documented cost of NVIDIA Dynamo's KV router, its defaults included
    least_loaded   open tokens, then open runs
    round_robin    in turn, by name
    random         at random
    power_of_two   the less loaded of two drawn at random
    session_hash   always the same worker for a session (else for the request id) while it lives
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

NEVER = math.inf
"""Cost of an option that the policy does not consider."""


class Option(NamedTuple):
    """A worker's rank that may take a request, with everything a policy may look at.

    `overlap_blocks`: leading blocks of the prompt that it holds on the device; `host_blocks` and
    `disk_blocks` are those it could load. `prefill_tokens`: prompt tokens of its open runs that are
    still to be computed. `open_tokens`: prompt and output tokens of its open runs.
    """

    worker: str
    epoch: int
    rank: int = 0
    overlap_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    prefill_tokens: int = 0
    open_tokens: int = 0
    open_runs: int = 0
    taint_weight: float = 0.0
    """Sum of the weights of the request's preferred taints that this worker has."""


class Ask(NamedTuple):
    """What a policy may know of a request."""

    id: str
    prompt_tokens: int
    block_size: int
    turn: int = 0
    """How many requests this router has dispatched, for policies that go in turn."""
    session: str = ""


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
Policy = Callable[[Ask, Sequence[Option], random.Random], Costs]


def dynamo(weights: DynamoWeights) -> Policy:
    """scale · max((prefill + prompt) / B - credit, 0) + decode blocks + w · open requests.

    credit = overlap_score_credit · δ · device + host_weight · host + disk_weight · disk, with
    δ = 1 / (1 + decay · x) and x the excess of open prefill over the least loaded option, in units
    of this request. A preferred taint multiplies the cost by exp(-tanh(Σ weights)).
    Source: the KV router documentation of NVIDIA Dynamo.
    """

    def costs(ask: Ask, options: Sequence[Option], _: random.Random) -> Costs:
        least = min((o.prefill_tokens for o in options), default=0)
        return [_dynamo_cost(weights, ask, o, least) for o in options]

    return costs


def _dynamo_cost(weights: DynamoWeights, ask: Ask, option: Option, least_prefill: int) -> float:
    excess = (option.prefill_tokens - least_prefill) / max(ask.prompt_tokens, 1)
    decay = 1 / (1 + weights.overlap_decay * excess)
    credit = (
        weights.overlap_score_credit * decay * option.overlap_blocks
        + weights.host_weight * option.host_blocks
        + weights.disk_weight * option.disk_blocks
    )
    prefill_blocks = (option.prefill_tokens + ask.prompt_tokens) / ask.block_size
    decode_blocks = math.ceil(option.open_tokens / ask.block_size)
    cost = (
        weights.prefill_load_scale * max(prefill_blocks - credit, 0.0)
        + decode_blocks
        + weights.active_request_weight * option.open_runs
    )
    return cost * math.exp(-math.tanh(option.taint_weight))


def least_loaded(_: Ask, options: Sequence[Option], __: random.Random) -> Costs:
    """Open tokens; a run more counts as much as a token less than one."""
    most = max((o.open_runs for o in options), default=0) + 1
    return [o.open_tokens + o.open_runs / most for o in options]


def round_robin(ask: Ask, options: Sequence[Option], _: random.Random) -> Costs:
    """How far each option is ahead in the turn, which goes by name and rank."""
    order = sorted(range(len(options)), key=lambda i: (options[i].worker, options[i].rank))
    place = {i: n for n, i in enumerate(order)}
    return [float((place[i] - ask.turn) % len(options)) for i in range(len(options))]


def at_random(_: Ask, options: Sequence[Option], rng: random.Random) -> Costs:
    """A draw for each option."""
    return [rng.random() for _ in options]


def power_of_two(ask: Ask, options: Sequence[Option], rng: random.Random) -> Costs:
    """The load of two options drawn at random; the others are not considered."""
    drawn = set(rng.sample(range(len(options)), min(2, len(options))))
    loads = least_loaded(ask, options, rng)
    return [load if i in drawn else NEVER for i, load in enumerate(loads)]


def session_hash(ask: Ask, options: Sequence[Option], _: random.Random) -> Costs:
    """Rendezvous hashing: a worker that goes takes only its own sessions along."""
    name = ask.session or ask.id
    return [_rendezvous(name, o.worker, o.rank) for o in options]


def _rendezvous(name: str, worker: str, rank: int) -> float:
    digest = blake2b(f"{name}\0{worker}\0{rank}".encode(), digest_size=7).digest()
    return float(int.from_bytes(digest, "big"))


POLICIES: Mapping[str, Policy] = {
    "dynamo": dynamo(DynamoWeights()),
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "random": at_random,
    "power_of_two": power_of_two,
    "session_hash": session_hash,
}


def pick(costs: Costs, rng: random.Random, temperature: float = 0.0) -> int | None:
    """The place of the chosen option; None when there is none to consider.

    Temperature 0: the least cost, ties drawn at random. Above: drawn with weights
    exp(-cost / ((max - min) · temperature)).
    """
    finite = [i for i, cost in enumerate(costs) if cost < NEVER]
    if not finite:
        return None
    low = min(costs[i] for i in finite)
    high = max(costs[i] for i in finite)
    if temperature <= 0 or high == low:
        return rng.choice([i for i in finite if temperature > 0 or costs[i] == low])
    scale = (high - low) * temperature
    return rng.choices(finite, [math.exp((low - costs[i]) / scale) for i in finite])[0]
