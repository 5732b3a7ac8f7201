"""Tests of canonical events as columns and back, and columns that no event gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.indexer.events import (
    CLEARED,
    CacheEvent,
    EventColumns,
    EventKind,
    MalformedColumns,
    Tier,
    encode_events,
    parse_columns,
)
from tests.harness.decoded import decode_events

keys = st.lists(st.integers(1, 2**64 - 1), max_size=5).map(tuple)
tiers = st.sampled_from(Tier)
events = st.one_of(
    st.builds(CacheEvent, st.just(EventKind.STORED), tiers, st.integers(0, 2**32 - 6), keys),
    st.builds(CacheEvent, st.just(EventKind.REMOVED), tiers, st.just(0), keys),
    st.just(CLEARED),
)

EVENTS = [
    CacheEvent(EventKind.STORED, Tier.HOST, 3, (1, 2**64 - 1)),
    CacheEvent(EventKind.REMOVED, Tier.DEVICE, 0, (7,)),
    CLEARED,
]
COLUMNS = EventColumns(
    kinds=b"\x00\x01\x02",
    tiers=b"\x01\x00\x00",
    positions=b"\x03\0\0\0" + b"\0\0\0\0" + b"\0\0\0\0",
    counts=b"\x02\0\0\0" + b"\x01\0\0\0" + b"\0\0\0\0",
    keys=b"\x01" + b"\0" * 7 + b"\xff" * 8 + b"\x07" + b"\0" * 7,
)


def test_columns_are_these_bytes() -> None:
    assert encode_events(EVENTS) == COLUMNS


def test_these_bytes_are_events() -> None:
    assert decode_events(COLUMNS) == EVENTS


@given(many=st.lists(events, max_size=6))
def test_events_come_back_as_they_went(many: list[CacheEvent]) -> None:
    assert decode_events(encode_events(many)) == many


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("kinds", b"\x00\x01"),
        ("kinds", b"\x00\x01\x03"),
        ("tiers", b"\x01\x00\x04"),
        ("tiers", b"\x01\x00"),
        ("positions", COLUMNS.positions[:-1]),
        ("positions", b"\xff\xff\xff\xff" + COLUMNS.positions[4:]),
        ("counts", COLUMNS.counts[:-4]),
        ("counts", b"\x03" + COLUMNS.counts[1:]),
        ("counts", b"\x01\0\0\0" + b"\x01\0\0\0" + b"\x01\0\0\0"),
        ("keys", COLUMNS.keys[:-8]),
        ("keys", COLUMNS.keys[:-1]),
        ("keys", b"\0" * 8 + COLUMNS.keys[8:]),
    ],
)
def test_columns_that_no_event_gives_are_refused(column: str, value: bytes) -> None:
    with pytest.raises(MalformedColumns):
        parse_columns(COLUMNS._replace(**{column: value}))
