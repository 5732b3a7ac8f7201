"""Tests of turns of routers on workers, and when they are taken."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvlane.app.routing.queueing.herd_avoidance import (
    MAX_INTERVALS,
    MIN_REQUESTS,
    NO_STAGGER,
    ROUTER_EXPIRY_MS,
    BurstDetector,
    HerdAvoidance,
    routers_before,
    stagger_by_worker,
)
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import Assigned, LogRecord, Phase, RequestOffset

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
    service_class: ServiceClass = "interactive",
) -> None:
    listener.on_record(LogRecord(0, at_ms, Assigned(
        id="a", attempt=attempt, phase=phase, worker="w", epoch=1, prompt_tokens=1,
        origin=RequestOffset(topic="requests", partition=0, offset=0), responses_from=0,
        deadline_ms=0,
        held_ms=held_ms, router=router, service_class=service_class,
    )))  # fmt: skip


PREFILL_MS, FLEET = 100.0, 8
"""Mean prefill of a request, and workers. Two requests within a lag of 5 ms keep them busy for more
than twice the lag."""


@pytest.mark.parametrize(("burst", "is_bursty"), [(1, False), (4, True), (10, True)])
def test_requests_that_come_together_are_a_burst(burst: int, is_bursty: bool) -> None:
    detector = BurstDetector(5.0)
    for n in range(1000):
        got(detector, n // burst * 300)
    assert detector.is_bursty(PREFILL_MS, FLEET) == is_bursty


def test_bursts_are_measured_by_arrival_and_not_by_dispatch() -> None:
    detector = BurstDetector(5.0)
    for n in range(1000):
        got(detector, at_ms=n * 10 + n % 8 * 40, held_ms=n % 8 * 40 + n % 8 * 10)
    assert detector.is_bursty(PREFILL_MS, FLEET)


def test_requests_at_random_are_no_burst_until_the_workers_are_overloaded() -> None:
    random, detector, at_ms = Random(1), BurstDetector(40.0), 0.0
    for _ in range(1000):
        at_ms += random.expovariate(0.06)  # by ms: workers are busy for three quarters of the time
        got(detector, int(at_ms))
    assert not detector.is_bursty(PREFILL_MS, FLEET)
    assert detector.is_bursty(4 * PREFILL_MS, FLEET)


def test_burst_that_many_workers_compute_at_once_is_none() -> None:
    detector = BurstDetector(5.0)
    for n in range(1000):
        got(detector, n // 4 * 300)
    assert not detector.is_bursty(PREFILL_MS, 10 * FLEET)
    assert not detector.is_bursty(PREFILL_MS / 10, FLEET)


def test_burst_is_assumed_before_requests_were_seen() -> None:
    detector = BurstDetector(5.0)
    for n in range(MIN_REQUESTS - 1):
        got(detector, n * 300)
    assert detector.is_bursty(PREFILL_MS, FLEET)
    got(detector, MIN_REQUESTS * 300)
    assert not detector.is_bursty(PREFILL_MS, FLEET)


def test_past_burst_has_no_effect() -> None:
    detector = BurstDetector(5.0)
    for _ in range(500):
        got(detector, 0)
    assert detector.is_bursty(PREFILL_MS, FLEET)
    for n in range(500):
        got(detector, n * 100)
    assert not detector.is_bursty(PREFILL_MS, FLEET)


def test_batch_requests_are_no_burst() -> None:
    detector = BurstDetector(5.0)
    for n in range(1000):
        got(detector, n * 100)
        got(detector, n // 20 * 100, service_class="batch")
    assert not detector.is_bursty(PREFILL_MS, FLEET)


def test_burst_is_found_while_the_lag_changes_a_little() -> None:
    detector = BurstDetector(5.4)
    for n in range(1000):
        detector.lag_ms = 5.4 + n % 2 * 0.2
        got(detector, n // 4 * 300)
    assert detector.is_bursty(PREFILL_MS, FLEET)
    for n in range(1000):
        detector.lag_ms = 40.0
        got(detector, n // 4 * 300)
    assert not detector.is_bursty(PREFILL_MS, FLEET), "three others keep 8 workers busy for 38 ms"


def test_second_decision_of_a_split_request_is_no_arrival() -> None:
    detector = BurstDetector(5.0)
    for n in range(1000):
        got(detector, n * 100, phase="prefill")
        got(detector, n * 100 + 1, phase="decode")
    assert not detector.is_bursty(PREFILL_MS, FLEET)


def test_intervals_of_arrival_are_bounded() -> None:
    detector = BurstDetector(5.0)
    for n in range(2 * MAX_INTERVALS):
        got(detector, n * 100)
    assert len(detector._arrived) == MAX_INTERVALS


def test_lone_router_has_no_stagger() -> None:
    turns = HerdAvoidance("router-0")
    got(turns, 0, router="router-0")
    assert turns.stagger_ms(WORKERS, 1, 0, PREFILL_MS) is NO_STAGGER


def test_routers_with_bursts_are_staggered_by_their_lag() -> None:
    turns = {name: HerdAvoidance(name) for name in ROUTERS}
    for each in turns.values():
        for name in ROUTERS:
            got(each, 0, router=name)
        for _ in range(200):
            each.observe_lag(9.0)
    later = [each.stagger_ms(WORKERS, 1, 0, PREFILL_MS) for each in turns.values()]
    assert sorted(ms[WORKERS[0]] for ms in later) == [9.0 * n for n in range(8)]


@pytest.mark.parametrize("apart_ms", [0, 300])
def test_routers_are_staggered_only_during_bursts(apart_ms: int) -> None:
    herd_avoidance = HerdAvoidance("router-0")
    for n in range(MIN_REQUESTS):
        got(herd_avoidance, n * apart_ms, router="router-1")
    now_ms = MIN_REQUESTS * apart_ms
    assert herd_avoidance.stagger_ms(WORKERS, 1, now_ms, 0.1) is NO_STAGGER
    is_staggered = herd_avoidance.stagger_ms(WORKERS[:8], 1, now_ms, PREFILL_MS) is not NO_STAGGER
    assert is_staggered == (apart_ms == 0)


def test_stagger_changes_only_with_the_fleet() -> None:
    turns = HerdAvoidance("router-0")
    got(turns, 0, router="router-1")
    before = turns.stagger_ms(WORKERS, 1, 0, PREFILL_MS)
    assert turns.stagger_ms(WORKERS, 1, 0, PREFILL_MS) is before
    assert turns.stagger_ms(["another"], 2, 0, PREFILL_MS).keys() == {"another"}


def test_router_silent_for_long_is_not_awaited() -> None:
    turns = HerdAvoidance("router-0")
    got(turns, 0, router="router-1")
    assert turns.stagger_ms(WORKERS, 1, ROUTER_EXPIRY_MS, PREFILL_MS) is not NO_STAGGER
    assert turns.stagger_ms(WORKERS, 1, ROUTER_EXPIRY_MS + 1, PREFILL_MS) is NO_STAGGER


def test_single_late_decision_changes_the_lag_estimate_little() -> None:
    turns = HerdAvoidance("router-0")
    got(turns, 0, router="router-1")
    turns.observe_lag(60_000.0)
    assert max(turns.stagger_ms(WORKERS, 1, 0, PREFILL_MS).values()) < 10
