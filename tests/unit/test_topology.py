"""Where workers stand, and what follows from it for who decodes."""

from __future__ import annotations

import pytest

from app.routing.topology import near, place_in, taint_of
from streams.records import RoutingConstraints

TAINTS = ("gpu=h200", "topology/zone=a", "topology/rack=7")


def test_a_worker_says_where_it_stands_by_a_taint() -> None:
    assert taint_of("zone", "a") == "topology/zone=a"
    assert place_in("zone", TAINTS) == "topology/zone=a"
    assert place_in("row", TAINTS) is None
    assert place_in("zone", ["topology/zone="]) is None


def test_a_required_domain_joins_what_the_request_requires() -> None:
    asked = RoutingConstraints(required_taints=("gpu=h200",), preferred_taints={"x": 1.0})
    both = RoutingConstraints(
        required_taints=("gpu=h200", "topology/zone=a"), preferred_taints={"x": 1.0}
    )
    assert near(asked, "zone", TAINTS) == both
    assert near(both, "zone", TAINTS) == both


def test_a_preferred_domain_wins_over_an_equal_taint_of_the_request() -> None:
    asked = RoutingConstraints(preferred_taints={"topology/zone=a": 9.0, "x": 1.0})
    assert near(asked, "zone", TAINTS, 0.5) == RoutingConstraints(
        preferred_taints={"topology/zone=a": 0.5, "x": 1.0}
    )
    assert near(None, "rack", TAINTS, 2.0) == RoutingConstraints(
        preferred_taints={"topology/rack=7": 2.0}
    )


def test_an_unknown_place_that_is_required_fails_before_anything_is_computed() -> None:
    with pytest.raises(LookupError, match="topology/row="):
        near(None, "row", TAINTS)


def test_an_unknown_place_that_is_preferred_makes_no_constraints() -> None:
    assert near(None, "row", TAINTS, 1.0) is None
    asked = RoutingConstraints(required_taints=("x",))
    assert near(asked, "row", TAINTS, 1.0) is asked
