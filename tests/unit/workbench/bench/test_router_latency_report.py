"""Tests of thresholds of the latency benchmark, and of the growth of costs."""

from __future__ import annotations

import pytest

from workbench.bench.growth import GrowthFigure, growth_report
from workbench.bench.routing.router_latency import RouterLatencyFigures, latency_report
from workbench.bench.routing.router_load import RouterLatencyRound

ECHO = RouterLatencyRound("echo", 100, 4, 20, 1000, 990, 100, 100, 100, 0)
ROUTER = RouterLatencyRound("router", 100, 5, 30, 1900, 1800, 100, 100, 100, 0)
FULL = RouterLatencyFigures(
    [ECHO, ROUTER],
    [ECHO._replace(answered_per_s=3000), ROUTER._replace(answered_per_s=1400)],
    ROUTER._replace(answered_per_s=1300),
    [],
    {},
    {"echo": 1, "router": 3},
    {100: {"client": 0.5, "plan": 0.25}},
)


def failed(figures: RouterLatencyFigures) -> list[str]:
    return [each.name for each in latency_report(figures).thresholds if not each.passed]


def test_figures_within_all_limits_pass() -> None:
    assert failed(FULL) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"p50_ms": 6}, "p50 to echo at 100/s"),
        ({"p99_ms": 40}, "p99 to echo at 100/s"),
        ({"cpu_us": 2100}, "CPU beyond echo at 100/s"),
        ({"lost": 1}, "lost at 100/s"),
    ],
)
def test_each_figure_of_the_router_has_a_limit(change: dict[str, float], name: str) -> None:
    assert failed(FULL._replace(rounds=[ECHO, ROUTER._replace(**change)])) == [name]


def test_router_that_answers_less_when_more_is_sent_fails() -> None:
    over = ROUTER._replace(answered_per_s=1300)
    assert failed(FULL._replace(overload=[over])) == ["answered at 1.5 x capacity, to the capacity"]


def test_router_that_answers_less_when_more_wait_fails() -> None:
    many = ROUTER._replace(answered_per_s=1000)
    assert failed(FULL._replace(many=many)) == ["one router carries, 1024 in flight"]


@pytest.mark.parametrize(
    ("two", "missed"), [((700, 890), ["two routers carry, to one"]), ((700, 910), [])]
)
def test_best_round_of_two_routers_is_compared_with_the_best_of_one(
    two: tuple[int, ...], missed: list[str]
) -> None:
    limited = {
        routers: [ROUTER._replace(answered_per_s=each) for each in answered]
        for routers, answered in {1: (480, 500), 2: two}.items()
    }
    assert failed(FULL._replace(limited=limited)) == missed


def test_parts_of_the_cpu_time_are_shown_in_microseconds() -> None:
    shown = {each.name: each.value for each in latency_report(FULL).thresholds}
    assert shown["CPU at 100/s: client"] == 950


def test_scan_may_grow_with_its_input_only() -> None:
    costs = {6: 1.0, 64: 4.0, 640: 40.0}
    scan, other = (
        GrowthFigure("workers", "scan", costs, is_scan=True),
        GrowthFigure("n", "x", costs),
    )
    assert [each.passed for each in growth_report([scan, other], []).thresholds] == [True, False]
