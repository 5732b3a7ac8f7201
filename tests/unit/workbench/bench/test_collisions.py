"""Tests of concurrent decisions of several routers: meetings and collisions."""

from __future__ import annotations

from kvlane.streams.records import Assigned, LogRecord
from tests.harness.routing_harness import RoutingHarness, to_assigned
from workbench.bench.collisions import ConcurrentDecisions, find_concurrent

POLICY = "predictive"


def decided(
    routing: RoutingHarness,
    at_ms: int,
    router: str,
    known_ms: int,
    *,
    prompt_id: str = "",
    **over: object,
) -> LogRecord:
    """A decision on a stage, as the ledger has it."""
    chosen = routing.chosen(POLICY, seed=1)
    name = prompt_id or f"{router}-{at_ms}"
    return LogRecord(
        0, at_ms, to_assigned(chosen, id=name, router=router, known_ms=known_ms, **over)
    )


def two_alike() -> RoutingHarness:
    """Two workers that have nothing to do and nothing in their caches."""
    routing = RoutingHarness()
    routing.workers("w1", "w2")
    return routing


def test_two_unaware_decisions_would_both_have_changed() -> None:
    routing = two_alike()
    ledger = [decided(routing, 1000, "r1", 990), decided(routing, 1003, "r2", 990)]
    assert find_concurrent(ledger) == ConcurrentDecisions(
        2, concurrent=2, collided=2, unread_ms=(3,)
    )


def test_order_of_the_lanes_makes_no_difference() -> None:
    routing = two_alike()
    ledger = [decided(routing, 1003, "r2", 990), decided(routing, 1000, "r1", 990)]
    assert find_concurrent(ledger) == ConcurrentDecisions(
        2, concurrent=2, collided=2, unread_ms=(3,)
    )


def test_decision_that_read_the_other_is_no_collision() -> None:
    routing = two_alike()
    ledger = [decided(routing, 1000, "r1", 990), decided(routing, 1003, "r2", 1000)]
    assert find_concurrent(ledger) == ConcurrentDecisions(2)


def test_router_counts_its_own_decisions_at_once() -> None:
    routing = two_alike()
    ledger = [decided(routing, 1000, "r1", 990), decided(routing, 1001, "r1", 990)]
    assert find_concurrent(ledger) == ConcurrentDecisions(2)


def test_unread_decisions_for_other_workers_do_not_collide() -> None:
    routing = two_alike()
    first = decided(routing, 1000, "r1", 990)
    assert isinstance(first.record, Assigned)
    routing.add_load(first.record.worker, 50_000, 50_000, since_ms=1999)
    ledger = [first, decided(routing, 1007, "r2", 990)]
    assert find_concurrent(ledger) == ConcurrentDecisions(2, unread_ms=(7,))


def test_concurrent_decisions_without_an_alternative_are_no_collision() -> None:
    routing = two_alike()
    routing.add_load("w2", 100_000, 100_000, since_ms=1999)
    ledger = [decided(routing, 1000, "r1", 990), decided(routing, 1003, "r2", 990)]
    assert find_concurrent(ledger) == ConcurrentDecisions(
        2, concurrent=2, collided=0, unread_ms=(3,)
    )


def test_one_sided_change_is_no_collision() -> None:
    routing = two_alike()
    first = decided(routing, 1000, "r1", 990)
    assert isinstance(first.record, Assigned)
    other = "w1" if first.record.worker == "w2" else "w2"
    routing.add_load(
        other, 100_000, 100_000, since_ms=1999
    )  # so nothing takes the second one there
    stays = decided(routing, 1003, "r2", 990)
    assert find_concurrent([first, stays]) == ConcurrentDecisions(
        2, concurrent=2, collided=0, unread_ms=(3,)
    )


def test_oldest_unread_decision_gives_the_lag() -> None:
    routing = two_alike()
    ledger = [
        decided(routing, 1000, "r1", 900),
        decided(routing, 1004, "r3", 1000),
        decided(routing, 1009, "r2", 995),
    ]
    assert find_concurrent(ledger).unread_ms == (9,)


def test_decisions_without_read_positions_are_left_out() -> None:
    routing = two_alike()
    bare = decided(routing, 1000, "r1", 990, candidate_rows=None)
    unknown = decided(routing, 1001, "r2", 0)
    assert find_concurrent(
        [bare, unknown, decided(routing, 1002, "r2", 990)]
    ) == ConcurrentDecisions(1)
