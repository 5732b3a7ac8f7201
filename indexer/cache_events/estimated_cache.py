"""Estimated cache of an engine that publishes no cache events, derived from the served requests.

Assumes LRU eviction of all whole blocks of prompts and answers, the last of a prompt first. Emits
the events that an engine would (`indexer/cache_events/engine_events.py`).
"""

from __future__ import annotations

from collections import OrderedDict

from kvlane.indexer.block_hashes import Tokens, hash_blocks, token_array
from kvlane.indexer.cache_events.engine_events import BlocksRemoved, BlocksStored, EngineEvent


class EstimatedCache:
    """Estimated cache of one rank: `blocks` blocks of `block_size` tokens."""

    def __init__(self, block_size: int, blocks: int) -> None:
        self._block_size = block_size
        self._capacity = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """Sequence hashes, least recently used first."""

    def clear(self) -> None:
        self._blocks.clear()

    def cached_tokens(self, tokens: Tokens, *, lora_name: str = "", cache_salt: str = "") -> int:
        """Prompt tokens that the cache would serve; the last one is always computed."""
        whole = (len(token_array(tokens)) - 1) // self._block_size
        hashes = hash_blocks(
            tokens, self._block_size, lora_name=lora_name, cache_salt=cache_salt
        ).sequence.tolist()
        held = next((i for i, name in enumerate(hashes) if name not in self._blocks), len(hashes))
        return max(min(held, whole), 0) * self._block_size

    def on_served(
        self, tokens: Tokens, *, lora_name: str = "", cache_salt: str = ""
    ) -> list[EngineEvent]:
        """Events after the engine has served these tokens, prompt and answer together."""
        column = token_array(tokens)
        hashes = hash_blocks(column, self._block_size, lora_name=lora_name, cache_salt=cache_salt)
        names = hashes.sequence.tolist()[: self._capacity]
        cached = next((i for i, name in enumerate(names) if name not in self._blocks), len(names))
        for name in names[:cached]:  # so that the next line does not evict them
            self._blocks.move_to_end(name)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(self._excess(names, cached))]
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        events: list[EngineEvent] = [BlocksRemoved(removed)] if removed else []
        if new := names[cached:]:
            span = column[cached * self._block_size : len(names) * self._block_size]
            parent = names[cached - 1] if cached else None
            events.append(
                BlocksStored(
                    new, parent, span.tolist(), self._block_size,
                    lora_name=lora_name, cache_salt=cache_salt,
                )
            )  # fmt: skip
        return events

    def _excess(self, names: list[int], cached: int) -> int:
        """Blocks to evict for those that are not cached."""
        return max(len(self._blocks) + len(names) - cached - self._capacity, 0)
