"""A routing policy: the cost of each eligible place, and what records, docs and audits say of it.

A policy is a class in `app/routing/selection/policies/registry.py`, or in a module that it imports,
and a name in `app/routing/policy_names.py`.
`eligibility.py` comes before, `choice.py` makes the choice. Candidates are columns, because a
policy looks at every worker.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import msgspec

from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.choice import Costs
from kvlane.app.routing.selection.cost_kernels import PREFILL, WAIT, Floats
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.state.performance import EngineProfile
from kvlane.streams.records import Assigned, Candidate, Phase
from kvlane.streams.request import Request

MISSED_TARGET = "missed target"
"""The term of candidates that would miss a latency target of the request."""


class Scores(msgspec.Struct, frozen=True, gc=False):
    """The cost of each candidate, lower being better.

    With a forecast (`has_forecast`) besides: `results`: see `cost_kernels.py`; `best`: the
    candidate to choose; `most_cached_tokens`: the largest number of prompt tokens cached at any
    candidate; `least_runs`: the least number of runs at any.
    """

    costs: Costs
    results: Floats | None = None
    best: int | None = None
    most_cached_tokens: float = 0.0
    least_runs: float = math.inf

    def ttft_ms(self, row: int) -> float:
        """The predicted time to the first token at a candidate, if there are `results`."""
        assert self.results is not None, "the policy has a forecast"
        return self.results.item(row, WAIT) + self.results.item(row, PREFILL)


class RecordedPolicy:
    """A policy as records name it.

    `unit`: of its costs, "" if they are no amounts; `reason`: why a worker was chosen, "" if the
    costs say it; `recomputes_costs`: whether its costs are those of the recorded inputs;
    `uses_sessions`: whether they depend on the session id, which no decision records.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = ""
    reason: ClassVar[str] = ""
    recomputes_costs: ClassVar[bool] = True
    uses_sessions: ClassVar[bool] = False

    def terms(
        self, decision: Assigned, candidate: Candidate, scores: Scores, row: int
    ) -> dict[str, float]:
        """The terms of a candidate's cost, weighted; `row`: its row in `scores`."""
        return {}


class Policy(RecordedPolicy, ABC):
    """A policy that a router can have. `summary`: its row in docs/routing.md; `is_simulated`:
    whether a simulation can choose it; `has_cost_settings`: whether requests may set its weights.
    """

    summary: ClassVar[str]
    has_cost_settings: ClassVar[bool] = False
    is_simulated: ClassVar[bool] = True

    @abstractmethod
    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        """The costs, a function of the arguments alone. Of the columns of `options.features`,
        decisions without a forecast record `RUNS`, `OPEN_TOKENS` and `PREFILL_TOKENS` alone (see
        `Candidate`): costs made of others cannot be recomputed."""

    def features(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> RequestFeatures:
        """The features of a request with those that depend on all its candidates."""
        return features

    def params(
        self, features: RequestFeatures, config: RoutingConfig, scores: Scores
    ) -> dict[str, float]:
        """The settings and estimates that the costs depend on, as recorded."""
        return {}

    def session_tolerance(
        self, features: RequestFeatures, config: RoutingConfig, profile: EngineProfile
    ) -> float:
        """By how much the cost of a session's own place may exceed the least one: the whole prompt
        once, computed anew. Without end for policies whose costs are no amounts.
        """
        return math.inf

    def pinned_phase(self, phase: Phase) -> Phase:
        return phase

    def fault(self, request: Request, phase: Phase) -> str:
        """Why the policy cannot take a request; "" if it can."""
        return ""


def taint_term(candidate: Candidate, terms: dict[str, float]) -> dict[str, float]:
    """The term of preferred taints: the rest of the cost."""
    if not candidate.taint_weight:
        return {}
    return {"taints": candidate.cost - sum(terms.values())}
