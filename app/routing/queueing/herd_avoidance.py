"""Herd avoidance: routers with the same view do not send all their requests to one worker at once.

Routers read each other's decisions only after a lag. So each worker has its own order of routers,
and each router waits one lag for every router before it, until it has read their decisions. The
order is by rendezvous hash, so every router computes it alone, each router is first in line for its
share of the workers, and a router joining or leaving does not reorder the others.

This costs a few lags. It is done only while requests arrive in bursts (`BurstDetector`), since
requests that arrive one by one seldom meet another. It costs CPU time too, since a request that
waits its turn is planned again: two routers at their capacity carry 1.5 times as many requests as
one, without the wait (`BURST_SHARE` above 1) 1.7 times. The gain is larger: with three routers the
mean TTFT of the conversation trace at 4 times its speed on 8 workers is 279 ms, without the wait
365 ms (decisions read after 40 ms, `kvlane simulate --no-stagger`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from indexer.xxh3 import xxh3
from streams.records import Assigned, LogRecord

BURST_SHARE = 0.5
"""The share of requests within a lag of another one from which on routers are staggered."""
COMPARED_REQUESTS = 16
"""Requests that another one is compared with; those of a burst are not dispatched in sequence."""
BURST_WINDOW = 200
"""Requests over which this share is averaged."""
INITIAL_LAG_MS, MAX_LAG_MS = 5.0, 50.0
"""The lag before one was measured, and the longest that is waited for: a log that stalls for
seconds is no measure of the usual delay of its records."""
LAG_WINDOW = 20
"""Decisions over which the lag is averaged."""
ROUTER_EXPIRY_MS = 60_000
"""A router without a decision for so long is left out of the order."""
MAX_ROUTERS = 256
"""Bound on the names of routers; the one silent for the longest time is dropped first."""

NO_STAGGER: Mapping[str, float] = MappingProxyType({})


def routers_before(router: str, routers: Iterable[str], worker: str) -> int:
    """The number of routers before this one in the order of a worker."""
    own = _draw(router, worker)
    return sum(_draw(other, worker) < own for other in routers)


def stagger_by_worker(
    router: str, routers: Iterable[str], workers: Iterable[str], lag_ms: float
) -> dict[str, float]:
    """By worker, the delay of this router behind the first one."""
    all_routers = tuple(routers)
    return {worker: routers_before(router, all_routers, worker) * lag_ms for worker in workers}


def _draw(router: str, worker: str) -> tuple[int, str]:
    return xxh3(f"{router}\0{worker}".encode()), router


class BurstDetector:
    """Whether requests arrive in bursts, by the ledger, so that all routers agree.

    Assumed until the ledger shows otherwise: requests that waited for a deployment are a burst.
    """

    def __init__(self, lag_ms: float) -> None:
        self.lag_ms = lag_ms
        self._came_ms: deque[float] = deque(maxlen=COMPARED_REQUESTS)
        self._share = 1.0

    @property
    def is_bursty(self) -> bool:
        """Whether staggering is worth its time now."""
        return self._share >= BURST_SHARE

    def on_record(self, fact: LogRecord) -> None:
        """A record of the ledger was applied; decisions hold the arrival times of requests."""
        record = fact.record
        if not isinstance(record, Assigned) or record.attempt or record.phase == "decode":
            return  # not the first decision of its request
        came_ms = fact.timestamp_ms - record.held_ms
        is_near = any(abs(came_ms - other) <= self.lag_ms for other in reversed(self._came_ms))
        self._share += (is_near - self._share) / BURST_WINDOW
        self._came_ms.append(came_ms)


class HerdAvoidance:
    """The delays of one router, from the other routers and the lag with which it reads of them.

    Both come from the ledger; its own decisions are read back as late as those of others.
    """

    def __init__(self, router: str) -> None:
        self._router = router
        self._crowding = BurstDetector(INITIAL_LAG_MS)
        self._decided_ms: dict[str, int] = {}
        """By other router, the time of its last decision."""
        self._lag_ms = INITIAL_LAG_MS
        self._later: Mapping[str, float] = NO_STAGGER
        self._made_of: tuple[object, ...] = ()

    def on_record(self, fact: LogRecord) -> None:
        """A record of the ledger was applied; decisions name their router."""
        self._crowding.on_record(fact)
        record = fact.record
        if isinstance(record, Assigned) and record.router not in ("", self._router):
            self._decided_ms.pop(record.router, None)
            self._decided_ms[record.router] = fact.timestamp_ms
            if len(self._decided_ms) > MAX_ROUTERS:
                del self._decided_ms[next(iter(self._decided_ms))]

    def observe_lag(self, after_ms: float) -> None:
        """A decision of this router was read back `after_ms` after it was taken."""
        self._lag_ms += (min(after_ms, MAX_LAG_MS) - self._lag_ms) / LAG_WINDOW
        self._crowding.lag_ms = self._lag_ms

    def stagger_ms(self, workers: Iterable[str], version: int, now_ms: int) -> Mapping[str, float]:
        """See `RoutingState`. The same object for as long as the delays are the same.

        `version` changes whenever the workers do.
        """
        while self._decided_ms:
            name, at_ms = next(iter(self._decided_ms.items()))
            if now_ms - at_ms <= ROUTER_EXPIRY_MS:
                break
            del self._decided_ms[name]
        if not self._decided_ms or not self._crowding.is_bursty:
            return NO_STAGGER
        made_of = (frozenset(self._decided_ms), version, round(self._lag_ms))
        if made_of != self._made_of:
            routers = (self._router, *self._decided_ms)
            self._later = stagger_by_worker(
                self._router, routers, workers, float(round(self._lag_ms))
            )
            self._made_of = made_of
        return self._later
