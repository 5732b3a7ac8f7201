"""The policies by name, `POLICIES` for routers and `RECORDED` for readers of decisions; and those
whose costs take a line or two.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np

from kvlane.app.routing.policy_names import BATCH_POLICY
from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.choice import INELIGIBLE, Costs, random_shares, random_u64
from kvlane.app.routing.selection.cost_kernels import OPEN_TOKENS, RUNS
from kvlane.app.routing.selection.eligibility import pinned_worker
from kvlane.app.routing.selection.policies.dynamo import Dynamo
from kvlane.app.routing.selection.policies.policy import Policy, RecordedPolicy, Scores
from kvlane.app.routing.selection.policies.predictive import Predictive
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.state.performance import EngineProfile
from kvlane.streams.records import Assigned, Candidate, Phase
from kvlane.streams.request import Request

_RUN_SHARE = 2.0**-20
"""Weight of an open run compared with open tokens: less than one of them, for up to a million
runs."""


class _LoadPolicy(Policy):
    """The cost is the load of a place: open tokens, then open runs."""

    unit = "tokens"

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        costs: Costs = options.features[:, OPEN_TOKENS] + options.features[:, RUNS] * _RUN_SHARE
        return Scores(costs)

    def terms(
        self, decision: Assigned, candidate: Candidate, scores: Scores, row: int
    ) -> dict[str, float]:
        return {"open tokens": float(candidate.open_tokens)}


class LeastLoaded(_LoadPolicy):
    name = "least_loaded"
    summary = "active tokens, then active requests"

    def session_tolerance(
        self, features: RequestFeatures, config: RoutingConfig, profile: EngineProfile
    ) -> float:
        return float(features.prompt_tokens)


class PowerOfTwo(_LoadPolicy):
    name = "power_of_two"
    summary = "the less loaded of two random workers"

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        others = np.argsort(random_u64(features.seed, options.hashes), kind="stable")[2:]
        scores = super().score(features, options, config)
        scores.costs[others] = INELIGIBLE
        return scores


class Direct(_LoadPolicy):
    """The caller balances the load; of several ranks the least loaded is taken."""

    name = "direct"
    reason = "the request names this worker"
    summary = "the worker that the request names"
    is_simulated = False

    def pinned_phase(self, phase: Phase) -> Phase:
        return "decode" if phase == "aggregated" else phase

    def fault(self, request: Request, phase: Phase) -> str:
        if pinned_worker(request.hints, phase) is not None:
            return ""
        return f"policy direct needs {phase}_worker_id or backend_instance_id"

    def terms(
        self, decision: Assigned, candidate: Candidate, scores: Scores, row: int
    ) -> dict[str, float]:
        return {}


class RoundRobin(Policy):
    """A turn is recorded as its cost, since no decision records the turns."""

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


class RandomPlace(Policy):
    name = "random"
    reason = "drawn at random, by the request's seed"
    summary = "random"

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        return Scores(random_shares(features.seed, options.hashes))


class SessionHash(Policy):
    """Rendezvous hashing, so a lost place loses only its own sessions."""

    name = "session_hash"
    reason = "by the hash of its session id, or of its request id without one"
    summary = "the same worker for a session (else for a request id), while it is alive"
    uses_sessions = True

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        name = blake2b((features.session or features.id).encode(), digest_size=8).digest()
        return Scores(random_shares(int.from_bytes(name, "little"), options.hashes))


class BatchPlacement(RecordedPolicy):
    name = BATCH_POLICY
    unit = "ms"
    recomputes_costs = False


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Predictive(), Dynamo(), LeastLoaded(), RoundRobin(), RandomPlace(), PowerOfTwo(),
        SessionHash(), Direct(),
    )
}  # fmt: skip
"""In the order of `POLICY_NAMES`."""
RECORDED: Mapping[str, RecordedPolicy] = {**POLICIES, BATCH_POLICY: BatchPlacement()}
SIMULATED = tuple(name for name, policy in POLICIES.items() if policy.is_simulated)
