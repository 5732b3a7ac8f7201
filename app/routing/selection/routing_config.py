"""Routing configuration: the policy of a deployment, and the settings of all policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvlane.app.routing.policy_names import Objective, has_forecast
from kvlane.streams.request import RouterConfigOverride


class DynamoWeights(NamedTuple):
    """Settings of the `dynamo` policy, with its documented defaults."""

    overlap_score_credit: float = 1.0
    prefill_load_scale: float = 1.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    active_request_weight: float = 0.0
    overlap_decay: float = 0.0
    temperature: float = 0.0


class PredictiveWeights(NamedTuple):
    """Settings of the `predictive` policy. `decode_weight`: the value of a millisecond of decode,
    summed over requests, in milliseconds to a first token. `max_hold_ms`: how long a request is
    held at most (KVLANE_MAX_QUEUE_WAIT_S)."""

    decode_weight: float = 0.01
    max_hold_ms: float = 10_000.0


class TransferSpeed(NamedTuple):
    """The expected speed of transfers of KV caches between workers, until it is measured."""

    bytes_per_s: float = 12.5e9
    latency_ms: float = 1.0


class RoutingConfig(NamedTuple):
    """The policy of a deployment and its settings. `session_affinity_tolerance`: a factor on
    `Policy.session_tolerance`. `objective`: by which a router sets the weight of decode.
    """

    policy: str = "predictive"
    weights: DynamoWeights = DynamoWeights()
    predictive_weights: PredictiveWeights = PredictiveWeights()
    session_affinity_tolerance: float = 1.0
    transfer_speed: TransferSpeed = TransferSpeed()
    objective: Objective = "balanced"

    @property
    def queues_for_places(self) -> bool:
        """Whether the policy may queue requests for a busy place, and plans them together."""
        return has_forecast(self.policy)

    def overridden(self, override: RouterConfigOverride | None) -> RoutingConfig:
        """The configuration with the weights that a request sets for itself."""
        if override is None:
            return self
        asked = {
            "overlap_score_credit": override.overlap_score_credit,
            "prefill_load_scale": override.prefill_load_scale,
            "temperature": override.router_temperature,
        }
        weights = {name: value for name, value in asked.items() if value is not None}
        return self._replace(weights=self.weights._replace(**weights))


def recorded_config(policy: str, params: Mapping[str, float]) -> RoutingConfig:
    """The configuration by the parameters that a decision records."""
    weights, predictive = (
        {name: params[name] for name in settings._fields if name in params}
        for settings in (DynamoWeights, PredictiveWeights)
    )
    return RoutingConfig(policy, DynamoWeights(**weights), PredictiveWeights(**predictive))
