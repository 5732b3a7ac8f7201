"""Tests of the event normalizer: events are counted, coalesced, numbered, announced again."""

from __future__ import annotations

import numpy as np
import pytest

from kvlane.indexer.block_hashes import derive_secret, local_hashes, prompt_keys
from kvlane.indexer.cache_events.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
    EventsLost,
    tier_of,
)
from kvlane.indexer.cache_events.event_normalizer import (
    EAGER_BATCH_BLOCKS,
    MAX_BATCH_DELAY_S,
    EventBatch,
    EventNormalizer,
)
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, Tier

SIZE = 2
SECRET = derive_secret(b"s")
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def keys(tokens: list[int], *, lora_name: str = "", cache_salt: str = "") -> tuple[int, ...]:
    local = local_hashes(tokens, SIZE, lora_name=lora_name, cache_salt=cache_salt)
    return tuple(prompt_keys(local, SECRET).tolist())


KEYS = keys(PROMPT)


def stored(
    hashes: list[EngineHash], tokens: list[int], parent: EngineHash | None = None, **more: object
) -> BlocksStored:
    return BlocksStored(hashes, parent, tokens, SIZE)._replace(**more)


WHOLE = stored([b"a", b"b", b"c", b"d"], PROMPT)


def bridge_after(*events: EngineEvent) -> EventNormalizer:
    bridge = EventNormalizer(SIZE, SECRET)
    bridge.on_events(events, 0.0)
    return bridge


def events_of(bridge: EventNormalizer) -> tuple[CacheEvent, ...]:
    batch = bridge.take_batch()
    return batch.events if batch else ()


# --- translation ---------------------------------------------------------------------------------


def test_stored_blocks_get_the_keys_of_their_prompt() -> None:
    assert events_of(bridge_after(WHOLE)) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 0, KEYS),)


def test_block_with_a_parent_gets_keys_of_the_whole_prefix() -> None:
    bridge = bridge_after(stored([1, 2], PROMPT[:4]))
    bridge.take_batch()
    bridge.on_events([stored([3, 4], PROMPT[4:], parent=2)], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 2, KEYS[2:]),)


def test_following_blocks_inherit_salt_and_adapter() -> None:
    first = stored([1], PROMPT[:2], lora_name="l", cache_salt="s")
    bridge = bridge_after(first, stored([2], PROMPT[2:4], parent=1))
    expected = keys(PROMPT[:4], lora_name="l", cache_salt="s")
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 0, expected),)


def test_multimodal_objects_are_part_of_the_key() -> None:
    bridge = bridge_after(stored([1], PROMPT[:2], mm_hashes=[{42}]))
    local = local_hashes(PROMPT[:2], SIZE, mm_hashes=[{42}])
    assert events_of(bridge)[0].keys == tuple(prompt_keys(local, SECRET).tolist())


def test_removed_blocks_are_named_by_their_keys() -> None:
    bridge = bridge_after(WHOLE)
    bridge.take_batch()
    bridge.on_events([BlocksRemoved([b"d", b"c"])], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.REMOVED, Tier.DEVICE, 0, (KEYS[3], KEYS[2])),)


def test_media_are_tiers_of_their_own() -> None:
    bridge = bridge_after(WHOLE, WHOLE._replace(medium="CPU"), BlocksRemoved([b"d"], medium="CPU"))
    assert [(e.kind, e.tier) for e in events_of(bridge)] == [
        (EventKind.STORED, Tier.DEVICE),
        (EventKind.STORED, Tier.HOST),
        (EventKind.REMOVED, Tier.HOST),
    ]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("", Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("cpu", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("CPU_TIER1", Tier.HOST),
        ("CPU_TIER2", Tier.DISK),
        ("NVME", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("S3", Tier.EXTERNAL),
    ],
)
def test_media_have_their_tiers(medium: str, tier: Tier) -> None:
    assert tier_of(medium) == tier


# --- references ----------------------------------------------------------------------------------


def test_copies_are_announced_once_and_removed_with_the_last_one() -> None:
    bridge = bridge_after(WHOLE, WHOLE, BlocksRemoved([b"d"]))
    assert [event.kind for event in events_of(bridge)] == [EventKind.STORED]
    bridge.on_events([BlocksRemoved([b"d"])], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.REMOVED, Tier.DEVICE, 0, KEYS[3:]),)


