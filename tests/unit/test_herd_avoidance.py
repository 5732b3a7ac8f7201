"""Turns of routers on workers, and when they are taken."""

from __future__ import annotations

from collections import Counter

import pytest

from app.routing.queueing.herd_avoidance import (
    NO_STAGGER,
    ROUTER_EXPIRY_MS,
    BurstDetector,
    HerdAvoidance,
    routers_before,
    stagger_by_worker,
)
from streams.records import Assigned, LogRecord, Phase, RequestOffset

ROUTERS = [f"router-{n}" for n in range(8)]
WORKERS = [f"worker-{n}" for n in range(400)]


def test_all_routers_agree_on_an_order_without_ties() -> None:
    for worker in WORKERS:
        assert sorted(routers_before(r, ROUTERS, worker) for r in ROUTERS) == list(range(8))
        assert routers_before("router-3", ROUTERS, worker) == routers_before(
            "router-3", ROUTERS[::-1], worker
        )


def test_each_router_is_first_on_its_share_of_the_workers() -> None:
    firsts = Counter(r for w in WORKERS for r in ROUTERS if routers_before(r, ROUTERS, w) == 0)
    assert all(25 <= firsts[router] <= 80 for router in ROUTERS)


def test_leaving_router_keeps_the_order_of_the_others() -> None:
    for worker in WORKERS:
        before = sorted(ROUTERS, key=lambda r: routers_before(r, ROUTERS, worker))
        after = sorted(ROUTERS[1:], key=lambda r: routers_before(r, ROUTERS[1:], worker))
        assert after == [router for router in before if router != ROUTERS[0]]


def test_stagger_is_one_lag_and_a_lone_router_has_none() -> None:
    assert {ms / 5 for ms in stagger_by_worker("router-0", ROUTERS, WORKERS, 5.0).values()} == set(
        range(8)
    )
    assert set(stagger_by_worker("router-0", ["router-0"], WORKERS, 5.0).values()) == {0.0}


def got(
    listener: BurstDetector | HerdAvoidance,
    at_ms: int,
    held_ms: int = 0,
    attempt: int = 0,
    router: str = "",
    phase: Phase = "aggregated",
) -> None:
    listener.on_record(LogRecord(0, at_ms, Assigned(
        id="a", attempt=attempt, phase=phase, worker="w", epoch=1, prompt_tokens=1,
        origin=RequestOffset(topic="requests", partition=0, offset=0), responses_from=0,
        deadline_ms=0,
        held_ms=held_ms, router=router,
    )))  # fmt: skip


@pytest.mark.parametrize(("burst", "crowded"), [(1, False), (4, True), (10, True)])
def test_requests_that_come_together_are_a_burst(burst: int, crowded: bool) -> None:
    crowding = BurstDetector(5.0)
    for n in range(1000):
        got(crowding, n // burst * 300)
    assert crowding.is_bursty == crowded


def test_bursts_are_measured_by_arrival_and_not_by_dispatch() -> None:
    crowding = BurstDetector(5.0)
    for n in range(1000):
        got(crowding, at_ms=n * 10 + n % 8 * 40, held_ms=n % 8 * 40 + n % 8 * 10)
    assert crowding.is_bursty


def test_past_burst_has_no_effect() -> None:
    crowding = BurstDetector(5.0)
    for _ in range(500):
        got(crowding, 0)
    assert crowding.is_bursty
    for n in range(500):
        got(crowding, n * 100)
    assert not crowding.is_bursty


def test_second_decision_of_a_split_request_is_no_arrival() -> None:
    detector = BurstDetector(5.0)
    for n in range(1000):
        got(detector, n * 100, phase="prefill")
        got(detector, n * 100 + 1, phase="decode")
    assert not detector.is_bursty


def test_lone_router_has_no_stagger() -> None:
    turns = HerdAvoidance("router-0")
    got(turns, 0, router="router-0")
    assert turns.stagger_ms(WORKERS, 1, 0) is NO_STAGGER


def test_routers_with_bursts_are_staggered_by_their_lag() -> None:
    turns = {name: HerdAvoidance(name) for name in ROUTERS}
    for each in turns.values():
        for name in ROUTERS:
            got(each, 0, router=name)
        for _ in range(200):
            each.observe_lag(9.0)
    later = [each.stagger_ms(WORKERS, 1, 0) for each in turns.values()]
    assert sorted(ms[WORKERS[0]] for ms in later) == [9.0 * n for n in range(8)]


def test_stagger_changes_only_with_the_fleet() -> None:
    turns = HerdAvoidance("router-0")
    got(turns, 0, router="router-1")
    before = turns.stagger_ms(WORKERS, 1, 0)
    assert turns.stagger_ms(WORKERS, 1, 0) is before
    assert turns.stagger_ms(["another"], 2, 0).keys() == {"another"}


def test_router_silent_for_long_is_not_awaited() -> None:
    turns = HerdAvoidance("router-0")
    got(turns, 0, router="router-1")
    assert turns.stagger_ms(WORKERS, 1, ROUTER_EXPIRY_MS) is not NO_STAGGER
    assert turns.stagger_ms(WORKERS, 1, ROUTER_EXPIRY_MS + 1) is NO_STAGGER


def test_single_late_decision_changes_the_lag_estimate_little() -> None:
    turns = HerdAvoidance("router-0")
    got(turns, 0, router="router-1")
    turns.observe_lag(60_000.0)
    assert max(turns.stagger_ms(WORKERS, 1, 0).values()) < 10
