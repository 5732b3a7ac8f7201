"""Names of the policies: those that a setting can choose, and those that records may have."""

from __future__ import annotations

from typing import Final, Literal, get_args

PolicyName = Literal[
    "predictive",
    "dynamo",
    "least_loaded",
    "round_robin",
    "random",
    "power_of_two",
    "session_hash",
    "direct",
]
"""In the order of docs and reports."""
QueueOrder = Literal["sjf", "fcfs", "wspt", "edf"]
"""Orders of waiting requests; see `app/routing/queueing/pending.py`."""
Objective = Literal["first-token", "balanced", "throughput"]
"""What counts most; see `app/routing/queueing/objective.py`."""
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
MAX_WEIGHT = 1e6
"""Bound on weights, of settings and of requests: costs stay finite, so that one is the least."""
BATCH_POLICY: Final = "batch"
"""Policy in the records of batch requests (`batch_placement.py`); no setting chooses it."""
RECORDED_POLICIES = (*POLICY_NAMES, BATCH_POLICY)
_UNCOUNTED = frozenset({"direct"})
_WITH_FORECAST = frozenset({"predictive"})


def has_forecast(policy: str) -> bool:
    """Whether scores hold a forecast (`Scores.results`), recorded with its inputs.

    Then requests may be queued for a busy place, are planned together
    (`app/routing/queueing/joint_planning.py`), and one worker is compared with two.
    """
    return policy in _WITH_FORECAST


def adds_load(policy: str) -> bool:
    """Whether a decision adds the tokens of its prompt to the load of its worker. With policy
    direct the caller balances the load."""
    return policy not in _UNCOUNTED
