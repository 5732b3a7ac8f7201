"""Tests of the policy by the settings of a router."""

from __future__ import annotations

import pytest

from kvlane.app.lanes.context import routing_config
from kvlane.app.settings import Settings


@pytest.mark.parametrize(("max_queued_requests", "max_hold_ms"), [(100, 3000.0), (0, 0.0)])
def test_maximum_wait_is_zero_without_a_queue(max_queued_requests: int, max_hold_ms: float) -> None:
    settings = Settings(max_queue_wait_s=3, max_queued_requests=max_queued_requests)
    assert routing_config(settings).predictive_weights.max_hold_ms == max_hold_ms
