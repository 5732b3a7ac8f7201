"""Cache events as engines publish them, blocks under opaque, engine-specific hashes; and their
estimate for engines that publish none.

The types follow vLLM's. Owns the rules for which of them concern a prefix index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvlane.indexer.block_hashes import Tokens, hash_blocks, token_array
from kvlane.indexer.events import Tier

EngineHash: TypeAlias = int | bytes
"""Hash of a block by its engine: unique within one engine process and group, of any form."""

PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Attention kinds whose blocks serve every later token; the others drop blocks from a window."""

_TIERS = {
    "": Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
}


class BlocksStored(NamedTuple):
    """Consecutive blocks were filled; the first one continues `parent`. `cache_salt`: may be given
    for a prompt's first block only; later ones inherit it and the adapter. `mm_hashes`: by block,
    of the multimodal objects in it."""

    block_hashes: Sequence[EngineHash]
    parent: EngineHash | None
    token_ids: Sequence[int]
    block_size: int
    medium: str = ""
    lora_name: str = ""
    cache_salt: str = ""
    mm_hashes: Sequence[Collection[int] | None] | None = None
    group: int = 0
    kind: str = ""
    locality: str = ""


class BlocksRemoved(NamedTuple):
    """One copy of each block was removed; the engine may hold other copies."""

    block_hashes: Sequence[EngineHash]
    medium: str = ""
    group: int = 0
    locality: str = ""


@dataclass(frozen=True, slots=True)  # a tuple without fields is false, and equals all others
class AllCleared:
    """The cache was emptied."""


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Earlier events are permanently lost; emitted by the reader of the event stream."""


@dataclass(frozen=True, slots=True)
class UnreadableEvent:
    """An event that could not be decoded; `is_known`: its type is one of those above."""

    is_known: bool


EngineEvent: TypeAlias = BlocksStored | BlocksRemoved | AllCleared | EventsLost | UnreadableEvent


def tier_of(medium: str) -> Tier:
    """The tier of a medium by its engine's name; EXTERNAL for an unknown one."""
    tier = _TIERS.get(medium)
    return _TIERS.get(medium.upper(), Tier.EXTERNAL) if tier is None else tier


def is_remote(event: BlocksStored | BlocksRemoved) -> bool:
    """Whether the blocks are in a cache outside the worker."""
    return bool(event.locality) and event.locality.upper() == "REMOTE"


def serves_prefixes(event: BlocksStored) -> bool:
    """Whether stored blocks serve later prompts on this worker: by locality and by attention kind,
    or by group if the kind is missing."""
    if is_remote(event):
        return False
    return event.kind in PREFIX_KINDS if event.kind else event.group == 0


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
