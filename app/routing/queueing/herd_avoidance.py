"""Herd avoidance: routers with the same view do not send all their requests to one worker at once.

Routers read each other's decisions only after a lag. So each worker has its own order of routers
(by rendezvous hash, which each computes alone), and each router waits one lag for every router
before it, until it has read their decisions. This costs a few lags, and CPU time, so it is done
only while requests arrive in bursts (`BurstDetector`; docs/benchmarks.md has figures).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from kvlane.indexer.xxh3 import xxh3
from kvlane.streams.records import Assigned, LogRecord

BURST_WINDOW = 64
"""Requests over which the number of those that arrive together is averaged."""
BURST_FACTOR = 2.0
"""Prefill that arrives within a lag, per worker and in multiples of the lag, from which on routers
are staggered. 1 staggers too often (eight routers of agents), 4 too seldom (a long lag)."""
MIN_REQUESTS = 30
"""Requests before which a burst is assumed: those that waited for a deployment arrive together."""
MAX_INTERVALS = 32
"""Bound on the intervals of arrival that are remembered; requests are decided out of order."""
LAG_TOLERANCE = 0.25
"""Share by which the lag has to change until the intervals do, which makes all of them new."""
INITIAL_LAG_MS, MAX_LAG_MS = 5.0, 50.0
"""The lag before one was measured, and the longest that is waited for."""
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
    """The number of interactive requests that arrive within a lag, by the ledger."""

    def __init__(self, lag_ms: float) -> None:
        self.lag_ms = lag_ms
        self._interval_ms = max(round(lag_ms), 1)
        self._arrived: OrderedDict[int, int] = OrderedDict()
        """Requests by interval of arrival."""
        self._others: deque[int] = deque(maxlen=BURST_WINDOW)
        """By request, the number of others in its interval: twice those before it, since those
        after it are as many, in the mean."""
        self._sum = 0
        """Their sum: each plan asks for the mean."""

    def is_bursty(self, prefill_ms: float, workers: int) -> bool:
        """Whether the requests of one lag bring more prefill than `BURST_FACTOR` times the capacity
        of the `workers` that compute prompts. `prefill_ms`: mean prefill of a request."""
        if len(self._others) < MIN_REQUESTS:
            return True
        arriving_ms = self._sum / len(self._others) * prefill_ms
        return arriving_ms > BURST_FACTOR * workers * self._interval_ms

    def on_record(self, log_record: LogRecord) -> None:
        record = log_record.record
        if type(record) is not Assigned or record.attempt or record.phase == "decode":
            return  # not the first decision of its request
        if record.service_class == "batch":
            return  # dispatched in groups, whenever they arrived
        lag_ms = max(round(self.lag_ms), 1)
        if abs(lag_ms - self._interval_ms) > LAG_TOLERANCE * self._interval_ms:
            self._interval_ms = lag_ms
            self._arrived.clear()
        interval = (log_record.timestamp_ms - record.held_ms) // self._interval_ms
        before = self._arrived.get(interval, 0)
        self._arrived[interval] = before + 1
        if len(self._arrived) > MAX_INTERVALS:
            self._arrived.popitem(last=False)
        if len(self._others) == BURST_WINDOW:
            self._sum -= self._others[0]
        self._others.append(2 * before)
        self._sum += 2 * before


class HerdAvoidance:
    """The delays of one router, from the other routers and the lag with which it reads of them.
    Both come from the ledger; its own decisions are read back as late as those of others."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._bursts = BurstDetector(INITIAL_LAG_MS)
        self._decided_ms: dict[str, int] = {}
        """By other router, the time of its last decision."""
        self._lag_ms = INITIAL_LAG_MS
        self._later: Mapping[str, float] = NO_STAGGER
        self._made_of: tuple[object, ...] = ()

    def on_record(self, log_record: LogRecord) -> None:
        self._bursts.on_record(log_record)
        record = log_record.record
        if type(record) is Assigned and record.router not in ("", self._router):
            self._decided_ms.pop(record.router, None)
            self._decided_ms[record.router] = log_record.timestamp_ms
            if len(self._decided_ms) > MAX_ROUTERS:
                del self._decided_ms[next(iter(self._decided_ms))]

    @property
    def other_routers(self) -> int:
        """The number of other routers that have decided of late."""
        return len(self._decided_ms)

    def observe_lag(self, after_ms: float) -> None:
        """A decision of this router was read back `after_ms` after it was taken."""
        self._lag_ms += (min(after_ms, MAX_LAG_MS) - self._lag_ms) / LAG_WINDOW
        self._bursts.lag_ms = self._lag_ms

    def stagger_ms(
        self, workers: Collection[str], version: int, now_ms: int, prefill_ms: float
    ) -> Mapping[str, float]:
        """See `RoutingState`. The same object for as long as the delays are the same. `version`
        changes whenever the workers do. `prefill_ms`: as in `BurstDetector.is_bursty`."""
        while self._decided_ms:
            name, at_ms = next(iter(self._decided_ms.items()))
            if now_ms - at_ms <= ROUTER_EXPIRY_MS:
                break
            del self._decided_ms[name]
        if not self._decided_ms or not self._bursts.is_bursty(prefill_ms, len(workers)):
            return NO_STAGGER
        made_of = (frozenset(self._decided_ms), version, round(self._lag_ms))
        if made_of != self._made_of:
            routers = (self._router, *self._decided_ms)
            self._later = stagger_by_worker(
                self._router, routers, workers, float(round(self._lag_ms))
            )
            self._made_of = made_of
        return self._later
