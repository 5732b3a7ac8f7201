"""Policy dynamo: the documented cost of NVIDIA Dynamo's KV router, its defaults included.

Prefill work left plus decode work under way, in blocks, cached blocks credited:

    scale · max((prefill + prompt) / B - credit, 0) + decode blocks + w · open requests

with credit = overlap_score_credit · δ · device + host_weight · host + disk_weight · disk,
δ = 1 / (1 + decay · x) and x the excess of open prefill over the least loaded option, in units
of this request. A preferred taint multiplies the cost by exp(-tanh(Σ weights)).
Source: the KV router documentation of NVIDIA Dynamo.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.choice import cost_range
from kvlane.app.routing.selection.policies.policy import Policy, Scores, taint_term
from kvlane.app.routing.selection.routing_config import DynamoWeights, RoutingConfig
from kvlane.app.routing.state.performance import EngineProfile
from kvlane.streams.records import Assigned, Candidate


class Dynamo(Policy):
    name = "dynamo"
    has_cost_settings = True
    unit = "blocks"
    summary = (
        "the documented cost of NVIDIA Dynamo's KV router: prefill and decode load in blocks, "
        "cached blocks credited (`KVLANE_OVERLAP_SCORE_CREDIT`, `KVLANE_HOST_CACHE_WEIGHT`, "
        "`KVLANE_DISK_CACHE_WEIGHT`, `KVLANE_OVERLAP_DECAY`, `KVLANE_PREFILL_LOAD_SCALE`, "
        "`KVLANE_ACTIVE_REQUEST_WEIGHT`, `KVLANE_ROUTER_TEMPERATURE`)"
    )

    def features(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> RequestFeatures:
        if not config.weights.overlap_decay:
            return features
        least = int(options.features[:, cost_kernels.PREFILL_TOKENS].min())
        return replace(features, least_prefill_tokens=least)

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        weights, costs = config.weights, np.empty(len(options.features))
        worth = (weights.overlap_score_credit, weights.host_weight, weights.disk_weight)
        cost_kernels.dynamo_costs(
            options.features, options.blocks, features.prompt_tokens, features.block_size,
            weights.prefill_load_scale, weights.active_request_weight, np.array(worth),
            weights.overlap_decay / max(features.prompt_tokens, 1),
            float(features.least_prefill_tokens), costs,
        )  # fmt: skip
        if options.taint_weights is not None:
            costs *= options.taint_multiplier
        return Scores(costs)

    def params(
        self, features: RequestFeatures, config: RoutingConfig, scores: Scores
    ) -> dict[str, float]:
        params: dict[str, float] = config.weights._asdict()
        if config.weights.overlap_decay:
            params["least_prefill_tokens"] = features.least_prefill_tokens
        if config.weights.temperature:
            params["span"] = cost_range(scores.costs)
        return params

    def session_tolerance(
        self, features: RequestFeatures, config: RoutingConfig, profile: EngineProfile
    ) -> float:
        return config.weights.prefill_load_scale * features.prompt_tokens / features.block_size

    def terms(
        self, decision: Assigned, candidate: Candidate, scores: Scores, row: int
    ) -> dict[str, float]:
        size, weight = decision.block_size, candidate.taint_weight
        params = DynamoWeights()._asdict() | decision.params
        decode = float(-(-candidate.open_tokens // size))
        requests = params["active_request_weight"] * candidate.open_runs
        waiting = params["prefill_load_scale"] * candidate.prefill_tokens / size
        untainted = candidate.cost / (math.exp(-math.tanh(weight)) if weight else 1.0)
        own = untainted - decode - requests - waiting
        terms = {"waiting prefill": waiting, "own prefill": own, "decode": decode, "runs": requests}
        return terms | taint_term(candidate, terms)
