"""The policy that the settings of a router ask for."""

from __future__ import annotations

import pytest

from app.lanes.context import tuning_of
from app.settings import Settings


@pytest.mark.parametrize(("held_requests", "max_hold_ms"), [(100, 3000.0), (0, 0.0)])
def test_nobody_is_held_where_nobody_may_wait(held_requests: int, max_hold_ms: float) -> None:
    settings = Settings(max_hold_s=3, held_requests=held_requests)
    assert tuning_of(settings).predictive.max_hold_ms == max_hold_ms
