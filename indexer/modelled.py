"""The cache of an engine that says nothing about it, guessed from what it serves.

Assumes what most engines do: every whole block of a prompt and its answer is kept, the one used
longest ago goes first, and of a prompt the last one. Gives the same events as an engine would
(`indexer/engine_events.py`), so everything behind the bridge is the same for modelled caches.
"""

from __future__ import annotations

from collections import OrderedDict

from indexer.engine_events import BlocksRemoved, BlocksStored, EngineEvent
from indexer.hashing import Tokens, hash_blocks, token_column


class ModelledCache:
    """The guess for one rank: `blocks` blocks of `block_size` tokens."""

    def __init__(self, block_size: int, blocks: int) -> None:
        self._block_size = block_size
        self._capacity = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """Sequence hashes, the one used longest ago first."""

    def clear(self) -> None:
        """The engine has begun anew."""
        self._blocks.clear()

    def cached_tokens(self, tokens: Tokens, *, lora_name: str = "", cache_salt: str = "") -> int:
        """How many tokens of a prompt would come from the cache: not its last one, in any case."""
        whole = (len(token_column(tokens)) - 1) // self._block_size
        hashes = hash_blocks(
            tokens, self._block_size, lora_name=lora_name, cache_salt=cache_salt
        ).sequence.tolist()
        held = next((i for i, name in enumerate(hashes) if name not in self._blocks), len(hashes))
        return max(min(held, whole), 0) * self._block_size

    def serve(
        self, tokens: Tokens, *, lora_name: str = "", cache_salt: str = ""
    ) -> list[EngineEvent]:
        """What changes when the engine has served these tokens, prompt and answer together."""
        column = token_column(tokens)
        hashes = hash_blocks(column, self._block_size, lora_name=lora_name, cache_salt=cache_salt)
        names = hashes.sequence.tolist()[: self._capacity]
        cached = next((i for i, name in enumerate(names) if name not in self._blocks), len(names))
        for name in names[:cached]:  # out of the way of the next line
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
        """Blocks that have to go for the ones that are not cached."""
        return max(len(self._blocks) + len(names) - cached - self._capacity, 0)
