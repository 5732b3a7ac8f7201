"""Which brokers a reader takes to hang, by what it has heard of the partitions that they lead."""

from __future__ import annotations

from aiokafka import TopicPartition

from streams.kafka.reader import _Waits

A, B, C = (TopicPartition("t", n) for n in range(3))
LEADERS = {A: 1, B: 1, C: 2}
STEP_S = 0.5


class Reading:
    """Looks every half second; `answering`: the partitions about which there is news each time."""

    def __init__(self) -> None:
        self.waits = _Waits(3.0)
        self.now = 100.0
        self.left: list[tuple[int | None, float]] = []

    def go(self, seconds: float, *answering: TopicPartition, changing: bool = False) -> None:
        until = self.now + seconds
        leaders = dict(LEADERS)
        while self.now < until:
            self.now += STEP_S
            if changing:  # C comes and goes
                leaders = {tp: n for tp, n in LEADERS.items() if tp != C or self.now % 1}
            for tp in leaders:
                self.waits.hear(tp, int(1000 * self.now) if tp in answering else None, self.now)
            self.left += [(node, self.now) for node in self.waits.look(leaders, self.now)]


def test_brokers_that_answer_are_never_left() -> None:
    reading = Reading()
    reading.go(60, A, B, C)
    assert reading.left == []


def test_one_that_hangs_is_left_after_the_patience_and_again_after_as_long() -> None:
    reading = Reading()
    reading.go(10, A, B, C)
    reading.go(8, C)
    assert reading.left == [(1, 113.5), (1, 117.0)]


def test_it_is_left_though_what_is_read_changes_all_the_time() -> None:
    reading = Reading()
    reading.go(10, A, B, C)
    reading.go(4, changing=True)
    assert (1, 113.5) in reading.left


def test_who_answers_about_another_partition_works() -> None:
    reading = Reading()
    reading.go(10, A, B, C)
    reading.go(30, A, C)
    assert reading.left == []


def test_after_a_long_pause_nobody_is_late() -> None:
    reading = Reading()
    reading.go(10, A, B, C)
    reading.now += 60
    reading.go(3)
    assert reading.left == []
    reading.go(1)
    assert sorted(node for node, _ in reading.left if node) == [1, 2]


def test_one_that_has_never_answered_is_left_too() -> None:
    reading = Reading()
    reading.go(4, C)
    assert reading.left == [(1, 104.0)]
