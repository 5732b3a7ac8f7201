"""Policy least_loaded: open tokens, then open runs."""

from __future__ import annotations

from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.choice import Costs
from kvlane.app.routing.selection.cost_kernels import OPEN_TOKENS, RUNS
from kvlane.app.routing.selection.policies.policy import Policy, Scores
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.state.performance import EngineProfile
from kvlane.streams.records import Assigned, Candidate

_RUN_SHARE = 2.0**-20
"""Weight of an open run compared with open tokens: less than one of them, for up to a million
runs."""


def open_load(options: Candidates) -> Costs:
    """Open tokens; a run counts less than a token."""
    costs: Costs = options.features[:, OPEN_TOKENS] + options.features[:, RUNS] * _RUN_SHARE
    return costs


class LeastLoaded(Policy):
    name = "least_loaded"
    unit = "tokens"
    summary = "active tokens, then active requests"

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        return Scores(open_load(options))

    def session_tolerance(
        self, features: RequestFeatures, config: RoutingConfig, profile: EngineProfile
    ) -> float:
        return float(features.prompt_tokens)

    def terms(
        self, decision: Assigned, candidate: Candidate, scores: Scores, row: int
    ) -> dict[str, float]:
        return {"open tokens": float(candidate.open_tokens)}


POLICY = LeastLoaded()