def test_two_engine_hashes_of_one_content_count_together() -> None:
    bridge = bridge_after(stored([1], PROMPT[:2]), stored([2], PROMPT[:2]), BlocksRemoved([1]))
    assert [event.kind for event in events_of(bridge)] == [EventKind.STORED]


def test_block_can_be_continued_while_any_tier_has_it() -> None:
    host = stored([1], PROMPT[:2], medium="CPU")
    bridge = bridge_after(stored([1], PROMPT[:2]), host, BlocksRemoved([1]))
    bridge.on_events([stored([2], PROMPT[2:4], parent=1)], 0.0)
    assert bridge.counters.orphans == 0


def test_hash_repeated_in_one_event_is_two_copies() -> None:
    twice = stored([1, 2, 1], PROMPT[:6])
    bridge = bridge_after(twice, BlocksRemoved([1]), BlocksRemoved([2]))
    assert bridge.held_blocks == 1
    bridge.on_events([BlocksRemoved([1])], 0.0)
    assert (bridge.held_blocks, bridge.counters.unknown_removed) == (0, 0)


def test_sum_0_has_the_key_1_and_is_continued_as_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    local = np.array([SECRET.start, 5], np.uint64)
    parts = iter([local[:1], local[1:]])
    monkeypatch.setattr(
        "kvlane.indexer.cache_events.event_normalizer.local_hashes", lambda *_, **__: next(parts)
    )
    bridge = bridge_after(stored([1], [0, 0]), stored([2], [0, 0], parent=1))
    expected = tuple(prompt_keys(local, SECRET).tolist())
    assert expected[0] == 1
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 0, expected),)


def test_removal_of_an_unknown_block_is_counted() -> None:
    bridge = bridge_after(WHOLE, BlocksRemoved([b"x"]), BlocksRemoved([b"a"], medium="CPU"))
    assert bridge.counters.unknown_removed == 2
    assert [event.kind for event in events_of(bridge)] == [EventKind.STORED]


def test_cleared_cache_is_empty() -> None:
    bridge = bridge_after(WHOLE, AllCleared())
    assert (events_of(bridge), bridge.held_blocks) == ((CLEARED,), 0)


def test_block_after_a_clear_has_no_parent() -> None:
    bridge = bridge_after(WHOLE, AllCleared(), stored([b"e"], [9, 9], parent=b"d"))
    assert bridge.counters.orphans == 1


# --- holes ---------------------------------------------------------------------------------------


def test_descendants_of_a_removed_block_are_removed_last_first() -> None:
    bridge = bridge_after(WHOLE)
    bridge.take_batch()
    bridge.on_events([BlocksRemoved([b"b"])], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.REMOVED, keys=(KEYS[3], KEYS[2], KEYS[1])),)
    assert bridge.held_blocks == 3, "the engine holds it still"


def test_removal_of_a_hidden_block_publishes_nothing() -> None:
    bridge = bridge_after(WHOLE, BlocksRemoved([b"b"]))
    bridge.take_batch()
    bridge.on_events([BlocksRemoved([b"c", b"d"])], 0.0)
    assert (bridge.take_batch(), bridge.held_blocks) == (None, 1)


def test_filled_gap_publishes_the_blocks_behind_it() -> None:
    bridge = bridge_after(WHOLE, BlocksRemoved([b"b"]))
    bridge.take_batch()
    bridge.on_events([stored([b"b"], PROMPT[2:4], parent=b"a")], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 1, KEYS[1:]),)


def test_hole_can_be_filled_under_another_hash() -> None:
    bridge = bridge_after(WHOLE, BlocksRemoved([b"b"]))
    bridge.take_batch()
    bridge.on_events([stored([1, 2], PROMPT[:4])], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 1, KEYS[1:]),)


def test_hole_behind_a_hole_stays_hidden() -> None:
    bridge = bridge_after(WHOLE, BlocksRemoved([b"b"]), BlocksRemoved([b"c"]))
    bridge.take_batch()
    bridge.on_events([stored([b"b"], PROMPT[2:4], parent=b"a")], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 1, KEYS[1:2]),)


def test_block_behind_a_gap_stays_hidden() -> None:
    bridge = bridge_after(WHOLE, BlocksRemoved([b"b"]))
    bridge.take_batch()
    bridge.on_events([stored([b"e"], [9, 9], parent=b"d")], 0.0)
    assert (bridge.take_batch(), bridge.counters.orphans) == (None, 0)


