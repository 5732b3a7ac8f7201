"""Turns: routers that see the same do not send all they hold to the same worker at once.

They read of each other's decisions only after a while, the lag. So each worker has its own order of
routers, and each router waits for as many lags as there are others before it: by its turn it knows
what they sent. The order is by hash, so every router knows it without asking, each is first on its
share of the workers, and one that comes or goes moves nobody else past one another.

Turns cost a few lags. They are taken while requests come in bursts (`Crowding`), since of those
that come one by one few meet another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from indexer.xxh3 import xxh3
from streams.records import Assigned, Fact

BURSTS = 0.5
"""The share of requests that come within a lag of another, from which on turns are taken."""
RECENT = 16
"""Requests that another one is compared with: those of a burst are not sent one after the other."""
MEMORY = 200
"""Requests that this share is about."""


def turn_of(router: str, routers: Iterable[str], worker: str) -> int:
    """How many of the routers come before this one on a worker."""
    own = _draw(router, worker)
    return sum(_draw(other, worker) < own for other in routers)


def later_ms(
    router: str, routers: Iterable[str], workers: Iterable[str], lag_ms: float
) -> dict[str, float]:
    """By worker, by how much later than the first router this one counts on it."""
    all_routers = tuple(routers)
    return {worker: turn_of(router, all_routers, worker) * lag_ms for worker in workers}


def _draw(router: str, worker: str) -> tuple[int, str]:
    return xxh3(f"{router}\0{worker}".encode()), router


class Crowding:
    """Whether requests come in bursts, by the ledger: so that all routers say the same.

    They do until the ledger shows otherwise: where many wait for a deployment, it begins with one.
    """

    def __init__(self, lag_ms: float) -> None:
        self._lag_ms = lag_ms
        self._came_ms: deque[float] = deque(maxlen=RECENT)
        self._share = 1.0

    @property
    def is_crowded(self) -> bool:
        """Whether turns are worth their time now."""
        return self._share >= BURSTS

    def told(self, fact: Fact) -> None:
        """A record of the ledger; decisions say when their requests came, others nothing."""
        record = fact.record
        if not isinstance(record, Assigned) or record.attempt:
            return
        came_ms = fact.timestamp_ms - record.held_ms
        is_near = any(abs(came_ms - other_ms) <= self._lag_ms for other_ms in self._came_ms)
        self._share += (is_near - self._share) / MEMORY
        self._came_ms.append(came_ms)
