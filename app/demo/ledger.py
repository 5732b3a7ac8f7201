"""What the demo reads of the topics besides answers: where requests ran and why, and who is there.

Follows the ledger and the fleet as anybody may; decides nothing and writes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from app.lifetime import Lifetime
from app.routing.fleet import Fleet
from streams.clock import BrokerClock
from streams.codecs import decode
from streams.errors import RecordError
from streams.follow import Follower
from streams.ports import Log, Partition
from streams.records import Assigned, Finished
from streams.topics import KV_EVENTS, LEDGER, REGISTRY

POLL_S = 1.0
LOOK_S = 0.1


class Decisions:
    """What the ledger says of each request. `follow` must be running."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._assigned: defaultdict[str, list[Assigned]] = defaultdict(list)
        self._cached: dict[str, int] = {}

    def of(self, request_id: str) -> Sequence[Assigned]:
        """The decisions on a request so far, one for each attempt."""
        return self._assigned.get(request_id, ())

    def workers(self, request_id: str) -> list[str]:
        """Where a request ran, in order."""
        return [decision.worker for decision in self.of(request_id)]

    def cached(self, request_id: str) -> int | None:
        """How many tokens of its prompt its engine found in the cache; None: not told yet."""
        return self._cached.get(request_id)

    async def beginning(self) -> dict[Partition, int]:
        """Where to begin: the ends of the ledger now."""
        lanes = range(await self._log.partitions(LEDGER))
        ends = await self._log.end_offsets(LEDGER, lanes)
        return {Partition(LEDGER, lane): end for lane, end in ends.items()}

    async def follow(self, positions: dict[Partition, int]) -> None:
        """Read on until cancelled."""
        reader = self._log.reader()
        reader.assign(positions)
        try:
            while True:
                for records in (await reader.poll(POLL_S)).values():
                    for record in records:
                        try:
                            told = decode(record)
                        except RecordError:
                            continue
                        if isinstance(told, Assigned):
                            self._assigned[told.id].append(told)
                        elif isinstance(told, Finished) and told.attempt == 0:
                            self._cached[told.id] = told.cached_tokens
        finally:
            await reader.close()


class Crew:
    """Which workers take requests at the moment."""

    def __init__(self, log: Log, life: Lifetime, worker_timeout_s: float) -> None:
        self._fleet = Fleet()
        self._clock = BrokerClock(life.clock)
        self._life = life
        self._timeout_ms = int(worker_timeout_s * 1000)
        self._follower = Follower(
            log, self._fleet, [REGISTRY, KV_EVENTS], life.clock, broker_clock=self._clock
        )

    def follow(self) -> None:
        """Read in the background."""
        self._life.spawn("crew", self._follower.run())

    def now(self) -> int:
        """An epoch that is higher than those of all workers so far."""
        return self._fleet.position(Partition(REGISTRY, 0)) or 0

    async def complete(self, workers: int, timeout_s: float, since: int = 0) -> bool:
        """Wait until so many workers, of epochs from `since` on, take requests.

        False when the time was not enough.
        """
        until = self._life.clock.now() + timeout_s
        while self._ready(since) < workers:
            if self._life.clock.now() > until:
                return False
            await self._life.clock.sleep(LOOK_S)
        return True

    def _ready(self, since: int) -> int:
        now_ms = self._clock.now_ms()
        routable = self._fleet.is_routable
        return sum(
            member.epoch >= since and routable(worker, now_ms, self._timeout_ms)
            for worker, member in self._fleet.members.items()
        )
