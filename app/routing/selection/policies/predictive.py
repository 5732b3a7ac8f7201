"""Policy `predictive`: the cost of a request at a place in milliseconds, and when it may go there.

    cost = wait + own prefill + delay
         + decode_weight · (stall of the others' decode + slower steps for them + g · own decode
                            + usual load)
         + what comes later + replication / f + balance

A request planned for a place stays in the router until that is predicted free, unless it shares a
step, since one in a worker's queue can no longer be moved. It is planned with the reservations of
all others here, which count the delay that two of them cause each other for both, so each new plan
lowers the sum. Everything is a function of the arguments; without knowledge of caches it comes to
the least load in predicted milliseconds.

With L tokens of prompt, n of them to be computed here (at least one) and N not on the device here,
o tokens of answer, O the mean answer, C the capacity, t = prompts there + runs · O / 2 the tokens
in the cache, U their mean of the last 15 s (`PerformanceModel.usual_load`), d(x) a step of decode
at x tokens (d = d(t), or 0 where nothing runs), and f the requests that one leads to, itself
included (`PerformanceModel.expected_followups`): they come to the same place, and find it as it is
left:

    wait         what is left of the step under way, but no less than half a step of decode; where
                 prompts came during a step of decode, by the chance that theirs has begun
                 + for the prompts that came since it began: by how much they make the step longer
                 that the request shares with them, else their steps
                 + a step of the batch runs there, if any (`batch_runs.batch_delay_ms`)
                 + (t + N + O - C) / t · 1.5 · O · d, if that is positive and something runs
                 + Σ min(own, other) + decode_weight · max(own, other) over those planned before,
                 or own + other - 2 · (constant part of a step) in one step, if that is less
    own prefill  n tokens in chunks, each with d beside it
    delay        by how much it makes the shared step longer, for each prompt in its last chunk
    stall        0.7 · runs · (n tokens in chunks, alone; or by how much it makes that longer)
    slower       g · runs · o · (d(t + L + o / 2) - d): as many as now, since others come where runs
                 end; g = min(f, 2): the request, and the next one, find the load as it is left
    own decode   o · d(t + L + o / 2)
    usual load   (f - 1) · o · (d(U + L + o / 2) - d(L + o / 2)): by how much the usual load makes
                 the decode of later requests longer. Runs of the moment end, and the next ones of
                 their sessions come here too
    later        (f - 1) · 1.5 · d(t + L + o / 2): each of them waits for half a step, and has one
                 beside its prefill
    replication  tokens that another place has and this one has not, at the price of a full chunk;
                 where much comes again, a second copy is soon worth its room
    balance      up to half of a step (its constant part and d), for as many runs as a tenth more
                 than at the place with the fewest: when a step ends is not known more exactly.
                 Else equal requests in a row go where a step ends first. Of equal costs the place
                 with the least U gets the request, so such requests go in turn

A prompt shares a step if its tokens take less time there than the constant part of another step and
the decode in that. A step with prompts ends with their first tokens, and the next one begins.

The cached part of a prompt needs no more room (N, not L): t counts shared blocks as often as runs
use them. Where no other run uses them, the cache is fuller than it seems, but waiting for space
that is in fact free costs more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.choice import as_u64
from kvlane.app.routing.selection.cost_kernels import MISSED_TARGET_MS, RESULTS, Floats
from kvlane.app.routing.selection.policies.policy import MISSED_TARGET, Policy, Scores, taint_term
from kvlane.app.routing.selection.routing_config import PredictiveWeights, RoutingConfig
from kvlane.app.routing.state.performance import EngineProfile
from kvlane.streams.records import Assigned, Candidate


class CostTerms(NamedTuple):
    """The cost of each option, in ms: all but `replication_ms` as they pass; see the module."""

    wait_ms: Floats
    prefill_ms: Floats
    decode_stall_ms: Floats
    decode_slowdown_ms: Floats
    decode_ms: Floats
    replication_ms: Floats
    delay_ms: Floats
    usual_ms: Floats


class Prediction(Scores, frozen=True, gc=False):
    """The prediction for each option: `results`, in columns named in `cost_kernels.py`, and its
    cost. Preferred taints lower costs as in policy `dynamo`. An option that is expected to miss a
    target of the request costs `MISSED_TARGET_MS` more. `best`: the option to choose."""

    results: Floats

    @property
    def terms(self) -> CostTerms:
        return CostTerms(*self.results[:, : cost_kernels.STANDALONE].T)

    @property
    def hold_ms(self) -> Floats:
        """For how long holding the request pays, if it is to go there; 0: it may go. Infinite if a
        run has to end there first: the uncached prompt and an answer would not fit, and would block
        all requests behind."""
        return np.maximum(self.results[:, cost_kernels.HOLD], 0.0)


def predict(
    features: RequestFeatures, options: Candidates, weights: PredictiveWeights
) -> Prediction:
    size = len(options.features)
    found, costs = np.empty((size, RESULTS)), np.empty(size)
    best, most, least_runs = cost_kernels.predict_costs(
        options.features, options.blocks, options.taint_multiplier, *options.reservations,
        float(features.block_size), float(features.prompt_tokens), features.output_tokens,
        features.mean_output_tokens, features.most_cached_tokens, features.least_runs,
        features.expected_followups, weights.decode_weight, features.part, features.transfer_ms,
        features.ttft_target_ms, features.itl_target_ms,
        as_u64(features.seed), options.hashes, found, costs,
    )  # fmt: skip
    return Prediction(costs, found, best if best >= 0 else None, most, least_runs)


def recorded_params(features: RequestFeatures, weights: PredictiveWeights) -> dict[str, float]:
    """The settings and estimates that the costs depend on, as recorded."""
    params: dict[str, float] = {
        "decode_weight": weights.decode_weight,
        "max_hold_ms": weights.max_hold_ms,
        "output_tokens": features.output_tokens,
        "mean_output_tokens": features.mean_output_tokens,
        "leads_to": features.expected_followups,
    }
    if features.part != cost_kernels.WHOLE:
        params["part"] = features.part
    if features.part == cost_kernels.DECODE_PART:
        params["transfer_ms"] = features.transfer_ms
    if features.ttft_target_ms < math.inf:
        params["ttft_target_ms"] = features.ttft_target_ms
    if features.itl_target_ms < math.inf:
        params["itl_target_ms"] = features.itl_target_ms
    return params


LATER_TERM = "later requests, balance"
"""The rest of the cost: the load that later requests find, and the difference in runs."""


class Predictive(Policy):
    name = "predictive"
    unit = "ms"
    summary = (
        "predicted milliseconds; may queue a request for a busy worker, up to "
        "`KVLANE_MAX_QUEUE_WAIT_S`"
    )

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Prediction:
        return predict(features, options, config.predictive_weights)

    def params(
        self, features: RequestFeatures, config: RoutingConfig, scores: Scores
    ) -> dict[str, float]:
        params = recorded_params(features, config.predictive_weights)
        params["most_held_tokens"] = scores.most_cached_tokens
        if features.part == cost_kernels.WHOLE:
            params["least_runs"] = scores.least_runs
        return params

    def session_tolerance(
        self, features: RequestFeatures, config: RoutingConfig, profile: EngineProfile
    ) -> float:
        return profile.prefill_ms(features.prompt_tokens)

    def terms(
        self, decision: Assigned, candidate: Candidate, scores: Scores, row: int
    ) -> dict[str, float]:
        assert isinstance(scores, Prediction), "it has a forecast"
        weight = decision.params.get("decode_weight", PredictiveWeights().decode_weight)
        is_received = decision.params.get("part") == cost_kernels.DECODE_PART
        each = scores.terms
        terms = {
            "wait": float(each.wait_ms[row]),
            "transfer" if is_received else "prefill": float(each.prefill_ms[row]),
            "stall": float(each.decode_stall_ms[row]) * weight,
            "slower": float(each.decode_slowdown_ms[row]) * weight,
            "decode": float(each.decode_ms[row]) * weight,
            "replication": float(each.replication_ms[row]),
            "delay": float(each.delay_ms[row]),
            "usual load": float(each.usual_ms[row]) * weight,
        }
        if candidate.cost - sum(terms.values()) > MISSED_TARGET_MS / 2:
            terms[MISSED_TARGET] = MISSED_TARGET_MS
        if candidate.taint_weight:
            return terms | taint_term(candidate, terms)
        return terms | {LATER_TERM: candidate.cost - sum(terms.values())}
