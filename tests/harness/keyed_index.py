"""The index with the interface of the reference index: arbitrary keys in place of hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.block_hashes import LOOPBACK_SECRET, KeySecret, derive_secret
from kvlane.indexer.epochs import CacheId, Overlap
from kvlane.indexer.events import CacheEvent, encode_events
from kvlane.indexer.index import Index

SECRET = derive_secret(LOOPBACK_SECRET)
M64 = (1 << 64) - 1


def local_hashes_of(keys: Sequence[int], secret: KeySecret = SECRET) -> NDArray[np.uint64]:
    """Block hashes whose prefixes have these keys; inverts the computation of a key."""
    first, second = pow(secret.first, -1, 1 << 64), pow(secret.second, -1, 1 << 64)
    local, before = [], 0
    for position, key in enumerate(keys):
        mixed = (key - before) * second & M64
        mixed = (mixed ^ (mixed >> 32)) * first & M64
        local.append(mixed ^ (secret.start + position * secret.step & M64))
        before = key
    return np.array(local, np.uint64)


class KeyedIndex(Index):
    """An index that takes keys."""

    def __init__(
        self, *, max_blocks: int = 1 << 24, fingerprint: str = "", scans: bool = False
    ) -> None:
        secret = SECRET._replace(fingerprint=fingerprint)
        super().__init__(secret, max_blocks=max_blocks, scan_all=scans)

    def apply_events(  # type: ignore[override]
        self, partition: int, holder: CacheId, epoch: int, first: int, events: Sequence[CacheEvent]
    ) -> None:
        super().apply_events(partition, holder, epoch, first, encode_events(events))

    def match_prefix(  # type: ignore[override]
        self, keys: Sequence[int]
    ) -> dict[CacheId, Overlap]:
        return super().match_prefix(local_hashes_of(keys))


class ScanningIndex(KeyedIndex):
    """The same without the assumption of closed sets: logs may have any gaps."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, scans=True)
