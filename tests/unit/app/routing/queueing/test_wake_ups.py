"""Tests of wake-ups: the order in which waiting requests are woken, and their retry times."""

from __future__ import annotations

import math

from kvlane.app.routing.queueing.wake_ups import MAX_CLOCK_STEP_MS, Priority, QueueName, WakeUps

M, N = ("m",), ("n",)


def waiting(*requests: tuple[str, str, Priority]) -> WakeUps[str]:
    wake_ups = WakeUps[str]()
    for key, name, priority in requests:
        wake_ups.add(key, 1000.0, (name,), priority)
    return wake_ups


def test_first_request_of_several_lines_is_woken_by_priority_and_then_by_arrival() -> None:
    wake_ups = waiting(
        ("a", "m", (0, 5)), ("b", "m", (0, 4)), ("c", "n", (-1, 9)), ("d", "m", (0, 4)),
        ("other", "x", (-2, 0)),
    )  # fmt: skip
    for _ in range(6):
        wake_ups.wake_first([M, N])
    assert wake_ups.take_woken() == ["c", "b", "d", "a"]
    assert wake_ups.take_woken() == []
    assert wake_ups.has_lines


def test_priority_can_depend_on_the_line_at_the_wake_up() -> None:
    wake_ups = waiting(("a", "m", (0, 1)), ("b", "n", (0, 2)), ("c", "n", (0, 1)))
    virtual_times = {"m": 2.0, "n": 1.0}

    def priority_now(name: QueueName, priority: Priority) -> Priority:
        return priority[0], virtual_times[name[0]], priority[1]

    wake_ups.wake_first([M, N], priority_now)
    virtual_times["m"] = 0.5
    wake_ups.wake_first([M, N], priority_now)
    assert wake_ups.take_woken() == ["c", "a"]


def test_woken_request_waits_no_longer() -> None:
    wake_ups = waiting(("a", "m", ()), ("b", "m", ()))
    wake_ups.add("place", 500.0)
    assert wake_ups.waiting_for_places == 1
    wake_ups.wake(["place", "unknown", "a", "a"])
    assert wake_ups.take_woken() == ["place", "a"]
    wake_ups.wake(["place", "a"])
    wake_ups.wake_lines()
    assert wake_ups.take_woken() == ["b"]
    assert (wake_ups.waiting_for_places, wake_ups.has_lines) == (0, False)
    assert wake_ups.next_ms == math.inf


def test_discarded_request_is_not_woken() -> None:
    wake_ups = waiting(("a", "m", ()), ("b", "m", ()), ("c", "m", ()))
    wake_ups.wake(["a"])
    wake_ups.discard("a")
    wake_ups.discard("b")
    wake_ups.wake_first([M])
    assert wake_ups.take_woken() == ["c"]


def test_each_request_retries_at_its_own_time() -> None:
    wake_ups = WakeUps[str]()
    for key, retry_ms in (("a", 300.0), ("b", 100.0), ("c", 200.0), ("a", 150.0)):
        wake_ups.add(key, retry_ms, M)
    wake_ups.discard("b")
    assert wake_ups.next_ms == 150.0
    wake_ups.wake_due(149.9)
    assert wake_ups.take_woken() == []
    wake_ups.wake_due(250)
    assert wake_ups.take_woken() == ["a", "c"]
    assert wake_ups.next_ms == math.inf, "the first retry time of a is over"


def test_all_requests_retry_when_the_clock_has_gone_back() -> None:
    wake_ups = WakeUps[str]()
    wake_ups.wake_due(100_000)
    wake_ups.add("a", 101_000.0, M)
    wake_ups.wake_due(100_000 - MAX_CLOCK_STEP_MS)
    assert wake_ups.take_woken() == []
    wake_ups.wake_due(50_000)
    assert wake_ups.take_woken() == ["a"]
