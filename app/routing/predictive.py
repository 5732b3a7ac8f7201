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

All in columns, one number an option: a fleet of 64 takes no longer than one of 8. Each number is
made of its own option's alone, so it is the same to the bit among other options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.routing.paces import Pace
from app.routing.policies import Ask, Options

HOST_SHARE, DISK_SHARE = 0.75, 0.25
"""Of the prefill of a block, what is saved by loading it; as the `dynamo` policy has it."""
END_WAIT = 1.5
"""Answers' times until enough of a full cache is free; 1 would be if all had just begun."""


Column: TypeAlias = NDArray[np.float64]


class PredictiveWeights(NamedTuple):
    """Settings of the `predictive` policy.

    `decode_weight`: what a millisecond of decode, summed over requests, is worth in milliseconds
    to a first token. `max_hold_ms`: how long a request is held at most.
    """

    decode_weight: float = 0.01
    max_hold_ms: float = 10_000.0


class Terms(NamedTuple):
    """The cost of each option, in ms: all but `replication_ms` as they pass; see the module."""

    wait_ms: Column
    prefill_ms: Column
    stall_ms: Column
    slower_ms: Column
    decode_ms: Column
    replication_ms: Column

    @property
    def ttft_ms(self) -> Column:
        """Expected time to the first token."""
        return self.wait_ms + self.prefill_ms

    def cost_ms(self, decode_weight: float) -> Column:
        """All together."""
        decode_ms = self.stall_ms + self.slower_ms + self.decode_ms
        return self.ttft_ms + decode_weight * decode_ms + self.replication_ms


class Prediction(NamedTuple):
    """What is expected at each option. `alone_ms`: prefill of the request with nothing beside it.

    `hold_ms`: for how long the request is better held, if it is to go there; 0: it may go. Infinite
    when something has to end there first: the whole prompt and an answer would not fit into the
    cache, and the prompt would keep everything behind it waiting, in the worker. A prompt that is
    so short that sharing a step costs less than the step itself goes at once.
    """

    terms: Terms
    alone_ms: Column
    hold_ms: Column


def costs(options: Options, prediction: Prediction, weights: PredictiveWeights) -> list[float]:
    """The cost of each option; preferred taints lower it as they do in the `dynamo` policy."""
    each: list[float] = prediction.terms.cost_ms(weights.decode_weight).tolist()
    if any(options.taint_weights):
        return [
            cost * math.exp(-math.tanh(taint))
            for cost, taint in zip(each, options.taint_weights, strict=True)
        ]
    return each


def predict(ask: Ask, options: Options, weights: PredictiveWeights) -> Prediction:
    """What is expected of a request at each option."""
    spots = options.spots
    paces = _Paces([spot.pace for spot in spots])
    runs, prompts = _column(options.open_runs), _column([spot.prompt_tokens for spot in spots])
    pending = _column([spot.prefill_runs for spot in spots]) > 0
    held = held_tokens(ask, options)
    tokens = np.maximum(ask.prompt_tokens - held, 1.0)
    others, capacity = ask.mean_output_tokens, paces.capacity_tokens
    context = prompts + runs * others / 2
    step_ms = np.where(runs > 0, paces.decode_ms(context), 0.0)
    alone_ms = paces.prefill_ms(tokens, 0.0)
    left_ms = paces.prefill_ms(_column(options.prefill_tokens), step_ms)
    left_ms = np.where(pending, left_ms - _column([spot.busy_ms for spot in spots]), 0.0)
    wait_ms = np.maximum(left_ms, step_ms / 2)
    bounded = (runs > 0) & (capacity > 0)
    excess = context + ask.prompt_tokens + others - capacity
    full_ms = excess / np.maximum(context, 1.0) * others * END_WAIT * step_ms
    wait_ms += np.where(bounded & (excess > 0), full_ms, 0.0)
    for i, spot in enumerate(spots):
        if spot.ahead_ms:
            wait_ms[i] += _ahead_ms(spot.ahead_ms, float(alone_ms[i]), weights.decode_weight)
    later_ms = paces.decode_ms(context + ask.prompt_tokens + ask.output_tokens / 2)
    per_token_ms = paces.prefill_ms(paces.chunk_tokens, 0.0) / paces.chunk_tokens
    terms = Terms(
        wait_ms=wait_ms,
        prefill_ms=paces.prefill_ms(tokens, step_ms),
        stall_ms=runs * alone_ms,
        slower_ms=runs * others / 2 * (later_ms - step_ms),
        decode_ms=ask.output_tokens * later_ms,
        replication_ms=(ask.most_held_tokens - held) * per_token_ms,
    )
    fits = prompts + ask.prompt_tokens + ask.output_tokens <= capacity
    shares = paces.slowness * (paces.b * tokens - paces.c) <= step_ms
    hold_ms = np.where(~shares & (left_ms > 0), left_ms, 0.0)
    return Prediction(terms, alone_ms, np.where(bounded & ~fits, np.inf, hold_ms))


