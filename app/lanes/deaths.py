"""The death watch: a worker that is not heard of is declared lost, by a record.

Silence alone proves nothing: this router may be behind, or the broker may be down. So before it
writes `Lost`, the watch sends a probe of its own through the worker's partition of kv-events and
reads up to it. The verdict is then a matter of that partition's own times: how long before the
probe the worker's last heartbeat was appended. While probes into a partition fail, nobody in it is
blamed, and silence counts from when they go through again. Partitions are examined independently:
one that has no leader protects its own workers, and others' for one time-out more at most. So much
everybody gets while this router's own appends are slow, wherever: a worker waits for each of its
heartbeats to be acknowledged by all copies, and may need the same broker that hangs elsewhere. A
router that appends nothing has its probes only.

All routers watch; several Lost for one epoch are as good as one.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from app.lanes.context import RouterContext
from streams.errors import AppendFailed, StreamError
from streams.outbox import SLOW_S
from streams.ports import Appended, Partition
from streams.records import Lost, Probe, Tombstone
from streams.topics import ASSIGNMENTS, KV_EVENTS, REGISTRY

log = logging.getLogger(__name__)

PROBED_BEFORE = 0.5
"""Of a request time-out: how long before the verdict the first probe goes out. While a leader hangs
it is slow, even if another one has taken over by the time of the verdict. A worker whose heartbeat
is on its way to the old one may need as long to send it to the new one; see streams/kafka/hangs.py.
"""

FEW = 4
"""With fewer workers than this, "a third of them at once" says nothing."""

BURIED_AFTER = 3
"""Time-outs after which any router removes the card of a lost worker. Whoever declared it lost
does so at once, unless it dies in between."""


class DeathWatch:
    """Watches the workers of a fleet. `run` must be running."""

    def __init__(self, context: RouterContext) -> None:
        self._context = context
        self._works_since_ms: dict[Partition, int] = {}
        """Append time from which on silence counts in a partition, where probes have failed."""
        self._began_ms = 0
        self._under_way: set[object] = set()
        """Partitions under examination, and lost epochs whose cards are being removed."""

    async def run(self) -> None:
        """Look at every living worker once a heartbeat, until cancelled."""
        s = self._context
        await s.fleet_follower.wait_caught_up()
        # What time it is for the broker: nobody could be heard while it did not work.
        began = await s.outbox.persist(KV_EVENTS, s.name, Probe(by=s.name))
        self._began_ms = began.timestamp_ms
        while True:
            for events in {s.events_of(worker) for worker, _ in self._suspects()}:
                self._begin(events, self._examine(events))
            for worker, epoch in self._unburied():
                self._begin((worker, epoch), self._bury(worker, epoch))
            await s.life.clock.sleep(s.settings.heartbeat_s)

    async def tell_again(self, worker: str, epoch: int) -> None:
        """A lost epoch still sends heartbeats: put its Lost into its slot once more."""
        try:
            await self._context.outbox.send(
                ASSIGNMENTS, worker, Lost(worker=worker, epoch=epoch, by=self._context.name)
            )
        except StreamError as e:  # its next heartbeat brings us back here
            log.warning("could not tell %s that it is lost: %s", worker, e)

    def _begin(self, what: object, work: Coroutine[Any, Any, None]) -> None:
        """Do something that may take long, once at a time."""
        if what in self._under_way:
            work.close()
            return
        self._under_way.add(what)
        task = self._context.life.spawn("death watch", work)
        task.add_done_callback(lambda _: self._under_way.discard(what))

    # --- who is silent ---------------------------------------------------------------------------

    def _suspects(self) -> list[tuple[str, int]]:
        """Workers that are silent too long, or soon will be, as far as this router can tell."""
        settings, now_ms = self._context.settings, self._context.broker_clock.now_ms()
        early_ms = self._patience_ms() - PROBED_BEFORE * settings.request_timeout_ms
        # Of those who missed one heartbeat only, nothing is to be asked yet.
        silence_ms = max(early_ms, 2000 * settings.heartbeat_s)
        return [
            (worker, member.epoch)
            for worker, member in self._context.fleet.living()
            if self._silent_ms(worker, now_ms) > silence_ms
        ]

    def _patience_ms(self) -> int:
        """How long anybody may be silent now.

        When more than a third of them fall silent at once, or the only one, it is more likely us or
        the network: they get twice the time, and no longer, beyond what does not count.
        """
        s = self._context
        now_ms, timeout_ms = s.broker_clock.now_ms(), s.worker_timeout_ms
        living = [worker for worker, _ in s.fleet.living()]
        silent = sum(self._silent_ms(worker, now_ms) > timeout_ms for worker in living)
        crowd = len(living) >= FEW and silent * 3 > len(living)
        return 2 * timeout_ms if crowd or len(living) == 1 else timeout_ms

    def _silent_ms(self, worker: str, at_ms: int) -> int:
        """For how long nothing was heard of a worker though its heartbeats got through.

        What lies before the last slow append of this router does not count, up to one time-out.
        """
        s = self._context
        works_since_ms = self._works_since_ms.get(s.events_of(worker), self._began_ms)
        since_ms = max(s.fleet.heard_ms(worker), works_since_ms)
        slow_ms = min(max(s.outbox.slow_ms - since_ms, 0), s.worker_timeout_ms)
        return at_ms - since_ms - slow_ms

    def _unburied(self) -> list[tuple[str, int]]:
        """Lost epochs whose cards are still there long after the last sign of them."""
        s = self._context
        before_ms = s.broker_clock.now_ms() - BURIED_AFTER * s.worker_timeout_ms
        return [
            (worker, member.epoch)
            for worker, member in s.fleet.members.items()
            if s.fleet.is_lost(worker, member.epoch) and s.fleet.heard_ms(worker) < before_ms
        ]

    # --- what becomes of them --------------------------------------------------------------------

    async def _examine(self, events: Partition) -> None:
        """Give a verdict on all suspects of one partition, by one probe into it."""
        s = self._context
        probe = await self._probe(events)
        if probe is None:
            return
        await s.fleet_follower.wait_for(events, probe.offset + 1)
        patience_ms = self._patience_ms()
        for worker, member in list(s.fleet.living()):
            silent_ms = self._silent_ms(worker, probe.timestamp_ms)
            if s.events_of(worker) == events and silent_ms > patience_ms:
                await self._declare(worker, member.epoch, silent_ms)

    async def _probe(self, events: Partition) -> Appended | None:
        """Send a probe; None when the partition did not take it as quickly as it should."""
        s = self._context
        asked_at = s.life.clock.now()
        try:
            probe = await s.outbox.send(KV_EVENTS, s.name, Probe(by=s.name), events.partition)
        except AppendFailed as e:
            log.warning("workers of %s[%d] are silent, but so is the broker: %s", *events, e)
            self._works_since_ms[events] = s.broker_clock.now_ms()
            return None
        if s.life.clock.now() - asked_at > SLOW_S:
            self._works_since_ms[events] = probe.timestamp_ms
            return None
        return probe

    async def _declare(self, worker: str, epoch: int, silent_ms: int = 0) -> None:
        """Write the death to kv-events, where folds see it, then to the worker's slot and card."""
        s = self._context
        log.warning("worker %s (epoch %d) is lost: silent for %d ms", worker, epoch, silent_ms)
        lost = Lost(worker=worker, epoch=epoch, by=s.name, silent_ms=silent_ms)
        await s.outbox.persist(KV_EVENTS, worker, lost)
        # Its slot is a partition of another topic: that one may be the next that does not work.
        self._begin(lost, self._tell(lost))
        self._begin((worker, epoch), self._bury(worker, epoch))

    async def _tell(self, lost: Lost) -> None:
        await self._context.outbox.persist(ASSIGNMENTS, lost.worker, lost)

    async def _bury(self, worker: str, epoch: int) -> None:
        key = f"worker/{worker}"
        await self._context.outbox.persist(REGISTRY, key, Tombstone(key=key, epoch=epoch))
