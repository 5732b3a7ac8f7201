"""Tests of the index, each rule by itself: in plain dicts, and in the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.indexer.epochs import CacheId, Overlap
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, Tier
from tests.harness.keyed_index import KeyedIndex
from workbench.reference_index import ReferenceIndex

ONE, TWO = CacheId("one", 0), CacheId("two", 0)
PROMPT = [11, 12, 13, 14]


AnyIndex: TypeAlias = ReferenceIndex | KeyedIndex
make: Callable[..., AnyIndex]


@pytest.fixture(scope="module", autouse=True, params=[ReferenceIndex, KeyedIndex])
def either(request: pytest.FixtureRequest) -> None:
    global make  # noqa: PLW0603 - hypothesis takes no fixtures
    make = request.param


def stored(*keys: int, at: int = 0, tier: Tier = Tier.DEVICE) -> CacheEvent:
    return CacheEvent(EventKind.STORED, tier, at, keys)


def removed(*keys: int, tier: Tier = Tier.DEVICE) -> CacheEvent:
    return CacheEvent(EventKind.REMOVED, tier, 0, keys)


class Log:
    """One partition's records, with ids that follow one another for each cache and epoch."""

    def __init__(self, index: AnyIndex | None = None) -> None:
        self.index = index or make()
        self.ids: dict[tuple[CacheId, int], int] = {}

    def add(self, *events: CacheEvent, holder: CacheId = ONE, epoch: int = 5) -> None:
        first = self.ids.get((holder, epoch), 0)
        self.ids[holder, epoch] = first + len(events)
        self.index.apply_events(0, holder, epoch, first, events)

    def overlap(self, holder: CacheId = ONE) -> Overlap:
        return self.index.match_prefix(PROMPT).get(holder, Overlap())


@pytest.fixture
def log() -> Log:
    return Log()


# --- answers -------------------------------------------------------------------------------------


def test_cache_holds_the_leading_blocks_it_stored(log: Log) -> None:
    log.add(stored(11, 12, 13))
    assert log.index.match_prefix(PROMPT) == {ONE: Overlap(device=3)}


def test_runs_that_follow_one_another_add_up(log: Log) -> None:
    log.add(stored(11, 12), stored(13, at=2))
    assert log.overlap() == Overlap(device=3)


def test_blocks_behind_a_gap_do_not_match(log: Log) -> None:
    log.add(stored(11, 12, 13, 14), removed(12))
    assert log.overlap() == Overlap(device=1)


def test_without_the_first_block_there_is_no_overlap(log: Log) -> None:
    log.add(stored(12, 13, at=1))
    assert log.index.match_prefix(PROMPT) == {}


def test_caches_are_distinguished_by_worker_and_rank(log: Log) -> None:
    log.add(stored(11, 12), holder=ONE)
    log.add(stored(11), holder=CacheId("one", 1))
    log.add(stored(11, 12, 13), holder=TWO)
    found = log.index.match_prefix(PROMPT)
    assert {holder: overlap.total_blocks for holder, overlap in found.items()} == {
        ONE: 2,
        CacheId("one", 1): 1,
        TWO: 3,
    }


def test_further_tier_continues_where_the_nearer_one_ends(log: Log) -> None:
    log.add(stored(11), stored(12, 13, at=1, tier=Tier.HOST), stored(14, at=3, tier=Tier.DISK))
    assert log.overlap() == Overlap(device=1, host=2, disk=1)


def test_search_never_returns_to_a_nearer_tier(log: Log) -> None:
    log.add(stored(11), stored(13, at=2), stored(12, at=1, tier=Tier.HOST))
    assert log.overlap() == Overlap(device=1, host=1)


def test_block_in_two_tiers_counts_in_the_nearer_one(log: Log) -> None:
    log.add(stored(11, 12), stored(11, 12, 13, tier=Tier.HOST))
    assert log.overlap() == Overlap(device=2, host=1)


def test_block_removed_from_one_tier_stays_in_the_other(log: Log) -> None:
    log.add(stored(11), stored(11, tier=Tier.HOST), removed(11))
    assert log.overlap() == Overlap(host=1)


# --- events --------------------------------------------------------------------------------------


def test_storing_twice_is_storing_once(log: Log) -> None:
    log.add(stored(11), stored(11), removed(11))
    assert log.overlap() == Overlap()


def test_removal_of_an_absent_block_changes_nothing(log: Log) -> None:
    log.add(removed(11), stored(11))
    assert log.overlap() == Overlap(device=1)


def test_cleared_empties_every_tier_of_its_rank_only(log: Log) -> None:
    log.add(stored(11), stored(12, at=1, tier=Tier.HOST))
    log.add(stored(11), holder=CacheId("one", 1))
    log.add(CLEARED)
    assert log.index.match_prefix(PROMPT) == {CacheId("one", 1): Overlap(device=1)}


