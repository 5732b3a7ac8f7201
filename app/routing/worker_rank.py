"""One rank of one epoch of a worker: what a request is placed on."""

from __future__ import annotations

from typing import NamedTuple


class WorkerRank(NamedTuple):
    """A data-parallel rank of one epoch of a worker."""

    worker: str
    epoch: int
    rank: int = 0
