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
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from indexer.xxh3 import xxh3
from streams.records import Assigned, Fact

BURSTS = 0.5
"""The share of requests that come within a lag of another, from which on turns are taken."""
RECENT = 16
"""Requests that another one is compared with: those of a burst are not sent one after the other."""
MEMORY = 200
"""Requests that this share is about."""
FIRST_LAG_MS, LONGEST_LAG_MS = 5.0, 50.0
"""The lag before one was measured, and the longest that is waited for: a log that stands still for
seconds says nothing of how late its records mostly are."""
LAG_MEMORY = 20
"""Decisions that the lag is about."""
SILENT_MS = 60_000
"""A router that decided nothing for so long takes no turns."""
MOST_ROUTERS = 256
"""Names that are remembered; the one that was silent for the longest time is forgotten."""

NOT_LATER: Mapping[str, float] = MappingProxyType({})


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
        self.lag_ms = lag_ms
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
        is_near = any(abs(came_ms - other) <= self.lag_ms for other in reversed(self._came_ms))
        self._share += (is_near - self._share) / MEMORY
        self._came_ms.append(came_ms)


class Turns:
    """One router's turns: which other ones there are, and how late it reads of them.

    Both are learned from the ledger; its own decisions come back as late as those of others do.
    """

    def __init__(self, router: str) -> None:
        self._router = router
        self._crowding = Crowding(FIRST_LAG_MS)
        self._decided_ms: dict[str, int] = {}
        """By name of another router, when it decided last."""
        self._lag_ms = FIRST_LAG_MS
        self._later: Mapping[str, float] = NOT_LATER
        self._made_of: tuple[object, ...] = ()

    def told(self, fact: Fact) -> None:
        """A record of the ledger; decisions say who is there and when requests come."""
        self._crowding.told(fact)
        record = fact.record
        if isinstance(record, Assigned) and record.router not in ("", self._router):
            self._decided_ms.pop(record.router, None)
            self._decided_ms[record.router] = fact.timestamp_ms
            if len(self._decided_ms) > MOST_ROUTERS:
                del self._decided_ms[next(iter(self._decided_ms))]

    def read_back(self, after_ms: float) -> None:
        """A decision of this router was in the ledger and read so long after it was taken."""
        self._lag_ms += (min(after_ms, LONGEST_LAG_MS) - self._lag_ms) / LAG_MEMORY
        self._crowding.lag_ms = self._lag_ms

    def later_ms(self, workers: Iterable[str], version: int, now_ms: int) -> Mapping[str, float]:
        """See `View`. The same object for as long as it says the same.

        `version`: another one whenever the workers are others.
        """
        while self._decided_ms:
            name, at_ms = next(iter(self._decided_ms.items()))
            if now_ms - at_ms <= SILENT_MS:
                break
            del self._decided_ms[name]
        if not self._decided_ms or not self._crowding.is_crowded:
            return NOT_LATER
        made_of = (frozenset(self._decided_ms), version, round(self._lag_ms))
        if made_of != self._made_of:
            routers = (self._router, *self._decided_ms)
            self._later = later_ms(self._router, routers, workers, float(round(self._lag_ms)))
            self._made_of = made_of
        return self._later
