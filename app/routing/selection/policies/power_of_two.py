"""Policy power_of_two: the less loaded of two places drawn at random."""

from __future__ import annotations

import numpy as np

from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.choice import INELIGIBLE, random_u64
from kvlane.app.routing.selection.policies.least_loaded import open_load
from kvlane.app.routing.selection.policies.policy import Policy, Scores
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.streams.records import Assigned, Candidate


class PowerOfTwo(Policy):
    name = "power_of_two"
    unit = "tokens"
    summary = "the less loaded of two random workers"

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        two = np.argsort(random_u64(features.seed, options.hashes), kind="stable")[:2]
        costs = np.full(len(options.features), INELIGIBLE)
        costs[two] = open_load(options)[two]
        return Scores(costs)

    def terms(
        self, decision: Assigned, candidate: Candidate, scores: Scores, row: int
    ) -> dict[str, float]:
        return {"open tokens": float(candidate.open_tokens)}


POLICY = PowerOfTwo()
