"""Tests of points in time of the log, as operators name them."""

from __future__ import annotations

import pytest

from kvlane.app.audit.time_range import InvalidTime, format_time, parse_moment, parse_range
from kvlane.streams.ports import Partition

NOW_MS = 1_763_707_200_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-15m", NOW_MS - 900_000),
        ("-1.5h", NOW_MS - 5_400_000),
        ("-2d", NOW_MS - 172_800_000),
        ("1763707200000", NOW_MS),
        ("2025-11-21T06:40:00Z", NOW_MS),
        ("2025-11-21 06:40", NOW_MS),
        ("2025-11-21T07:40:00+01:00", NOW_MS),
        ("ledger/3:1200", {Partition("ledger", 3): 1200}),
        ("kv-events/0:7, ledger/3=9", {Partition("kv-events", 0): 7, Partition("ledger", 3): 9}),
    ],
)
def test_moment_is_a_time_or_offsets(text: str, expected: object) -> None:
    assert parse_moment(text, NOW_MS) == expected


@pytest.mark.parametrize("text", ["", "now", "-15", "15m", "ledger/x:1", "ledger/3:-1", "a/b", "/"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidTime, match="ledger/3:1200"):
        parse_moment(text, NOW_MS)


def test_time_is_shown_in_utc() -> None:
    assert format_time(NOW_MS + 7) == "2025-11-21 06:40:00.007"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-1h..-5m", (NOW_MS - 3_600_000, NOW_MS - 300_000)),
        ("-1.5h", (NOW_MS - 5_400_000, NOW_MS)),
        ("2025-11-21T06:30Z..2025-11-21T06:39:59.5Z", (NOW_MS - 600_000, NOW_MS - 500)),
        ("-1m..2030-01-01", (NOW_MS - 60_000, NOW_MS)),
    ],
)
def test_period_goes_from_a_time_to_another_or_to_now(text: str, expected: tuple[int, int]) -> None:
    assert parse_range(text, NOW_MS) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("-5m..-10m", "empty period"),
        ("2030-01-01..", "empty period"),
        ("..-5m", "empty period"),
        ("ledger/0:1..-5m", "is not a time"),
        ("soon..-5m", "invalid time"),
    ],
)
def test_malformed_period_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidTime, match=why):
        parse_range(text, NOW_MS)
