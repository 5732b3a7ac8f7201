"""The failure detector: a worker without heartbeats is declared lost, by a record.

Silence alone proves nothing: this router may be behind, or the broker down. So before `Lost`, the
detector sends a probe through the worker's partition of kv-events and reads up to it. The silence
that counts is from when this router read the worker's last heartbeat until it sent the probe, by
its own monotonic clock.

While probes into a partition fail, no worker in it is declared lost, and silence counts from their
next success. All workers get one time-out more at most while this router's own appends are slow: a
heartbeat may need the same hung broker.

All routers do this; several Lost for one epoch have the effect of one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Coroutine
from typing import Any

from kvlane.app.lanes.context import RouterContext
from kvlane.streams.errors import AppendFailed, StreamError
from kvlane.streams.ports import Appended, Partition
from kvlane.streams.record_publisher import SLOW_APPEND_S
from kvlane.streams.records import Lost, Probe, Tombstone
from kvlane.streams.topics import ASSIGNMENTS, KV_EVENTS, REGISTRY

log = logging.getLogger(__name__)

PROBE_LEAD = 0.5
"""Lead of the first probe before the verdict, as a share of the request time-out. While a leader
hangs it is slow, even if another one has taken over by the time of the verdict. A worker whose
heartbeat is on its way to the old one may need as long to send it to the new one; see
streams/kafka/client_patches/patched_client.py."""

MIN_FLEET = 4
"""Smallest fleet in which the silence of a third of the workers counts as mass silence."""

TOMBSTONE_AFTER_TIMEOUTS = 3
"""Time-outs after which any router removes the card of a lost worker, as the router that declared
it lost does at once."""


class FailureDetector:
    def __init__(self, context: RouterContext) -> None:
        self._context = context
        self._works_since_s: dict[Partition, float] = {}
        """Time from which on silence counts in a partition, where probes have failed."""
        self._began_s = math.inf
        self._under_way: set[object] = set()
        """Partitions under examination, and lost epochs whose cards are being removed."""

    async def run(self) -> None:
        """Check every live worker once per heartbeat, until cancelled."""
        s = self._context
        await s.fleet_follower.wait_caught_up()
        # Silence while the broker did not work does not count.
        await s.publisher.publish(KV_EVENTS, s.name, Probe(by=s.name))
        self._began_s = s.ctx.clock.now()
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
        settings, now_s = self._context.settings, self._context.ctx.clock.now()
        early_s = self._silence_limit_s(now_s) - PROBE_LEAD * settings.request_timeout_ms / 1000
        # A worker that missed only one heartbeat is not examined yet.
        limit_s = max(early_s, 2 * settings.heartbeat_interval_s)
        return [
            (worker, member.epoch)
            for worker, member in self._context.fleet.live_members()
            if self._silence_s(worker, member.epoch, now_s) > limit_s
        ]

    def _silence_limit_s(self, now_s: float) -> float:
        """The silence that is tolerated now: twice the time when more than a third of the workers,
        or the only one, are silent, since the cause is more likely this router or the network."""
        s = self._context
        timeout_s = s.settings.worker_timeout_s
        living = [(worker, member.epoch) for worker, member in s.fleet.live_members()]
        silent = sum(self._silence_s(*each, now_s) > timeout_s for each in living)
        mass_silence = len(living) >= MIN_FLEET and silent * 3 > len(living)
        return 2 * timeout_s if mass_silence or len(living) == 1 else timeout_s

    def _silence_s(self, worker: str, epoch: int, until_s: float) -> float:
        """How long a worker was silent while its partition worked. Silence before the last slow
        append of this router does not count, up to one time-out."""
        s = self._context
        works_since_s = self._began_s
        if self._works_since_s:  # seldom, and all workers are looked at twice a heartbeat
            events = s.kv_events_partition(worker)
            works_since_s = self._works_since_s.get(events, works_since_s)
        since_s = max(s.silent_workers.last_read_s(worker, epoch), works_since_s)
        slow_s = min(max(s.publisher.slow_until_s - since_s, 0), s.settings.worker_timeout_s)
        return until_s - since_s - slow_s

    def _stale_cards(self) -> list[tuple[str, int]]:
        """Lost epochs whose cards are still in the registry long after their last record."""
        s = self._context
        silence_s = TOMBSTONE_AFTER_TIMEOUTS * s.settings.worker_timeout_s
        before_s = s.ctx.clock.now() - silence_s
        return [
            (worker, member.epoch)
            for worker, member in s.fleet.members.items()
            if s.fleet.is_lost(worker, member.epoch)
            and s.silent_workers.last_read_s(worker, member.epoch) < before_s
        ]

    # --- lost and removed workers ----------------------------------------------------------------

    async def _examine(self, partition: Partition) -> None:
        """Give a verdict on all suspects of one partition, by one probe into it."""
        s = self._context
        sent_s = s.ctx.clock.now()
        probe = await self._probe(partition)
        if probe is None:
            return
        await s.fleet_follower.wait_for(partition, probe.offset + 1)
        limit_s = self._silence_limit_s(s.ctx.clock.now())
        for worker, member in list(s.fleet.live_members()):
            silence_s = self._silence_s(worker, member.epoch, sent_s)
            if s.kv_events_partition(worker) == partition and silence_s > limit_s:
                await self._declare(worker, member.epoch, int(1000 * silence_s))

    async def _probe(self, partition: Partition) -> Appended | None:
        """Send a probe; None when the partition did not take it as quickly as it should."""
        s = self._context
        sent_s = s.ctx.clock.now()
        try:
            probe = await s.publisher.publish_once(
                KV_EVENTS, s.name, Probe(by=s.name), partition.partition
            )
        except AppendFailed as e:
            log.warning(
                "suspending failure detection for %s[%d]: broker not responding: %s", *partition, e
            )
            self._works_since_s[partition] = s.ctx.clock.now()
            return None
        if (now_s := s.ctx.clock.now()) - sent_s > SLOW_APPEND_S:
            self._works_since_s[partition] = now_s
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
