"""Tests of the estimated cache of an engine without events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlane.indexer.block_hashes import derive_secret, hash_blocks
from kvlane.indexer.cache_events.engine_events import BlocksRemoved, BlocksStored, EstimatedCache
from kvlane.indexer.cache_events.event_normalizer import EventNormalizer

SIZE = 2
prompts = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12)


def names(tokens: list[int], **more: str) -> list[int]:
    sequence: list[int] = hash_blocks(tokens, SIZE, **more).sequence.tolist()
    return sequence


def test_whole_blocks_are_stored_when_they_are_served() -> None:
    cache = EstimatedCache(SIZE, 10)
    assert cache.on_served([1, 2, 3, 4, 5]) == [
        BlocksStored(names([1, 2, 3, 4]), None, [1, 2, 3, 4], SIZE)
    ]


def test_only_new_blocks_are_stored() -> None:
    cache = EstimatedCache(SIZE, 10)
    cache.on_served([1, 2, 3, 4])
    whole = names([1, 2, 3, 4, 5, 6])
    assert cache.on_served([1, 2, 3, 4, 5, 6]) == [BlocksStored(whole[2:], whole[1], [5, 6], SIZE)]


def test_estimate_never_covers_the_whole_prompt() -> None:
    cache = EstimatedCache(SIZE, 10)
    assert cache.cached_tokens([1, 2, 3, 4]) == 0
    cache.on_served([1, 2, 3, 4])
    assert cache.cached_tokens([1, 2, 3, 4]) == 2
    assert cache.cached_tokens([1, 2, 3, 4, 5]) == 4
    assert cache.cached_tokens([1, 2, 9, 9, 5]) == 2
    assert cache.cached_tokens([1, 2, 3, 4, 5], cache_salt="t") == 0
    assert cache.cached_tokens([]) == 0
    cache.clear()
    assert cache.cached_tokens([1, 2, 3, 4, 5]) == 0


def test_stored_blocks_change_nothing() -> None:
    cache = EstimatedCache(SIZE, 10)
    cache.on_served([1, 2, 3, 4])
    assert cache.on_served([1, 2, 3, 4]) == []


def test_leaf_used_longest_ago_goes_first() -> None:
    cache = EstimatedCache(SIZE, 4)
    cache.on_served([1, 1, 2, 2])
    cache.on_served([3, 3, 4, 4])
    cache.on_served([1, 1])
    assert cache.on_served([5, 5])[0] == BlocksRemoved(names([1, 1, 2, 2])[1:])
    assert cache.on_served([6, 6])[0] == BlocksRemoved(names([3, 3, 4, 4])[1:])


def test_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = EstimatedCache(SIZE, 2)
    assert cache.on_served([1, 1, 2, 2, 3, 3]) == [
        BlocksStored(names([1, 1, 2, 2]), None, [1, 1, 2, 2], SIZE)
    ]


def test_adapter_and_salt_make_other_blocks() -> None:
    cache = EstimatedCache(SIZE, 10)
    cache.on_served([1, 1])
    assert cache.on_served([1, 1], lora_name="l", cache_salt="s") == [
        BlocksStored(names([1, 1], lora_name="l", cache_salt="s"), None, [1, 1], SIZE,
                     lora_name="l", cache_salt="s")
    ]  # fmt: skip


@given(many=prompts, blocks=st.integers(1, 6))
def test_bridge_follows_without_mismatches(many: list[list[int]], blocks: int) -> None:
    cache, bridge = EstimatedCache(SIZE, blocks), EventNormalizer(SIZE, derive_secret(b"s"))
    for prompt in many:
        bridge.on_events(cache.on_served(prompt), 0.0)
        assert bridge.held_blocks <= blocks
    counters = bridge.counters
    assert counters.orphans == counters.unknown_removed == counters.malformed == 0