def test_blocks_that_only_continue_another_tier_stay_hidden() -> None:
    host = stored([b"a"], PROMPT[:2], medium="CPU")
    bridge = bridge_after(host, stored([b"b"], PROMPT[2:4], parent=b"a"))
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.HOST, 0, KEYS[:1]),)
    bridge.on_events([stored([b"a"], PROMPT[:2])], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 0, KEYS[:2]),)


def test_holes_of_lower_tiers_hide_nothing() -> None:
    bridge = bridge_after(WHOLE._replace(medium="CPU"))
    bridge.take_batch()
    bridge.on_events([BlocksRemoved([b"b"], medium="CPU")], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.REMOVED, Tier.HOST, 0, KEYS[1:2]),)


def test_only_published_blocks_are_removed() -> None:
    bridge = bridge_after(WHOLE)
    bridge.start_announcement(0.0, clear=True)
    bridge.continue_announcement(3, 0.0)
    bridge.take_batch()
    bridge.on_events([BlocksRemoved([b"b"])], 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.REMOVED, keys=(KEYS[2], KEYS[1])),)


def test_all_branches_behind_a_hole_come_and_go_with_it() -> None:
    bridge = bridge_after(WHOLE, stored([b"x"], [9, 9], parent=b"b"), BlocksRemoved([b"b"]))
    bridge.take_batch()
    bridge.on_events([stored([b"b"], PROMPT[2:4], parent=b"a")], 0.0)
    got = [key for event in events_of(bridge) for key in event.keys]
    assert set(got) == {*KEYS[1:], *keys([*PROMPT[:4], 9, 9])[1:]}
    assert got[0] == KEYS[1]


def test_hidden_block_is_not_published_again() -> None:
    bridge = bridge_after(WHOLE, BlocksRemoved([b"b"]))
    bridge.take_batch()
    bridge.start_announcement(0.0, clear=False)
    bridge.continue_announcement(100, 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 0, KEYS[:1]),)


def test_block_waits_for_its_unpublished_parent() -> None:
    bridge = bridge_after(WHOLE)
    bridge.start_announcement(0.0, clear=True)
    bridge.on_events([stored([b"e"], [9, 9], parent=b"d")], 0.0)
    assert events_of(bridge) == (CLEARED,)
    bridge.continue_announcement(100, 0.0)
    assert [event.keys for event in events_of(bridge)] == [keys([*PROMPT, 9, 9])]


# --- what is not passed on -----------------------------------------------------------------------


def test_block_with_an_unknown_parent_is_refused_and_the_mirror_announced() -> None:
    bridge = bridge_after(WHOLE)
    bridge.take_batch()
    bridge.on_events([stored([9], [9, 9], parent=b"never")], 0.0)
    assert (bridge.counters.orphans, bridge.is_announcing) == (1, True)
    assert bridge.take_batch() is None


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [1, 2, 3, 4], [-1, 2], [2**32, 1]])
def test_tokens_that_do_not_fill_the_blocks_are_refused(tokens: list[int]) -> None:
    bridge = bridge_after(stored([1], tokens))
    assert (bridge.counters.malformed, bridge.take_batch()) == (1, None)


def test_other_block_size_is_recorded_and_publishes_nothing() -> None:
    bridge = bridge_after(BlocksStored([1], None, [1, 2, 3], 3))
    assert (bridge.mismatched_block_size, bridge.take_batch()) == (3, None)


def test_placeholders_are_skipped() -> None:
    bridge = bridge_after(BlocksStored([1], None, [], 0))
    assert (bridge.counters.placeholders, bridge.take_batch()) == (1, None)
    assert bridge.mismatched_block_size is None


@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ({}, True),
        ({"group": 1}, False),
        ({"group": 1, "kind": "full_attention"}, True),
        ({"kind": "mla_attention"}, True),
        ({"kind": "sink_full_attention"}, True),
        ({"kind": "sliding_window"}, False),
        ({"locality": "LOCAL"}, True),
        ({"locality": "REMOTE"}, False),
    ],
)
def test_only_caches_that_serve_prefixes_here_are_indexed(
    more: dict[str, object], passes: bool
) -> None:
    bridge = bridge_after(WHOLE._replace(**more))
    assert (bridge.take_batch() is not None) == passes
    assert bridge.counters.other_caches == (not passes)


