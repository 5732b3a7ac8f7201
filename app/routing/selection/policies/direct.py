"""Policy direct: the worker that the request names; a request that names none is refused."""

from __future__ import annotations

from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.eligibility import pinned_worker
from kvlane.app.routing.selection.policies.least_loaded import open_load
from kvlane.app.routing.selection.policies.policy import Policy, Scores
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.streams.records import Phase
from kvlane.streams.request import Request


class Direct(Policy):
    """Policy direct: the caller balances the load; of several ranks the least loaded is taken."""

    name = "direct"
    unit = "tokens"
    reason = "the request names this worker"
    summary = "the worker that the request names"
    is_simulated = False

    def score(
        self, features: RequestFeatures, options: Candidates, config: RoutingConfig
    ) -> Scores:
        return Scores(open_load(options))

    def pinned_phase(self, phase: Phase) -> Phase:
        return "decode" if phase == "aggregated" else phase

    def fault(self, request: Request, phase: Phase) -> str:
        if pinned_worker(request.hints, phase) is not None:
            return ""
        return f"policy direct needs {phase}_worker_id or backend_instance_id"


POLICY = Direct()
