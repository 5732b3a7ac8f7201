"""Tests of the table of HTTP connections: places, their order, and a full table."""

from __future__ import annotations

import logging

import pytest

from kvlane.app.http.server.connection_table import (
    ALL_HEADS_BYTES,
    HEAD_BYTES,
    LOG_PERIOD_S,
    SPARE,
    ConnectionTable,
)
from kvlane.app.metrics.metric_set import MetricSet


class Connection:
    def __init__(self) -> None:
        self.is_open = True

    def expire(self, now: float) -> None:
        raise AssertionError(now)

    def abort(self) -> None:
        self.is_open = False


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def added(table: ConnectionTable, count: int) -> list[Connection]:
    connections = [Connection() for _ in range(count)]
    assert [table.add(each) for each in connections] == [True] * count
    return connections


def test_new_connection_closes_the_one_that_has_waited_longest() -> None:
    table = ConnectionTable(3, Clock())
    first, second, third = added(table, 3)
    table.begin(first)
    table.wait(first)  # its request is over: it is the youngest of those that wait
    table.begin(third)
    (fourth,) = added(table, 1)
    assert [each.is_open for each in (first, second, third, fourth)] == [True, False, True, True]
    added(table, 1)
    assert not first.is_open
    assert len(table) == 3


def test_connections_with_requests_leave_spare_places_for_probes() -> None:
    table = ConnectionTable(2, Clock())
    busy = added(table, 2)
    for each in busy:
        table.begin(each)
    probes = [Connection() for _ in range(SPARE + 2)]
    assert [table.add(each) for each in probes] == [False] * len(probes)
    assert [each.is_open for each in probes] == [False, False] + [True] * SPARE
    assert all(each.is_open for each in busy)
    assert len(table) == 2 + SPARE
    table.remove(busy[0])
    added(table, 1)


def test_full_table_is_counted_each_time_and_logged_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, metrics = Clock(), MetricSet()
    table = ConnectionTable(5, clock, metrics)
    with caplog.at_level(logging.WARNING):
        added(table, 100)
        assert len(caplog.records) == 1
        clock.now += LOG_PERIOD_S
        added(table, 1)
    assert len(caplog.records) == 2
    assert metrics.registry.get_sample_value("kvlane_http_over_limit_connections_total") == 96
    assert metrics.registry.get_sample_value("kvlane_http_connections") == 5


@pytest.mark.parametrize("count", [1, 1024, 2000, 4096])
def test_heads_of_all_connections_are_bounded_together(count: int) -> None:
    table = ConnectionTable(5000, Clock())
    added(table, count)
    assert table.head_bytes * count <= ALL_HEADS_BYTES
    assert table.head_bytes == HEAD_BYTES or count > 1024
