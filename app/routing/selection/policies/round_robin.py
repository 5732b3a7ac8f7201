"""Policy round_robin: the places in turn, by name and rank."""

from __future__ import annotations

import numpy as np

from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.policies.policy import Policy, Scores
from kvlane.app.routing.selection.routing_config import RoutingConfig


class RoundRobin(Policy):
    """Policy round_robin. A turn is recorded as its cost, since no decision records the turns."""

    name = "round_robin"
    unit = "turns"
    reason = "next in round-robin order"
    summary = "workers in turn, by name"
    recomputes_costs = False

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        """The distance of each candidate from the next one in turn."""
        ranks, count = options.worker_ranks, len(options.worker_ranks)
        order = sorted(range(count), key=lambda i: (ranks[i].worker, ranks[i].rank))
        costs = np.empty(count)
        costs[order] = (np.arange(count) - features.dispatched_count) % count
        return Scores(costs)


POLICY = RoundRobin()
