"""Fixtures of the unit tests."""

from __future__ import annotations

import os

import pytest

from tests.harness.routing_harness import RoutingHarness


@pytest.fixture(autouse=True)
def without_exported_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from the shell: unit tests give their own, and need no broker."""
    for name in [name for name in os.environ if name.startswith("KVLANE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def routing() -> RoutingHarness:
    return RoutingHarness()