@pytest.mark.parametrize("count", [700, 1500, 8192])
def test_one_event_may_bring_more_blocks_than_all_before(log: Log, count: int) -> None:
    keys = [n * 0x9E3779B97F4A7C15 % 2**64 for n in range(1, 301 + count)]
    log.add(stored(*keys[:300]))
    log.add(stored(*keys[300:], at=300))
    assert log.index.block_count(ONE) == 300 + count
    assert log.index.counters.rejected_blocks == 0


def test_blocks_beyond_the_bound_are_refused_and_counted() -> None:
    log = Log(make(max_blocks=3))
    log.add(stored(11, 12), stored(13, 14, at=2, tier=Tier.HOST), stored(11))
    assert log.overlap() == Overlap(device=2, host=1)
    assert log.index.counters.rejected_blocks == 1


# --- epochs --------------------------------------------------------------------------------------


def test_restarted_worker_loses_its_old_blocks(log: Log) -> None:
    log.add(stored(11, 12), epoch=5)
    log.add(stored(11), epoch=6)
    assert log.overlap() == Overlap(device=1)


def test_blocks_of_an_older_epoch_are_ignored(log: Log) -> None:
    log.add(stored(11), epoch=6)
    log.add(stored(12, at=1), epoch=5)
    assert log.overlap() == Overlap(device=1)
    assert log.index.counters.stale_events == 1


def test_lost_worker_holds_nothing(log: Log) -> None:
    log.add(stored(11))
    log.index.end_epoch(0, "one", 5)
    assert log.overlap() == Overlap()


def test_events_of_a_lost_epoch_are_ignored(log: Log) -> None:
    log.index.end_epoch(0, "one", 5)
    log.add(stored(11))
    assert log.overlap() == Overlap()


def test_epoch_after_a_lost_one_counts(log: Log) -> None:
    log.index.end_epoch(0, "one", 5)
    log.add(stored(11), epoch=6)
    assert log.overlap() == Overlap(device=1)


def test_losing_an_old_epoch_leaves_the_present_one(log: Log) -> None:
    log.add(stored(11), epoch=6)
    log.index.end_epoch(0, "one", 5)
    assert log.overlap() == Overlap(device=1)


def test_rank_of_a_lost_worker_is_gone_with_the_others(log: Log) -> None:
    log.add(stored(11), holder=CacheId("one", 1))
    log.index.end_epoch(0, "one", 5)
    assert log.index.match_prefix(PROMPT) == {}


# --- event ids -----------------------------------------------------------------------------------


def test_repeated_record_counts_once() -> None:
    index = make()
    index.apply_events(0, ONE, 5, 0, [stored(11)])
    index.apply_events(0, ONE, 5, 1, [removed(11)])
    index.apply_events(0, ONE, 5, 0, [stored(11)])
    assert index.match_prefix(PROMPT) == {}
    assert index.counters.duplicate_events == 1


def test_rest_of_a_partially_applied_record_counts() -> None:
    index = make()
    index.apply_events(0, ONE, 5, 0, [stored(11)])
    index.apply_events(0, ONE, 5, 0, [removed(11), stored(11, 12)])
    assert index.match_prefix(PROMPT) == {ONE: Overlap(device=2)}


def test_gap_drops_the_blocks_of_the_rank() -> None:
    index = make()
    index.apply_events(0, ONE, 5, 0, [CLEARED, stored(11, 12)])
    index.apply_events(0, ONE, 5, 3, [stored(11)])
    assert index.match_prefix(PROMPT) == {ONE: Overlap(device=1)}
    assert not index.is_complete(ONE)
    assert index.counters.gaps == 1


def test_heartbeat_reveals_a_missing_tail() -> None:
    index = make()
    index.apply_events(0, ONE, 5, 0, [CLEARED, stored(11)])
    index.on_heartbeat(0, ONE, 5, last_event_id=2)
    assert index.match_prefix(PROMPT) == {}


def test_heartbeat_of_a_known_state_changes_nothing() -> None:
    index = make()
    index.apply_events(0, ONE, 5, 0, [CLEARED, stored(11)])
    index.on_heartbeat(0, ONE, 5, last_event_id=1)
    index.on_heartbeat(0, ONE, 5, last_event_id=0)
    assert index.match_prefix(PROMPT) == {ONE: Overlap(device=1)}
    assert index.is_complete(ONE)


def test_log_may_begin_in_the_middle() -> None:
    index = make()
    index.apply_events(0, ONE, 5, 1000, [stored(11)])
    assert index.match_prefix(PROMPT) == {ONE: Overlap(device=1)}
    assert index.counters.gaps == 0


