"""Tests of the policy by the settings of a router."""

from __future__ import annotations

import pytest

from kvlane.app.lanes.context import routing_config
from kvlane.app.routing.selection.routing_config import DynamoWeights
from kvlane.app.settings import Settings


@pytest.mark.parametrize(("max_queued_requests", "max_hold_ms"), [(100, 3000.0), (0, 0.0)])
def test_maximum_wait_is_zero_without_a_queue(max_queued_requests: int, max_hold_ms: float) -> None:
    settings = Settings(max_queue_wait_s=3, max_queued_requests=max_queued_requests)
    assert routing_config(settings).predictive_weights.max_hold_ms == max_hold_ms


def test_weights_of_policy_dynamo_and_the_objective_are_settings() -> None:
    settings = Settings(
        policy="dynamo", overlap_score_credit=0.9, prefill_load_scale=2, host_cache_weight=0.5,
        disk_cache_weight=0.1, active_request_weight=3, overlap_decay=0.7, router_temperature=0.2,
        objective="throughput",
    )  # fmt: skip
    config = routing_config(settings)
    assert config.weights == DynamoWeights(0.9, 2, 0.5, 0.1, 3, 0.7, 0.2)
    assert config.objective == "throughput"
