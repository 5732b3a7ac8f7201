"""One rank of one epoch of a worker, the target of a request."""

from __future__ import annotations

from typing import NamedTuple


class WorkerRank(NamedTuple):
    """A data-parallel rank of one epoch of a worker."""

    worker: str
    epoch: int
    rank: int = 0
