"""Policy random: a random number for each place."""

from __future__ import annotations

from app.routing.selection.candidates import Candidates
from app.routing.selection.choice import random_shares
from app.routing.selection.policies.policy import Policy, Scores
from app.routing.selection.request_features import RequestFeatures
from app.routing.selection.routing_config import RoutingConfig


class RandomPlace(Policy):
    """Policy random."""

    name = "random"
    reason = "drawn at random, by the request's seed"
    summary = "random"

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        return Scores(random_shares(features.seed, options.hashes))


POLICY = RandomPlace()
