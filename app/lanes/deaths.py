"""The death watch: a worker that is not heard of is declared lost, by a record.

Silence alone proves nothing: this router may be behind, or the broker may be down. So before it
writes `Lost`, the watch sends a probe of its own through the worker's partition of kv-events and
reads up to it; while probes fail, nobody is blamed, and silence counts from when they work again.
All routers watch; several Lost for one epoch are as good as one.
"""

from __future__ import annotations

import logging

from app.lanes.context import RouterContext
from streams.errors import StreamError
from streams.records import Lost, Probe, Tombstone
from streams.topics import ASSIGNMENTS, KV_EVENTS, REGISTRY

log = logging.getLogger(__name__)

PROBE_SLOW_S = 1.0
"""A probe that takes longer than this says that heartbeats are late as well."""

FEW = 4
"""With fewer workers than this, "a third of them at once" says nothing."""


class DeathWatch:
    """Watches the workers of a fleet. `run` must be running."""

    def __init__(self, context: RouterContext) -> None:
        self._context = context
        self._broker_works_since_ms = 0

    async def run(self) -> None:
        """Look at every living worker once a heartbeat, until cancelled."""
        s = self._context
        await s.fleet_follower.wait_caught_up()
        self._broker_works_since_ms = s.broker_clock.now_ms()
        while True:
            for worker, epoch in self._suspects():
                await self._examine(worker, epoch)
            await s.life.clock.sleep(s.settings.heartbeat_s)

    async def tell_again(self, worker: str, epoch: int) -> None:
        """A lost epoch still sends heartbeats: put its Lost into its slot once more."""
        try:
            await self._context.outbox.send(
                ASSIGNMENTS, worker, Lost(worker=worker, epoch=epoch, by=self._context.name)
            )
        except StreamError as e:  # its next heartbeat brings us back here
            log.warning("could not tell %s that it is lost: %s", worker, e)

    def _suspects(self) -> list[tuple[str, int]]:
        """Workers that have been silent too long, as far as this router has read.

        When more than a third of them fall silent at once, or the only one, it is more likely us or
        the network: they get twice the time, and no longer.
        """
        s = self._context
        living = [(worker, member.epoch) for worker, member in s.fleet.living()]
        silent = [x for x in living if self._silent_ms(x[0]) > s.worker_timeout_ms]
        crowd = len(living) >= FEW and len(silent) * 3 > len(living)
        if crowd or len(living) == 1:
            silent = [x for x in silent if self._silent_ms(x[0]) > 2 * s.worker_timeout_ms]
        return silent

    def _silent_ms(self, worker: str) -> int:
        since_ms = max(self._context.fleet.heard_ms(worker), self._broker_works_since_ms)
        return self._context.broker_clock.now_ms() - since_ms

    async def _examine(self, worker: str, epoch: int) -> None:
        s = self._context
        events = s.events_of(worker)
        asked_at = s.life.clock.now()
        try:
            probe = await s.outbox.send(KV_EVENTS, worker, Probe(by=s.name), events.partition)
        except StreamError as e:
            log.warning("%s is silent, but so is the broker: %s", worker, e)
            self._broker_works_since_ms = s.broker_clock.now_ms()
            return
        if s.life.clock.now() - asked_at > PROBE_SLOW_S:
            self._broker_works_since_ms = s.broker_clock.now_ms()
            return
        await s.fleet_follower.wait_for(events, probe.offset + 1)
        if (worker, epoch) in self._suspects():
            await self._declare(worker, epoch)

    async def _declare(self, worker: str, epoch: int) -> None:
        """Write the death to kv-events, where folds see it, then to the worker's slot and card."""
        s = self._context
        silent_ms = self._silent_ms(worker)
        log.warning("worker %s (epoch %d) is lost: silent for %d ms", worker, epoch, silent_ms)
        lost = Lost(worker=worker, epoch=epoch, by=s.name, silent_ms=silent_ms)
        await s.outbox.persist(KV_EVENTS, worker, lost)
        await s.outbox.persist(ASSIGNMENTS, worker, lost)
        key = f"worker/{worker}"
        await s.outbox.persist(REGISTRY, key, Tombstone(key=key, epoch=epoch))
