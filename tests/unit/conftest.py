"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from tests.harness.routing_harness import RoutingHarness


@pytest.fixture
def routing() -> RoutingHarness:
    return RoutingHarness()