def test_removals_of_other_caches_are_no_mismatch() -> None:
    bridge = bridge_after(WHOLE._replace(group=1), BlocksRemoved([b"a"], group=1))
    assert bridge.counters.unknown_removed == 0


def test_equal_hashes_of_two_groups_are_two_blocks() -> None:
    second = WHOLE._replace(group=1, kind="full_attention")
    bridge = bridge_after(WHOLE, second, BlocksRemoved([b"d"], group=1))
    assert [event.kind for event in events_of(bridge)] == [EventKind.STORED]
    bridge.on_events([BlocksRemoved([b"d"])], 0.0)
    assert [event.kind for event in events_of(bridge)] == [EventKind.REMOVED]


# --- batches -------------------------------------------------------------------------------------


def test_neighbours_are_coalesced() -> None:
    bridge = bridge_after(
        stored([1], PROMPT[:2]),
        stored([2], PROMPT[2:4], parent=1),
        BlocksRemoved([2]),
        BlocksRemoved([1]),
        stored([3], [8, 8]),
    )
    assert [(e.kind, len(e.keys)) for e in events_of(bridge)] == [
        (EventKind.STORED, 2),
        (EventKind.REMOVED, 2),
        (EventKind.STORED, 1),
    ]


def test_stores_of_other_positions_or_tiers_are_rows_of_their_own() -> None:
    bridge = bridge_after(
        stored([1], PROMPT[:2]), stored([2], [9, 9]), stored([3], [8, 8], parent=2, medium="CPU")
    )
    assert [(e.tier, e.position) for e in events_of(bridge)] == [
        (Tier.DEVICE, 0),
        (Tier.DEVICE, 0),
        (Tier.HOST, 1),
    ]


def test_event_ids_follow_one_another() -> None:
    bridge = bridge_after(WHOLE, BlocksRemoved([b"d"]))
    first = bridge.take_batch()
    bridge.on_events([BlocksRemoved([b"c"])], 0.0)
    second = bridge.take_batch()
    assert first is not None
    assert second is not None
    assert (first.first_event_id, second.first_event_id, bridge.next_event_id) == (0, 2, 3)


def test_batch_is_cut_where_it_is_full() -> None:
    bridge = bridge_after(WHOLE, BlocksRemoved([b"d"]))
    assert bridge.take_batch(3) == EventBatch(
        0, (CacheEvent(EventKind.STORED, Tier.DEVICE, 0, KEYS[:3]),)
    )
    assert bridge.take_batch(3) == EventBatch(
        1,
        (
            CacheEvent(EventKind.STORED, Tier.DEVICE, 3, KEYS[3:]),
            CacheEvent(EventKind.REMOVED, keys=KEYS[3:]),
        ),
    )
    assert bridge.take_batch(3) is None


def test_few_blocks_wait_for_a_batch_and_many_do_not() -> None:
    bridge = EventNormalizer(SIZE, SECRET)
    assert bridge.batch_due_at() is None
    bridge.on_events([WHOLE], 7.0)
    bridge.on_events([BlocksRemoved([b"d"])], 7.004)
    assert bridge.batch_due_at() == 7.0 + MAX_BATCH_DELAY_S
    many = list(range(EAGER_BATCH_BLOCKS))
    bridge.on_events([stored([*many], [t for n in many for t in (n, n)])], 7.004)
    assert bridge.batch_due_at() == 7.0


def test_batch_delay_restarts_after_a_batch_was_taken() -> None:
    many = list(range(EAGER_BATCH_BLOCKS))
    bridge = bridge_after(stored([*many], [t for n in many for t in (n, n)]))
    bridge.take_batch()
    bridge.on_events([BlocksRemoved([5])], 9.0)
    assert bridge.batch_due_at() == 9.0 + MAX_BATCH_DELAY_S


def test_announcements_are_batched_like_events() -> None:
    bridge = bridge_after(WHOLE)
    bridge.take_batch()
    bridge.start_announcement(0.0, clear=False)
    bridge.continue_announcement(1, 9.0)
    assert bridge.batch_due_at() == 9.0 + MAX_BATCH_DELAY_S


# --- announcing again ----------------------------------------------------------------------------


def test_mirror_is_announced_again_in_runs() -> None:
    bridge = bridge_after(WHOLE)
    bridge.take_batch()
    bridge.start_announcement(0.0, clear=False)
    bridge.continue_announcement(100, 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 0, KEYS),)


