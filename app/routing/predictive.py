"""Policy `predictive`: what a request costs at a place in milliseconds, and when it may go there.

    cost = wait + own prefill
         + decode_weight · (stall of the others' decode + slower steps for them + own decode)
         + replication

Waiting is done in the router, since a request in a worker's queue can no longer change its mind:
places are planned in the order of arrival (`Spot.ahead_ms` is what earlier ones have planned), and
who is planned for a place stays here until it is predicted free. Who goes first then is `held.py`'s
to say. Everything is a function of the arguments; without knowledge of caches it comes to the least
load in predicted milliseconds.

With L tokens of prompt, n of them to be computed here (at least one), o tokens of answer, O the
mean answer, C the capacity, t = prompts there + runs · O / 2 the tokens in the cache, and d(x) a
step of decode at x tokens (d = d(t), or 0 where nothing runs):

    wait         what is left of the prefill there, but no less than half a step
                 + (t + L + O - C) / t · 1.5 · O · d, if that is positive and something runs
                 + Σ min(own, other) + decode_weight · max(own, other) over those planned before
    own prefill  n tokens in chunks, each with d beside it
    stall        runs · (n tokens in chunks, alone)
    slower       runs · O / 2 · (d(t + L + o / 2) - d)
    own decode   o · d(t + L + o / 2)
    replication  tokens that another place has and this one has not, at the price of a full chunk
"""

from __future__ import annotations

import math
from typing import NamedTuple

from app.routing.policies import Ask, Costs, Options

HOST_SHARE, DISK_SHARE = 0.75, 0.25
"""Of the prefill of a block, what is saved by loading it; as the `dynamo` policy has it."""
SHORTEST_HOLD_MS = 0.5
"""A hold that ends at once is none: whoever holds looks again later than now."""
END_WAIT = 1.5
"""Answers' times until enough of a full cache is free; 1 would be if all had just begun."""


class PredictiveWeights(NamedTuple):
    """Settings of the `predictive` policy.

    `decode_weight`: what a millisecond of decode, summed over requests, is worth in milliseconds
    to a first token. `max_hold_ms`: how long a request is held at most.
    """

    decode_weight: float = 0.01
    max_hold_ms: float = 10_000.0


class Terms(NamedTuple):
    """The cost of an option, in ms: all but `replication_ms` as they pass; see the module."""

    wait_ms: float
    prefill_ms: float
    stall_ms: float
    slower_ms: float
    decode_ms: float
    replication_ms: float

    @property
    def ttft_ms(self) -> float:
        """Expected time to the first token."""
        return self.wait_ms + self.prefill_ms

    def cost_ms(self, decode_weight: float) -> float:
        """All together."""
        decode_ms = self.stall_ms + self.slower_ms + self.decode_ms
        return self.ttft_ms + decode_weight * decode_ms + self.replication_ms


def costs(ask: Ask, options: Options, weights: PredictiveWeights) -> Costs:
    """The cost of each option; preferred taints lower it as they do in the `dynamo` policy."""
    weight = weights.decode_weight
    each = [terms(ask, options, i, weight).cost_ms(weight) for i in range(len(options.places))]
    if any(options.taint_weights):
        return [
            cost * math.exp(-math.tanh(taint))
            for cost, taint in zip(each, options.taint_weights, strict=True)
        ]
    return each


def terms(ask: Ask, options: Options, i: int, decode_weight: float) -> Terms:
    """The cost of an option, term by term."""
    spot, runs = options.spots[i], options.open_runs[i]
    pace, waiting_tokens = spot.pace, options.prefill_tokens[i]
    held = _held(ask, options, i)
    tokens = max(ask.prompt_tokens - held, 1)
    others = ask.mean_output_tokens
    context = spot.prompt_tokens + runs * others / 2
    step_ms = pace.decode_ms(context) if runs else 0.0
    alone_ms = pace.prefill_ms(tokens)
    wait_ms = step_ms / 2
    if spot.prefill_runs:
        wait_ms = max(pace.prefill_ms(waiting_tokens, step_ms) - spot.busy_ms, wait_ms)
    excess = context + ask.prompt_tokens + others - pace.capacity_tokens
    if runs and pace.capacity_tokens and excess > 0:
        wait_ms += excess / max(context, 1) * others * END_WAIT * step_ms
    for other_ms in spot.ahead_ms:
        shorter, longer = (alone_ms, other_ms) if alone_ms < other_ms else (other_ms, alone_ms)
        wait_ms += shorter + decode_weight * longer
    later_ms = pace.decode_ms(context + ask.prompt_tokens + ask.output_tokens / 2)
    chunk = pace.chunk_tokens
    return Terms(
        wait_ms=wait_ms,
        prefill_ms=pace.prefill_ms(tokens, step_ms),
        stall_ms=runs * alone_ms,
        slower_ms=runs * others / 2 * (later_ms - step_ms) if runs else 0.0,
        decode_ms=ask.output_tokens * later_ms,
        replication_ms=(ask.most_held_tokens - held) * pace.prefill_ms(chunk) / chunk,
    )


def most_held(ask: Ask, options: Options) -> float:
    """Tokens of the prompt that need not be computed where most of them are."""
    return max(_held(ask, options, i) for i in range(len(options.places)))


def prefill_alone_ms(ask: Ask, options: Options, i: int) -> float:
    """What the request's prefill takes at a place, with nothing beside it."""
    return options.spots[i].pace.prefill_ms(max(ask.prompt_tokens - _held(ask, options, i), 1))


def hold_ms(ask: Ask, options: Options, i: int) -> float:
    """For how long a request that is planned for a place is better held; 0: it may go.

    Infinite when something has to end there first: the whole prompt and an answer would not fit
    into the cache, and the prompt would keep everything behind it waiting, in the worker. A prompt
    that is so short that sharing a step costs less than the step itself goes at once.
    """
    spot, runs = options.spots[i], options.open_runs[i]
    pace = spot.pace
    fits = spot.prompt_tokens + ask.prompt_tokens + ask.output_tokens <= pace.capacity_tokens
    if runs and pace.capacity_tokens and not fits:
        return math.inf
    if not spot.prefill_runs:
        return 0.0
    step_ms = pace.decode_ms(spot.prompt_tokens + runs * ask.mean_output_tokens / 2)
    tokens = max(ask.prompt_tokens - _held(ask, options, i), 1)
    _, per_token_ms, per_step_ms = pace.curves.prefill
    if pace.slowness * per_token_ms * tokens <= pace.slowness * per_step_ms + step_ms:
        return 0.0
    left_ms = pace.prefill_ms(options.prefill_tokens[i], step_ms) - spot.busy_ms
    return max(left_ms, SHORTEST_HOLD_MS) if left_ms > 0 else 0.0


def _held(ask: Ask, options: Options, i: int) -> float:
    """Tokens of the prompt that need not be computed at a place; those to be loaded in part."""
    blocks = options.overlap_blocks[i] + (
        HOST_SHARE * options.host_blocks[i] + DISK_SHARE * options.disk_blocks[i]
    )
    return min(blocks * ask.block_size, ask.prompt_tokens)
