"""Cache events as engines give them: blocks under hashes of the engine's own, opaque to others.

Owns the shapes, which follow vLLM's, and the rules that say what of them concerns a prefix index:
kinds of attention, media, localities. Wire formats are not known here; `indexer/bridge.py` turns
these events into canonical ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from indexer.events import Tier

EngineHash: TypeAlias = int | bytes
"""A block, by its engine: unique within one life of it and one group, of any form."""

PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache in which a block serves every later token; others forget."""

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
    """Blocks that follow one another were filled; the first one continues `parent`.

    `cache_salt` may be given for a prompt's first block only: what continues it inherits it, and
    the adapter, too. `mm_hashes`: for each block the multimodal objects in it.
    """

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
    """One copy of each of these blocks is gone; an engine may hold others."""

    block_hashes: Sequence[EngineHash]
    medium: str = ""
    group: int = 0
    locality: str = ""


@dataclass(frozen=True, slots=True)  # a tuple without fields is false, and equals all others
class AllCleared:
    """The cache was emptied."""


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events that came before what follows are lost for good; said by who reads them."""


EngineEvent: TypeAlias = BlocksStored | BlocksRemoved | AllCleared | EventsLost


def tier_of(medium: str) -> Tier:
    """The tier of a medium, by the names engines use; unknown ones are far away."""
    tier = _TIERS.get(medium)
    return _TIERS.get(medium.upper(), Tier.EXTERNAL) if tier is None else tier


def is_remote(event: BlocksStored | BlocksRemoved) -> bool:
    """Whether the blocks are in a cache of somebody else."""
    return bool(event.locality) and event.locality.upper() == "REMOTE"


def concerns_prefixes(event: BlocksStored) -> bool:
    """Whether stored blocks serve later prompts, here: by locality, and by kind, else by group."""
    if is_remote(event):
        return False
    return event.kind in PREFIX_KINDS if event.kind else event.group == 0
