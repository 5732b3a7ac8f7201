"""Policy random: a random number for each place."""

from __future__ import annotations

from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.choice import random_shares
from kvlane.app.routing.selection.policies.policy import Policy, Scores
from kvlane.app.routing.selection.routing_config import RoutingConfig


class RandomPlace(Policy):
    name = "random"
    reason = "drawn at random, by the request's seed"
    summary = "random"

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        return Scores(random_shares(features.seed, options.hashes))


POLICY = RandomPlace()
