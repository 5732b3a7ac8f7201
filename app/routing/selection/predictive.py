"""Policy `predictive`: the cost of a request at a place in milliseconds, and when it may go there.

    cost = wait + own prefill
         + decode_weight · (stall of the others' decode + slower steps for them + f · own decode)
         + what comes later + replication / f

Requests wait in the router, since one in a worker's queue can no longer be moved: a request planned
for a place stays here until that is predicted free; the order is that of `pending.py`. A request is
planned with the reservations of all others here: the delay that two of them cause each other at one
place counts for both, so each new plan lowers the sum. (With those that
came before it alone, of many at once the last ones had to take what was left: 8 workers, mean E2E
2749 ms for 2699, p99 TTFT 1683 for 1648.) Everything is a function of the arguments; without
knowledge of caches it comes to the least load in predicted milliseconds.

With L tokens of prompt, n of them to be computed here (at least one) and N not on the device here,
o tokens of answer, O the mean answer, C the capacity, t = prompts there + runs · O / 2 the tokens
in the cache, d(x) a step of decode at x tokens (d = d(t), or 0 where nothing runs), and f the
requests that one leads to, itself included (`PerformanceModel.expected_followups`): they come to
the same place, and find it as it is left:

    wait         what is left of the prefill there, but no less than half a step
                 + a step of the batch runs there, if any (`batch_runs.batch_delay_ms`)
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

The cached part of a prompt needs no more room (N, not L): t counts shared blocks as often as runs
use them. Where no other run uses them, the cache is fuller than it seems; but to wait for room that
is there costs more. Agents with tools, on three workers with room for a few of their prompts: mean
TTFT 775 ms with L, 248 with N (simulated; policy dynamo: 457).

The sums are done by `cost_kernels.py`, one number an option, each made of its own option's alone:
so it is the same to the bit among other options.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from app.routing.selection import cost_kernels
from app.routing.selection.cost_kernels import RESULTS, Floats
from app.routing.selection.policies import Candidates, RequestFeatures, as_u64


class PredictiveWeights(NamedTuple):
    """Settings of the `predictive` policy.

    `decode_weight`: the value of a millisecond of decode, summed over requests, in milliseconds
    to a first token. `max_hold_ms`: how long a request is held at most
    (KVLANE_MAX_QUEUE_WAIT_S).
    """

    decode_weight: float = 0.01
    max_hold_ms: float = 10_000.0


class CostTerms(NamedTuple):
    """The cost of each option, in ms: all but `replication_ms` as they pass; see the module."""

    wait_ms: Floats
    prefill_ms: Floats
    decode_stall_ms: Floats
    decode_slowdown_ms: Floats
    decode_ms: Floats
    replication_ms: Floats

    @property
    def ttft_ms(self) -> Floats:
        """Expected time to the first token."""
        return self.wait_ms + self.prefill_ms


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """The prediction for each option: `results`, in columns named in `cost_kernels.py`, and its
    cost.

    Preferred taints lower costs as they do in the `dynamo` policy. An option that is expected to
    miss a target of the request costs `MISSED_TARGET_MS` more. `best`: the option to choose, as
    `choose` has it; `most_cached_tokens`: see `RequestFeatures`.
    """

    results: Floats
    costs: Floats
    best: int | None
    most_cached_tokens: float

    @property
    def terms(self) -> CostTerms:
        return CostTerms(*self.results[:, : cost_kernels.STANDALONE].T)

    @property
    def hold_ms(self) -> Floats:
        """For how long holding the request pays, if it is to go there; 0: it may go.

        Infinite if a run has to end there first: the uncached part of the prompt and an answer
        would not fit, and would block all requests behind it in the worker. A prompt so short that
        sharing a step costs less than the step itself goes at once.
        """
        return np.maximum(self.results[:, cost_kernels.HOLD], 0.0)


def predict(
    features: RequestFeatures, options: Candidates, weights: PredictiveWeights
) -> Prediction:
    """Predict the cost of a request at each option."""
    size = len(options.features)
    found, costs = np.empty((size, RESULTS)), np.empty(size)
    best, most = cost_kernels.predict_costs(
        options.features, options.blocks, options.taint_multiplier, *options.reservations,
        float(features.block_size), float(features.prompt_tokens), features.output_tokens,
        features.mean_output_tokens, features.most_cached_tokens, features.expected_followups,
        weights.decode_weight, features.part, features.transfer_ms,
        features.ttft_target_ms, features.itl_target_ms,
        as_u64(features.seed), options.hashes, found, costs,
    )  # fmt: skip
    return Prediction(found, costs, best if best >= 0 else None, most)