def test_block_removed_in_the_meantime_is_not_published() -> None:
    bridge = bridge_after(WHOLE)
    bridge.take_batch()
    bridge.start_announcement(0.0, clear=False)
    bridge.continue_announcement(2, 0.0)
    bridge.on_events([BlocksRemoved([b"d"])], 0.0)
    bridge.continue_announcement(2, 0.0)
    assert [event.keys for event in events_of(bridge)] == [KEYS[:2], KEYS[3:], KEYS[2:3]]


def test_too_much_pending_is_replaced_by_the_mirror() -> None:
    bridge = EventNormalizer(SIZE, SECRET, max_pending=3)
    bridge.on_events([WHOLE, BlocksRemoved([b"d"])], 0.0)
    assert (events_of(bridge), bridge.counters.overflows) == ((CLEARED,), 1)
    bridge.continue_announcement(100, 0.0)
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 0, KEYS[:3]),)


def test_events_after_an_overflow_are_published_again() -> None:
    bridge = EventNormalizer(SIZE, SECRET, max_pending=3)
    bridge.on_events([WHOLE], 0.0)
    bridge.on_events([stored([b"x"], [9, 9])], 0.0)
    assert [event.kind for event in events_of(bridge)] == [EventKind.CLEARED, EventKind.STORED]
    assert bridge.counters.overflows == 1


def test_current_announcement_is_not_restarted_for_every_orphan() -> None:
    orphan = stored([9], [9, 9], parent=b"never")
    bridge = bridge_after(WHOLE, orphan)
    bridge.continue_announcement(3, 0.0)
    bridge.on_events([orphan], 0.0)
    bridge.continue_announcement(1, 0.0)
    assert not bridge.is_announcing


def test_all_blocks_are_in_doubt_after_lost_events() -> None:
    bridge = bridge_after(WHOLE)
    bridge.take_batch()
    bridge.on_events([EventsLost()], 0.0)
    bridge.continue_announcement(100, 0.0)
    assert events_of(bridge) == (CLEARED,)
    assert (bridge.counters.gaps, bridge.held_blocks) == (1, 0)


def test_block_continued_after_lost_events_confirms_its_prefix() -> None:
    bridge = bridge_after(WHOLE, EventsLost())
    events_of(bridge)
    bridge.on_events([stored([b"e"], [9, 9], parent=b"c")], 0.0)
    got = keys([*PROMPT[:6], 9, 9])
    assert events_of(bridge) == (CacheEvent(EventKind.STORED, Tier.DEVICE, 0, got),)
    assert bridge.counters.orphans == 0
    bridge.on_events([BlocksRemoved([b"e"]), BlocksRemoved([b"c"])], 0.0)
    assert [sorted(event.keys) for event in events_of(bridge)] == [sorted([got[3], got[2]])]


def test_block_removed_after_lost_events_is_not_confirmed() -> None:
    bridge = bridge_after(WHOLE, EventsLost(), BlocksRemoved([b"b"]))
    events_of(bridge)
    bridge.on_events([stored([b"e"], [9, 9], parent=b"c")], 0.0)
    assert events_of(bridge) == ()
    assert (bridge.counters.orphans, bridge.counters.unknown_removed) == (1, 0)


def test_block_in_doubt_after_two_losses_is_dropped() -> None:
    bridge = bridge_after(WHOLE, EventsLost(), EventsLost())
    events_of(bridge)
    bridge.on_events([stored([b"e"], [9, 9], parent=b"d")], 0.0)
    assert bridge.counters.orphans == 1


def test_adapter_and_salt_are_confirmed_with_their_blocks() -> None:
    salted = stored([b"a", b"b"], PROMPT[:4], lora_name="x", cache_salt="t")
    bridge = bridge_after(salted, EventsLost())
    events_of(bridge)
    bridge.on_events([stored([b"c"], PROMPT[4:6], parent=b"b")], 0.0)
    (event,) = events_of(bridge)
    assert event.keys == keys(PROMPT[:6], lora_name="x", cache_salt="t")


def test_epoch_begins_with_cleared_and_id_0() -> None:
    bridge = bridge_after(WHOLE)
    bridge.take_batch()
    bridge.start_epoch(0.0)
    assert bridge.take_batch() == EventBatch(0, (CLEARED,))
    bridge.continue_announcement(4, 0.0)
    assert [event.keys for event in events_of(bridge)] == [KEYS]
