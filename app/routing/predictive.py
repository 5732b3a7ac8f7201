"""Policy `predictive`: what a request costs at a place in milliseconds, and when it may go there.

    cost = wait + own prefill
         + decode_weight · (stall of the others' decode + slower steps for them + f · own decode)
         + what comes later + replication / f

Waiting is done in the router, since a request in a worker's queue can no longer change its mind:
who is planned for a place stays here until it is predicted free. Who goes first then is `held.py`'s
to say. A request is planned knowing what all others here have in mind: what two of them cost each
other at one place counts for both, so each plan that is made anew lowers the sum. (With those that
came before it alone, of many at once the last ones had to take what was left: 8 workers, mean E2E
2749 ms for 2699, p99 TTFT 1683 for 1648.) Everything is a function of the arguments; without
knowledge of caches it comes to the least load in predicted milliseconds.

With L tokens of prompt, n of them to be computed here (at least one) and N not on the device here,
o tokens of answer, O the mean answer, C the capacity, t = prompts there + runs · O / 2 the tokens
in the cache, d(x) a step of decode at x tokens (d = d(t), or 0 where nothing runs), and f the
requests that one leads to, itself included (`Paces.leads_to`): they come to the same place, and
find it as it is left:

    wait         what is left of the prefill there, but no less than half a step
                 + (t + N + O - C) / t · 1.5 · O · d, if that is positive and something runs
                 + Σ min(own, other) + decode_weight · max(own, other) over those planned before
    own prefill  n tokens in chunks, each with d beside it
    stall        runs · (n tokens in chunks, alone)
    slower       runs · O / 2 · (d(t + L + o / 2) - d)
    own decode   o · d(t + L + o / 2)
    later        (f - 1) · 1.5 · d(t + L + o / 2): each of them waits for half a step, and has one
                 beside its prefill
    replication  tokens that another place has and this one has not, at the price of a full chunk;
                 where much comes again, a second copy is soon worth its room

What the cache has of a prompt needs no more room (N, not L): t counts what runs share as often as
they use it. Where nobody else uses it, the cache is fuller than it seems; but to wait for room that
is there costs more. Agents with tools, on three workers with room for a few of their prompts: mean
TTFT 775 ms with L, 248 with N (simulated; policy dynamo: 457).

The sums are done by `kernels.py`, one number an option, each made of its own option's alone: so it
is the same to the bit among other options.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from app.routing import kernels
from app.routing.kernels import FOUND, Floats
from app.routing.policies import Ask, Options, word_of


class PredictiveWeights(NamedTuple):
    """Settings of the `predictive` policy.

    `decode_weight`: what a millisecond of decode, summed over requests, is worth in milliseconds
    to a first token. `max_hold_ms`: how long a request is held at most.
    """

    decode_weight: float = 0.01
    max_hold_ms: float = 10_000.0


class Terms(NamedTuple):
    """The cost of each option, in ms: all but `replication_ms` as they pass; see the module."""

    wait_ms: Floats
    prefill_ms: Floats
    stall_ms: Floats
    slower_ms: Floats
    decode_ms: Floats
    replication_ms: Floats

    @property
    def ttft_ms(self) -> Floats:
        """Expected time to the first token."""
        return self.wait_ms + self.prefill_ms


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """What is expected at each option: `found`, in columns named in `kernels.py`, and its cost.

    Preferred taints lower costs as they do in the `dynamo` policy. An option that is expected to
    miss a target of the request costs `MISSED_MS` more. `best`: the option to choose, as
    `pick` has it; `most_held_tokens`: see `Ask`.
    """

    found: Floats
    costs: Floats
    best: int | None
    most_held_tokens: float

    @property
    def terms(self) -> Terms:
        """What costs are made of."""
        return Terms(*self.found[:, : kernels.ALONE].T)

    @property
    def alone_ms(self) -> Floats:
        """Prefill of the request with nothing beside it."""
        return self.found[:, kernels.ALONE]

    @property
    def hold_ms(self) -> Floats:
        """For how long the request is better held, if it is to go there; 0: it may go.

        Infinite when something has to end there first: what the cache has not of the prompt, and an
        answer, would not fit, and would keep everything behind it waiting, in the worker. A prompt
        that is so short that sharing a step costs less than the step itself goes at once.
        """
        return np.maximum(self.found[:, kernels.HOLD], 0.0)


def predict(ask: Ask, options: Options, weights: PredictiveWeights) -> Prediction:
    """What is expected of a request at each option."""
    size = len(options.spots)
    found, costs = np.empty((size, FOUND)), np.empty(size)
    best, most = kernels.predict(
        options.spots, options.blocks, options.liking, *options.others,
        float(ask.block_size), float(ask.prompt_tokens), ask.output_tokens, ask.mean_output_tokens,
        ask.most_held_tokens, ask.leads_to, weights.decode_weight, ask.ttft_target_ms,
        ask.itl_target_ms, word_of(ask.seed), options.tags, found, costs,
    )  # fmt: skip
    return Prediction(found, costs, best if best >= 0 else None, most)
