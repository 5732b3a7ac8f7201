"""Tests of timers of requests: which are due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.reconcile import TIMER_RESOLUTION_MS, RequestTimers

IDS = st.sampled_from(["a", "b", "c"])
TIMES = st.integers(0, 40 * TIMER_RESOLUTION_MS)


@given(st.lists(st.one_of(st.tuples(IDS, st.none() | TIMES), TIMES), max_size=40))
def test_id_is_due_once_and_less_than_a_step_after_its_time(steps: list[object]) -> None:
    timers, model = RequestTimers(), dict[str, int]()
    for step in steps:
        match step:
            case (str(name), None):
                timers.set(name, None)
                model.pop(name, None)
            case (str(name), int(at_ms)):
                timers.set(name, at_ms)
                model[name] = at_ms
            case int(now_ms):
                found = timers.due(now_ms)
                assert len(set(found)) == len(found)
                assert {
                    name for name, at_ms in model.items() if at_ms <= now_ms - TIMER_RESOLUTION_MS
                } <= {*found}
                assert all(model[name] <= now_ms for name in found)
                for name in found:
                    del model[name]


def test_ids_become_due_in_order() -> None:
    timers = RequestTimers()
    for n in (3, 1, 2):
        timers.set(f"r{n}", n * 1000)
    assert timers.due(5000) == ["r1", "r2", "r3"]


def test_finished_ids_leave_no_state() -> None:
    timers = RequestTimers()
    for n in range(10_000):
        timers.set(f"r{n}", 600_000 + n)
        timers.set(f"r{n}", None)
    assert len(timers._steps) <= 10_000 / TIMER_RESOLUTION_MS + 2
    timers.due(700_000)
    assert not any((timers._steps, timers._ids, timers._step_of))
