"""The policies by name: `POLICIES` for routers, `RECORDED` for readers of decisions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from kvlane.app.routing.policy_names import BATCH_POLICY, POLICY_NAMES
from kvlane.app.routing.selection.policies.policy import Policy, RecordedPolicy


class BatchPlacement(RecordedPolicy):
    name = BATCH_POLICY
    unit = "ms"
    recomputes_costs = False


POLICIES: Mapping[str, Policy] = {
    name: import_module(f"kvlane.app.routing.selection.policies.{name}").POLICY
    for name in POLICY_NAMES
}
RECORDED: Mapping[str, RecordedPolicy] = {**POLICIES, BATCH_POLICY: BatchPlacement()}
SIMULATED = tuple(name for name, policy in POLICIES.items() if policy.is_simulated)
