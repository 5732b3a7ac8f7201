"""Tests of the estimate of broker time: near the append times, with any change of clocks."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.streams.clock import WINDOW_S, BrokerClock, LeaderClock

DAY_S = 86_400


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at_s = 1000.0

    def now(self) -> float:
        return self.at_s

    def wall_ms(self) -> int:
        return 0

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


GAPS_S = st.floats(0, WINDOW_S)
SKEWS_MS = st.one_of(st.integers(-2000, 2000), st.integers(-10_000_000, 10_000_000))


@given(st.lists(st.tuples(GAPS_S, SKEWS_MS), min_size=1, max_size=60), GAPS_S)
def test_estimate_is_the_latest_that_records_of_late_have_shown(
    records: list[tuple[float, int]], then_s: float
) -> None:
    clock = Hand()
    broker_clock = BrokerClock(clock)
    begun_s = clock.at_s
    for gap_s, skew_ms in records:
        clock.at_s += gap_s
        broker_clock.observe(round(clock.at_s * 1000) + skew_ms)
    clock.at_s += then_s
    shown_ms = broker_clock.now_ms() - clock.at_s * 1000
    times = list(accumulate((gap_s for gap_s, _ in records), initial=begun_s))[1:]
    of_late = [
        skew_ms
        for at_s, (_, skew_ms) in zip(times, records, strict=True)
        if at_s >= times[-1] - WINDOW_S
    ]
    remembered = [
        skew_ms
        for at_s, (_, skew_ms) in zip(times, records, strict=True)
        if at_s >= times[-1] - 3 * WINDOW_S
    ]
    assert max(of_late) - 2 <= shown_ms <= max(remembered) + 2


def test_fast_clock_of_a_broker_is_dropped_when_others_advance() -> None:
    clock = Hand()
    broker_clock = BrokerClock(clock)
    broker_clock.observe(int(clock.at_s * 1000) + 3_600_000)
    for _ in range(3 * WINDOW_S):
        clock.at_s += 1
        broker_clock.observe(int(clock.at_s * 1000) - 5)
    assert broker_clock.now_ms() == pytest.approx(clock.at_s * 1000, abs=10)


def test_fast_local_clock_does_not_shift_the_estimate() -> None:
    clock = Hand()
    broker_clock = BrokerClock(clock)
    broker_s = 0.0
    for _ in range(DAY_S // 30):
        broker_s += 30
        clock.at_s += 30 * 1.0002  # 17 s a day
        broker_clock.observe(int(broker_s * 1000))
    assert broker_clock.now_ms() == pytest.approx(broker_s * 1000, abs=50)


def test_silence_keeps_the_estimate() -> None:
    clock = Hand()
    broker_clock = BrokerClock(clock)
    broker_clock.observe(5_000_000)
    clock.at_s += 10 * WINDOW_S
    assert broker_clock.now_ms() == 5_000_000 + 10 * WINDOW_S * 1000


def test_one_old_record_after_a_silence_does_not_set_the_clock_back() -> None:
    clock = Hand()
    broker_clock = BrokerClock(clock)
    broker_clock.observe(5_000_000)
    clock.at_s += 10 * WINDOW_S
    broker_clock.observe(5_000_000)
    assert broker_clock.now_ms() == 5_000_000 + 10 * WINDOW_S * 1000


def test_time_is_zero_before_the_first_record() -> None:
    assert BrokerClock(Hand()).now_ms() == 0


def test_lag_of_a_leader_is_its_difference_to_the_latest_clock() -> None:
    clock = Hand()
    broker_clock = BrokerClock(clock)
    leader = LeaderClock(clock, broker_clock)
    for lag_ms in (20_000, 0, 40_000):  # leaders of one partition, one after the other
        for delay_ms in (3000, 0, 500):
            clock.at_s += 10
            broker_clock.observe(int(clock.at_s * 1000))
            leader.observe(int(clock.at_s * 1000) - lag_ms - delay_ms)
        assert leader.lag_ms == pytest.approx(lag_ms, abs=2)


def test_lag_of_a_leader_is_0_before_its_first_record_and_where_it_is_ahead() -> None:
    clock = Hand()
    broker_clock = BrokerClock(clock)
    leader = LeaderClock(clock, broker_clock)
    broker_clock.observe(int(clock.at_s * 1000))
    assert leader.lag_ms == 0
    broker_clock.observe(int(clock.at_s * 1000) + 20_000)
    leader.observe(int(clock.at_s * 1000) + 20_000)
    assert leader.lag_ms == 0
