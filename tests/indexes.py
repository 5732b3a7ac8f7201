"""The fast index under the reference's interface: events and keys of any choice in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexer.events import Event, encode
from indexer.index import Index
from indexer.keys import LOOPBACK_SECRET, KeySecret, derive
from indexer.lives import Holder, Overlap

SECRET = derive(LOOPBACK_SECRET)
M64 = (1 << 64) - 1


def local_of(keys: Sequence[int], secret: KeySecret = SECRET) -> NDArray[np.uint64]:
    """Hashes of blocks whose prefixes have these keys: what a key is made of can be undone."""
    first, second = pow(secret.first, -1, 1 << 64), pow(secret.second, -1, 1 << 64)
    local, before = [], 0
    for position, key in enumerate(keys):
        mixed = (key - before) * second & M64
        mixed = (mixed ^ (mixed >> 32)) * first & M64
        local.append(mixed ^ (secret.start + position * secret.step & M64))
        before = key
    return np.array(local, np.uint64)


class FastIndex(Index):
    """See the module."""

    def __init__(
        self, *, max_blocks: int = 1 << 24, fingerprint: str = "", scans: bool = False
    ) -> None:
        secret = SECRET._replace(fingerprint=fingerprint)
        super().__init__(secret, max_blocks=max_blocks, scans=scans)

    def apply(  # type: ignore[override]
        self, partition: int, holder: Holder, epoch: int, first: int, events: Sequence[Event]
    ) -> None:
        super().apply(partition, holder, epoch, first, encode(events))

    def match(  # type: ignore[override]
        self, keys: Sequence[int]
    ) -> dict[Holder, Overlap]:
        return super().match(local_of(keys))


class ScanningIndex(FastIndex):
    """The same where no cache is believed to be closed: logs may have holes of any kind."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, scans=True)
