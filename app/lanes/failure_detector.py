"""The failure detector: a worker without heartbeats is declared lost, by a record.

Silence alone proves nothing: this router may be behind, or the broker may be down. So before it
writes `Lost`, the detector sends a probe of its own through the worker's partition of kv-events and
reads up to it. The verdict is then a matter of that partition's own times: how long before the
probe the worker's last heartbeat was appended. While probes into a partition fail, no worker in it
is declared lost, and silence counts from when they go through again. Partitions are examined
independently: one that has no leader protects its own workers, and others' for one time-out more at
most. All workers get that much while this router's own appends are slow, wherever: a worker waits
for each of its heartbeats to be acknowledged by all copies, and may need the same broker that hangs
elsewhere. A router that appends nothing has its probes only.

All routers do this; several Lost for one epoch have the effect of one.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from app.lanes.context import RouterContext
from streams.errors import AppendFailed, StreamError
from streams.ports import Appended, Partition
from streams.record_publisher import SLOW_APPEND_S
from streams.records import Lost, Probe, Tombstone
from streams.topics import ASSIGNMENTS, KV_EVENTS, REGISTRY

log = logging.getLogger(__name__)

PROBE_LEAD = 0.5
"""Lead of the first probe before the verdict, as a share of the request time-out. While a leader
hangs it is slow, even if another one has taken over by the time of the verdict. A worker whose
heartbeat is on its way to the old one may need as long to send it to the new one; see
streams/kafka/client_patches/stuck_broker.py."""

MIN_FLEET = 4
"""Smallest fleet in which the silence of a third of the workers counts as mass silence."""

TOMBSTONE_AFTER_TIMEOUTS = 3
"""Time-outs after which any router removes the card of a lost worker. The router that declared it
lost does so at once, unless it crashes in between."""


class FailureDetector:
    """The detector of one router. `run` must be running."""

    def __init__(self, context: RouterContext) -> None:
        self._context = context
        self._works_since_ms: dict[Partition, int] = {}
        """Append time from which on silence counts in a partition, where probes have failed."""
        self._began_ms = 0
        self._under_way: set[object] = set()
        """Partitions under examination, and lost epochs whose cards are being removed."""

    async def run(self) -> None:
        """Check every live worker once per heartbeat, until cancelled."""
        s = self._context
        await s.fleet_follower.wait_caught_up()
        # The broker's time now: silence while it did not work does not count.
        began = await s.publisher.publish(KV_EVENTS, s.name, Probe(by=s.name))
        self._began_ms = began.timestamp_ms
        while True:
            for events in {s.kv_events_partition(worker) for worker, _ in self._suspects()}:
                self._begin(events, self._examine(events))
            for worker, epoch in self._stale_cards():
                self._begin((worker, epoch), self._write_tombstone(worker, epoch))
            await s.ctx.clock.sleep(s.settings.heartbeat_interval_s)

    async def renotify(self, worker: str, epoch: int) -> None:
        """A lost epoch still sends heartbeats: put its Lost into its slot once more."""
        try:
            await self._context.publisher.publish_once(
                ASSIGNMENTS, worker, Lost(worker=worker, epoch=epoch, by=self._context.name)
            )
        except StreamError as e:  # its next heartbeat brings us back here
            log.warning("could not send Lost to worker %s: %s", worker, e)

    def _begin(self, what: object, work: Coroutine[Any, Any, None]) -> None:
        """Run a task for this key, unless one is running already."""
        if what in self._under_way:
            work.close()
            return
        self._under_way.add(what)
        task = self._context.ctx.spawn("failure detection", work)
        task.add_done_callback(lambda _: self._under_way.discard(what))

    # --- silent workers --------------------------------------------------------------------------

    def _suspects(self) -> list[tuple[str, int]]:
        """Workers that are silent too long, or soon will be, by the heartbeats read here."""
        settings, now_ms = self._context.settings, self._context.broker_clock.now_ms()
        early_ms = self._silence_limit_ms() - PROBE_LEAD * settings.request_timeout_ms
        # A worker that missed only one heartbeat is not examined yet.
        silence_ms = max(early_ms, 2000 * settings.heartbeat_interval_s)
        return [
            (worker, member.epoch)
            for worker, member in self._context.fleet.live_members()
            if self._silent_ms(worker, now_ms) > silence_ms
        ]

    def _silence_limit_ms(self) -> int:
        """The silence that is tolerated now.

        When more than a third of the workers are silent at once, or the only one, the cause is more
        likely this router or the network: they get twice the time.
        """
        s = self._context
        now_ms, timeout_ms = s.broker_clock.now_ms(), s.worker_timeout_ms
        living = [worker for worker, _ in s.fleet.live_members()]
        silent = sum(self._silent_ms(worker, now_ms) > timeout_ms for worker in living)
        mass_silence = len(living) >= MIN_FLEET and silent * 3 > len(living)
        return 2 * timeout_ms if mass_silence or len(living) == 1 else timeout_ms

    def _silent_ms(self, worker: str, at_ms: int) -> int:
        """How long a worker was silent while its partition worked.

        Silence before the last slow append of this router does not count, up to one time-out.
        """
        s = self._context
        works_since_ms = self._began_ms
        if self._works_since_ms:  # seldom, and all workers are looked at twice a heartbeat
            events = s.kv_events_partition(worker)
            works_since_ms = self._works_since_ms.get(events, works_since_ms)
        since_ms = max(s.fleet.last_seen_ms(worker), works_since_ms)
        slow_ms = min(max(s.publisher.slow_until_ms - since_ms, 0), s.worker_timeout_ms)
        return at_ms - since_ms - slow_ms

    def _stale_cards(self) -> list[tuple[str, int]]:
        """Lost epochs whose cards are still in the registry long after their last record."""
        s = self._context
        before_ms = s.broker_clock.now_ms() - TOMBSTONE_AFTER_TIMEOUTS * s.worker_timeout_ms
        return [
            (worker, member.epoch)
            for worker, member in s.fleet.members.items()
            if s.fleet.is_lost(worker, member.epoch) and s.fleet.last_seen_ms(worker) < before_ms
        ]

    # --- lost and removed workers ----------------------------------------------------------------

    async def _examine(self, events: Partition) -> None:
        """Give a verdict on all suspects of one partition, by one probe into it."""
        s = self._context
        probe = await self._probe(events)
        if probe is None:
            return
        await s.fleet_follower.wait_for(events, probe.offset + 1)
        limit_ms = self._silence_limit_ms()
        for worker, member in list(s.fleet.live_members()):
            silent_ms = self._silent_ms(worker, probe.timestamp_ms)
            if s.kv_events_partition(worker) == events and silent_ms > limit_ms:
                await self._declare(worker, member.epoch, silent_ms)

    async def _probe(self, events: Partition) -> Appended | None:
        """Send a probe; None when the partition did not take it as quickly as it should."""
        s = self._context
        began_at = s.ctx.clock.now()
        try:
            probe = await s.publisher.publish_once(
                KV_EVENTS, s.name, Probe(by=s.name), events.partition
            )
        except AppendFailed as e:
            log.warning(
                "suspending failure detection for %s[%d]: broker not responding: %s", *events, e
            )
            self._works_since_ms[events] = s.broker_clock.now_ms()
            return None
        if s.ctx.clock.now() - began_at > SLOW_APPEND_S:
            self._works_since_ms[events] = probe.timestamp_ms
            return None
        return probe

    async def _declare(self, worker: str, epoch: int, silent_ms: int = 0) -> None:
        """Write Lost to kv-events, where views read it, then to the worker's slot and card."""
        s = self._context
        log.warning("worker %s (epoch %d) is lost: silent for %d ms", worker, epoch, silent_ms)
        lost = Lost(worker=worker, epoch=epoch, by=s.name, silent_ms=silent_ms)
        await s.publisher.publish(KV_EVENTS, worker, lost)
        # Its slot is a partition of another topic, which may fail next.
        self._begin(lost, self._notify(lost))
        self._begin((worker, epoch), self._write_tombstone(worker, epoch))

    async def _notify(self, lost: Lost) -> None:
        await self._context.publisher.publish(ASSIGNMENTS, lost.worker, lost)

    async def _write_tombstone(self, worker: str, epoch: int) -> None:
        key = f"worker/{worker}"
        await self._context.publisher.publish(REGISTRY, key, Tombstone(key=key, epoch=epoch))
