"""Tests of the view of cache events: effects of records, skipped ones, and snapshots."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.state.fleet import RETENTION_MS
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.indexer.epochs import CacheId, Overlap
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, Tier, encode_events
from kvlane.streams.ports import Partition
from kvlane.streams.records import Blocks, Heartbeat, LogRecord, Lost, Probe
from tests.harness.keyed_index import SECRET, local_hashes_of

EVENTS = Partition("kv-events", 5)
OURS, THEIRS = (SECRET._replace(fingerprint=name) for name in ("ours", "theirs"))


def blocks(
    *events: CacheEvent, worker: str = "w1", epoch: int = 7, at: int = 0, **over: Any
) -> Blocks:
    fields = {"hash_fingerprint": OURS.fingerprint, **encode_events(events)._asdict()} | over
    return Blocks(worker=worker, epoch=epoch, first_event_id=at, **fields)


def stored(*keys: int, position: int = 0, tier: Tier = Tier.DEVICE) -> CacheEvent:
    return CacheEvent(EventKind.STORED, tier, position, keys)


def removed(*keys: int) -> CacheEvent:
    return CacheEvent(EventKind.REMOVED, Tier.DEVICE, 0, keys)


def applied(*records: Any, view: KvIndexView | None = None, at_ms: int = 1000) -> KvIndexView:
    view = view or KvIndexView(OURS)
    first = view.position(EVENTS) or 0
    for n, record in enumerate(records, first):
        view.apply(EVENTS, [LogRecord(n, at_ms, record)], n + 1)
    return view


def held(view: KvIndexView, *keys: int) -> dict[tuple[str, int], int]:
    return {
        tuple(holder): overlap.total_blocks
        for holder, overlap in view.overlaps(local_hashes_of(keys)).items()
    }


def test_overlaps_are_the_leading_blocks_of_each_rank() -> None:
    view = applied(
        blocks(CLEARED, stored(1, 2, 3)), blocks(CLEARED, stored(1, 2), worker="w2", rank=1)
    )
    assert held(view, 1, 2, 3, 4) == {("w1", 0): 3, ("w2", 1): 2}
    assert held(view, 9, 2) == {}
    assert held(view) == {}


def test_tiers_continue_each_other() -> None:
    view = applied(blocks(stored(1, 2), stored(3, position=2, tier=Tier.HOST)))
    assert view.overlaps(local_hashes_of([1, 2, 3, 4])) == {CacheId("w1", 0): Overlap(2, 1)}


def test_removed_blocks_and_those_behind_them_no_longer_count() -> None:
    assert held(applied(blocks(stored(1, 2, 3), removed(2))), 1, 2, 3) == {("w1", 0): 1}


def test_lost_epoch_holds_nothing_and_stays_silent() -> None:
    view = applied(blocks(stored(1)), Lost(worker="w1", epoch=7), blocks(stored(1), at=1))
    assert held(view, 1) == {}
    assert held(applied(blocks(stored(1), epoch=8), view=view), 1) == {("w1", 0): 1}


def test_heartbeat_that_is_ahead_of_the_events_shows_that_some_are_missing() -> None:
    beat = Heartbeat(worker="w1", epoch=7, slot_offset=0, last_event_ids=(0,))
    view = applied(blocks(stored(1)), beat)
    assert held(view, 1) == {("w1", 0): 1}
    assert held(applied(Heartbeat(worker="w1", epoch=7, slot_offset=0, last_event_ids=(3,)),
                       view=view), 1) == {}  # fmt: skip


def test_malformed_columns_are_counted_and_skipped() -> None:
    view = applied(blocks(stored(1)), blocks(stored(2), at=1, keys=b"123"), Probe(by="r1"))
    assert view.skipped.malformed == 1
    assert held(view, 1) == {("w1", 0): 1}
    assert view.position(EVENTS) == 3


def test_keys_of_another_secret_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        view = applied(*(blocks(stored(1), at=n, hash_fingerprint="theirs") for n in range(50)))
    assert view.skipped.wrong_secret == 50
    assert view.wrong_secret_workers == ("w1",)
    assert held(view, 1) == {}
    assert [r.message.count("KVLANE_HASH_SECRET") for r in caplog.records] == [1]


def test_blocks_of_a_silent_worker_are_dropped_after_the_retention() -> None:
    view = applied(blocks(stored(1)), blocks(stored(1), worker="w2"))
    late = Heartbeat(worker="w2", epoch=7, slot_offset=0)
    assert held(applied(late, view=view, at_ms=1000 + RETENTION_MS), 1).keys() == {
        ("w1", 0),
        ("w2", 0),
    }
    assert held(applied(late, view=view, at_ms=1001 + RETENTION_MS), 1).keys() == {("w2", 0)}


RECORDS = st.one_of(
    st.builds(
        lambda keys, position, at, worker, epoch: blocks(
            stored(*keys, position=position), at=at, worker=worker, epoch=epoch
        ),
        st.lists(st.integers(1, 9), max_size=4), st.integers(0, 3), st.integers(0, 4),
        st.sampled_from(["w1", "w2"]), st.integers(1, 2),
    ),
    st.builds(lambda key, at: blocks(removed(key), CLEARED, at=at),
              st.integers(1, 9), st.integers(0, 4)),
    st.builds(lambda w, e: Lost(worker=w, epoch=e), st.sampled_from(["w1", "w2"]),
              st.integers(1, 2)),
)  # fmt: skip


@given(st.lists(RECORDS, max_size=20), st.integers(0, 20))
def test_snapshot_restores_the_same_state_at_any_point(records: list[Any], at: int) -> None:
    straight = applied(*records)
    first = applied(*records[:at])
    second = KvIndexView(OURS)
    second.restore(EVENTS, first.snapshot(EVENTS), first.position(EVENTS) or 0)
    applied(*records[at:], view=second)
    assert second.state_hash(EVENTS) == straight.state_hash(EVENTS)
    assert held(second, 1, 2, 3) == held(straight, 1, 2, 3)


def test_snapshot_under_another_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        KvIndexView(THEIRS).restore(EVENTS, applied(blocks(stored(1))).snapshot(EVENTS), 1)
    with pytest.raises(ValueError, match=r"truncated|decode"):
        KvIndexView(OURS).restore(EVENTS, b"", 1)


def test_dropped_partition_leaves_no_state() -> None:
    view = applied(blocks(stored(1)))
    view.forget(EVENTS)
    assert view.position(EVENTS) is None
    assert held(view, 1) == {}
