"""Session affinity as a preference: when a request goes to the worker of its session.

It goes elsewhere when that worker costs more than the best one by over `affinity_tolerance`, which
is about the cost of computing the whole prompt.
"""

from __future__ import annotations

import math

from app.routing.selection.policies import Costs, DynamoWeights, RequestFeatures
from app.routing.state.performance import EngineProfile


def affinity_tolerance(
    policy: str, features: RequestFeatures, weights: DynamoWeights, pace: EngineProfile
) -> float:
    """By how much the cost of a session's own place may exceed the least one, in the policy's unit:
    the whole prompt once, computed anew. Without end for policies whose costs are no amounts.
    """
    match policy:
        case "dynamo":
            return weights.prefill_load_scale * features.prompt_tokens / features.block_size
        case "least_loaded":
            return float(features.prompt_tokens)
        case "predictive":
            return pace.prefill_ms(features.prompt_tokens)
        case _:
            return math.inf


def apply_affinity(own: int, chosen: int, costs: Costs, slack: float) -> int:
    """The option to take when `chosen` is the policy's choice and `own` that of the session."""
    return own if slack == math.inf or costs[own] <= min(costs) + slack else chosen