def held_tokens(ask: Ask, options: Options) -> Column:
    """Tokens of the prompt that need not be computed; those to be loaded count in part."""
    blocks = _column(options.overlap_blocks)
    if any(options.host_blocks) or any(options.disk_blocks):
        host, disk = _column(options.host_blocks), _column(options.disk_blocks)
        blocks = blocks + (HOST_SHARE * host + DISK_SHARE * disk)
    return np.minimum(blocks * ask.block_size, ask.prompt_tokens)


def _ahead_ms(ahead_ms: Sequence[float], own_ms: float, decode_weight: float) -> float:
    """The wait for those planned before: the shorter of two goes first, the other has to wait."""
    return sum([
        min(own_ms, other_ms) + decode_weight * max(own_ms, other_ms) for other_ms in ahead_ms
    ])  # fmt: skip


def _column(values: Sequence[float]) -> Column:
    return np.array(values, np.float64)


class _Paces:
    """The paces of all options; their methods as `Pace` has them, on columns."""

    def __init__(self, paces: Sequence[Pace]) -> None:
        first = paces[0].curves
        if all(pace.curves is first for pace in paces):
            a, b, c, *decode = first.numbers()
            self.a, self.b, self.c = np.float64(a), np.float64(b), np.float64(c)
            self._decode: Sequence[float | Column] = decode
        else:
            columns = np.array([pace.curves.numbers() for pace in paces]).T
            self.a, self.b, self.c, *self._decode = columns
        self.slowness = _column([pace.slowness for pace in paces])
        self.chunk_tokens = _column([pace.chunk_tokens for pace in paces])
        self.capacity_tokens = _column([pace.capacity_tokens for pace in paces])
        self._chunk_ms = self.slowness * self._step_ms(self.chunk_tokens)

    def _step_ms(self, tokens: Column) -> Column:
        return (self.a * tokens + self.b) * tokens + self.c

    def prefill_ms(self, tokens: Column, decode_ms: Column | float) -> Column:
        """As `Pace.prefill_ms`."""
        whole = np.floor(tokens / self.chunk_tokens)
        rest = tokens - whole * self.chunk_tokens
        last_ms = self.slowness * self._step_ms(rest) + decode_ms
        time_ms: Column = whole * (self._chunk_ms + decode_ms) + np.where(rest > 0, last_ms, 0.0)
        return time_ms

    def decode_ms(self, tokens: Column) -> Column:
        """As `Pace.decode_ms`; without a capacity as if the cache were empty."""
        a, b, c, floor = self._decode
        known = self.capacity_tokens > 0
        usage = np.where(known, tokens / np.where(known, self.capacity_tokens, 1.0), 0.0)
        usage = np.minimum(usage, 1.0)
        time_ms: Column = self.slowness * np.maximum((a * usage + b) * usage + c, floor)
        return time_ms
