"""LoRA adapters: the workers that serve one, and the placement of one that is not loaded yet.

An adapter that no worker's card names is given to as few of the loading workers as its requests
need: the first by rendezvous hashing, so that all routers load it on the same workers, and a worker
that comes or goes moves only its own adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from kvlane.indexer.xxh3 import xxh3
from kvlane.streams.records import EngineConfig

DEFAULT_RUNS_PER_WORKER = 32
"""Open runs of an adapter per worker that loads it, for engines that report no limit on concurrent
runs."""

T = TypeVar("T")


def can_serve(config: EngineConfig, adapter: str) -> bool:
    return adapter in (config.lora_names or ()) or bool(config.max_loras)


def rendezvous_order(adapter: str, workers: Sequence[str]) -> list[str]:
    """The workers in the order in which they are to load an adapter."""
    return sorted(workers, key=lambda worker: (_weight(adapter, worker), worker), reverse=True)


def placement(
    adapter: str, configs: Mapping[str, EngineConfig], open_runs: int, unavailable: frozenset[str]
) -> frozenset[str]:
    """The workers for the requests of an adapter: those that have it by their cards, and as many
    others as its `open_runs` need, without `unavailable` ones."""
    having = {w for w, config in configs.items() if adapter in (config.lora_names or ())}
    loading = [w for w in configs if w not in having | unavailable and configs[w].max_loras]
    homes, left = having - unavailable, open_runs
    for worker in having:
        left -= configs[worker].max_num_seqs or DEFAULT_RUNS_PER_WORKER
    for worker in rendezvous_order(adapter, loading):
        if homes and left < 0:
            break
        homes.add(worker)
        left -= configs[worker].max_num_seqs or DEFAULT_RUNS_PER_WORKER
    return frozenset(homes)


@lru_cache(maxsize=1 << 14)
def _weight(adapter: str, worker: str) -> int:
    return xxh3(f"{adapter}\0{worker}".encode())
