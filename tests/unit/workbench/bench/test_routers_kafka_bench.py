"""Tests of the bench of real routers: its load, and its thresholds."""

from __future__ import annotations

from kvlane.streams.clock import SystemClock
from kvlane.streams.ports import Partition
from kvlane.streams.topics import lane_of
from workbench.bench.bursty_workload import BURST_ARRIVALS, SINGLE_ARRIVALS, BurstyWorkload
from workbench.bench.collisions import ConcurrentDecisions
from workbench.bench.routing.router_views import (
    LoadFigures,
    RouterFigures,
    RouterView,
    StateDifference,
)
from workbench.bench.routing.routers_kafka import RouterPhase, routers_report

LANES, RATE = 6, 12.0
IDLE = RouterView("r1", {Partition("ledger", 0): 7}, RouterFigures({}, {}))


def phase(
    routers: int = 3, arrivals: str = SINGLE_ARRIVALS, ttft_ms: float = 100, **over: object
) -> RouterPhase:
    names = [f"r{n}" for n in range(1, routers + 1)]
    views = [IDLE._replace(router=name) for name in names]
    phase = RouterPhase(
        routers, arrivals, [ttft_ms], ConcurrentDecisions(1), frozenset(names), 9, [], views, 0
    )
    return phase._replace(**over)


def missed(*more: RouterPhase) -> list[str]:
    return [
        each.name
        for each in routers_report([phase(), phase(arrivals=BURST_ARRIVALS), *more]).thresholds
        if not each.passed
    ]


def test_routers_that_are_right_meet_all_bars_whatever_their_times() -> None:
    assert missed(phase(ttft_ms=1000)) == []
    ratio = routers_report(
        [phase(1), phase(1, BURST_ARRIVALS), phase(ttft_ms=250), phase(3, BURST_ARRIVALS)]
    ).thresholds[-2]
    assert (ratio.value, ratio.name) == (2.5, "1 -> 3 routers, one by one: mean TTFT")


def test_each_kind_of_error_misses_its_threshold() -> None:
    wrong = phase(log_differences=[StateDifference("r2", "w1", None, LoadFigures(1, 5, 4))])
    assert missed(wrong) == ["differences between views and log, at equal positions"]
    late = [IDLE, IDLE._replace(router="r2", positions={Partition("ledger", 0): 6})]
    assert missed(phase(2, final_views=late)) == ["differences between views, at the end"]
    busy = [IDLE, IDLE._replace(router="r2", unconfirmed=1)]
    assert missed(phase(2, final_views=busy)) == ["views with open requests, at the end"]
    assert missed(phase(unfinished=1)) == ["requests without an end"]
    assert missed(phase(deciders=frozenset(["r1"]))) == ["routers that decided nothing"]


def test_burst_is_one_request_on_each_lane_at_once() -> None:
    sent = BurstyWorkload(SystemClock(), "demo", LANES, RATE).requests_for(BURST_ARRIVALS, 2.0)
    assert [each.after_s for each in sent] == [
        n * LANES / RATE for n in range(4) for _ in range(LANES)
    ]
    for burst in range(4):
        ids = [each.request.id for each in sent[burst * LANES : (burst + 1) * LANES]]
        assert {lane_of(name, LANES) for name in ids} == set(range(LANES))


def test_bursts_have_the_same_shape_and_different_prompts() -> None:
    requests = BurstyWorkload(SystemClock(), "demo", LANES, RATE)
    first, second = (requests.requests_for(SINGLE_ARRIVALS, 5.0) for _ in range(2))
    assert [each.after_s for each in first] == [each.after_s for each in second]
    lengths = [[len(each.request.token_ids) for each in sent] for sent in (first, second)]
    assert lengths[0] == lengths[1]
    beginnings = [{each.request.token_ids[:64] for each in sent} for sent in (first, second)]
    assert not beginnings[0] & beginnings[1]
    assert len(beginnings[0]) < len(first), "some share one"
