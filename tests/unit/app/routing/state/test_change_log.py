"""Tests of the log of changes since a position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.state.change_log import MIN_REMEMBERED_CHANGES, ChangeLog, TrackedDict


@given(st.lists(st.integers(1, MIN_REMEMBERED_CHANGES + 300), max_size=8), st.data())
def test_changes_are_the_recorded_ones_or_too_many(looks: list[int], data: st.DataObject) -> None:
    changes, noted, seen = ChangeLog[int](), list[int](), [0]
    for many in looks:
        for _ in range(many):
            changes.record(len(noted))
            noted.append(len(noted))
        seen.append(changes.count)
    count = data.draw(st.sampled_from(seen))
    found = changes.since(count)
    if found is None:
        assert len(noted) - count > MIN_REMEMBERED_CHANGES
    else:
        assert list(found) == noted[count:]
    assert len(changes._last) < 2 * MIN_REMEMBERED_CHANGES


def test_unreached_count_means_that_everything_is_read() -> None:
    changes = ChangeLog[str]()
    assert changes.since(5) is None
    assert changes.since(-1) is None
    assert changes.since(0) == ()


def test_unchanged_numbers_are_no_change() -> None:
    noted = TrackedDict()
    noted["a"] = 1.0
    noted["a"] = 1.0
    assert noted.changes.count == 1
    noted.discard("a")
    noted.discard("a")
    assert (noted, noted.changes.count) == ({}, 2)
