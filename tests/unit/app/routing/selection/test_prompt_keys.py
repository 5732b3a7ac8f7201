"""Tests of the keys of a request's prompt: those under which workers publish its blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.indexer.block_hashes import derive_secret, prompt_keys
from kvlane.indexer.cache_events.engine_events import BlocksStored
from kvlane.indexer.cache_events.event_normalizer import EventNormalizer
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.request import BlockExtraInfo, Hints, MmObject, MmRoutingInfo, Request

SECRET = derive_secret(b"test")
TOKENS = list(range(100, 142))
SIZE = 4


def keys(taken: bytes = b"", **over: Any) -> list[int]:
    fields = {"id": "a", "token_ids": pack_tokens(TOKENS)} | over
    local = PromptHashes(Request(**fields), taken).local_hashes(SIZE)
    found: list[int] = prompt_keys(local, SECRET).tolist()
    return found


def published(tokens: list[int], **over: Any) -> list[int]:
    """What a worker says it stores for these tokens."""
    bridge = EventNormalizer(SIZE, SECRET)
    blocks = len(tokens) // SIZE
    stored = BlocksStored(range(blocks), None, tokens[: blocks * SIZE], SIZE, **over)
    bridge.on_events([stored], 0.0)
    batch = bridge.take_batch()
    assert batch is not None
    return [key for event in batch.events for key in event.keys]


def test_prompt_has_the_keys_that_its_worker_publishes() -> None:
    assert keys() == published(TOKENS)
    assert len(keys()) == 10, "the tail is no block"


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ({"cache_salt": "tenant"}, {"cache_salt": "tenant"}),
        ({"hints": Hints(lora_name="adapter")}, {"lora_name": "adapter"}),
    ],
)
def test_salt_and_adapter_separate_prompts(sent: dict[str, Any], stored: dict[str, str]) -> None:
    assert keys(**sent) == published(TOKENS, **stored)
    assert not set(keys(**sent)) & set(keys())


def test_shown_tokens_belong_to_the_computed_prefix() -> None:
    assert keys(pack_tokens([7, 8])) == published([*TOKENS, 7, 8])
    assert PromptHashes(Request(id="a", token_ids=pack_tokens([1])), pack_tokens([2])).tokens == 2


def test_routing_tokens_and_their_block_contents_replace_the_prompt() -> None:
    image = BlockExtraInfo(mm_objects=(MmObject(mm_hash=9, offsets=((0, 4),)),))
    info = MmRoutingInfo(
        routing_token_ids=pack_tokens(list(range(8))), block_mm_infos=(None, image)
    )
    assert keys(mm_routing_info=info) == published(list(range(8)), mm_hashes=[None, [9]])


def test_prompt_that_cannot_be_hashed_has_no_overlap() -> None:
    assert keys(prompt_embeds="AAAA") == []
    assert keys(pack_tokens(TOKENS), token_ids=b"") == []
    assert keys(token_ids=b"abc") == []
    image = BlockExtraInfo(mm_objects=(MmObject(mm_hash=2**64),))
    info = MmRoutingInfo(routing_token_ids=pack_tokens(TOKENS), block_mm_infos=(image,))
    assert keys(mm_routing_info=info) == []


def test_hashes_are_made_once_for_each_block_size() -> None:
    prompt = PromptHashes(Request(id="a", token_ids=np.arange(64, dtype="<u4").tobytes()))
    assert prompt.local_hashes(16) is prompt.local_hashes(16)
    assert len(prompt.local_hashes(8)) == 8