def test_cache_is_complete_from_cleared_on(log: Log) -> None:
    log.add(stored(11))
    before = log.index.is_complete(ONE)
    log.add(CLEARED)
    assert (before, log.index.is_complete(ONE)) == (False, True)


def test_ranks_count_their_ids_independently() -> None:
    index = make()
    index.apply_events(0, ONE, 5, 0, [stored(11)])
    index.apply_events(0, CacheId("one", 1), 5, 0, [stored(11)])
    assert index.counters.duplicate_events == 0


# --- state ---------------------------------------------------------------------------------------

changes = st.lists(
    st.tuples(
        st.sampled_from([ONE, TWO, CacheId("one", 1)]),
        st.integers(5, 6),
        st.one_of(
            st.builds(lambda at, n: stored(*PROMPT[at : at + n], at=at), st.integers(0, 3),
                      st.integers(1, 4)),
            st.builds(lambda key: stored(key, at=PROMPT.index(key), tier=Tier.HOST),
                      st.sampled_from(PROMPT)),
            st.builds(lambda key, tier: removed(key, tier=tier), st.sampled_from(PROMPT),
                      st.sampled_from(Tier)),
            st.just(CLEARED),
            st.none(),
        ),
    ),
    max_size=20,
)  # fmt: skip


def played(many: list[tuple[CacheId, int, CacheEvent | None]]) -> Log:
    """All changes; None stands for the loss of the epoch."""
    log = Log()
    for holder, epoch, event in many:
        if event is None:
            log.index.end_epoch(0, holder.worker, epoch)
        else:
            log.add(event, holder=holder, epoch=epoch)
    return log


@given(before=changes, after=changes)
def test_restored_index_continues_as_the_original(
    before: list[tuple[CacheId, int, CacheEvent | None]],
    after: list[tuple[CacheId, int, CacheEvent | None]],
) -> None:
    whole = played(before)
    half = played(before)
    restored = Log(make())
    restored.index.restore(0, half.index.snapshot(0))
    restored.ids = half.ids
    for log in (whole, restored):
        for holder, epoch, event in after:
            if event is None:
                log.index.end_epoch(0, holder.worker, epoch)
            else:
                log.add(event, holder=holder, epoch=epoch)
    assert restored.index.match_prefix(PROMPT) == whole.index.match_prefix(PROMPT)
    assert restored.index.state_hash(0) == whole.index.state_hash(0)
    assert restored.index.is_complete(ONE) == whole.index.is_complete(ONE)
    assert restored.index.cache_sizes() == whole.index.cache_sizes()
    for holder in whole.index.cache_sizes():
        for tier in Tier:
            assert restored.index.blocks_of(holder, tier) == whole.index.blocks_of(holder, tier)


def test_state_hash_does_not_depend_on_the_order() -> None:
    one, other = Log(), Log()
    one.add(stored(11, 12), stored(13, at=2, tier=Tier.HOST))
    other.add(stored(13, at=2, tier=Tier.HOST), stored(14, at=3), removed(14), stored(12, at=1))
    other.add(stored(11))
    assert one.index.state_hash(0) == other.index.state_hash(0) != 0


@pytest.mark.parametrize(
    ("holder", "event"),
    [
        (TWO, stored(11)),
        (CacheId("one", 1), stored(11)),
        (ONE, stored(11, tier=Tier.HOST)),
        (ONE, stored(12)),
    ],
    ids=["worker", "rank", "tier", "key"],
)
def test_state_hash_differs_for_different_states(holder: CacheId, event: CacheEvent) -> None:
    one, other = Log(), Log()
    one.add(stored(11))
    other.add(event, holder=holder)
    assert one.index.state_hash(0) != other.index.state_hash(0)


def test_state_hash_of_nothing_is_nothing(log: Log) -> None:
    log.add(stored(11), removed(11))
    assert log.index.state_hash(0) == log.index.state_hash(1) == 0


def test_forgetting_a_partition_leaves_the_others() -> None:
    index = make()
    index.apply_events(0, ONE, 5, 0, [stored(11)])
    index.apply_events(1, TWO, 5, 0, [stored(11)])
    index.drop_partition(0)
    assert index.match_prefix(PROMPT) == {TWO: Overlap(device=1)}


@pytest.mark.parametrize("cut", [0, 5, 20, -1])
def test_snapshot_that_is_cut_is_refused(log: Log, cut: int) -> None:
    log.add(stored(11))
    with pytest.raises(ValueError, match=r".+"):
        make().restore(0, log.index.snapshot(0)[:cut])


def test_snapshot_under_another_secret_is_refused() -> None:
    data = make(fingerprint="a").snapshot(0)
    with pytest.raises(ValueError, match="secret"):
        make(fingerprint="b").restore(0, data)
