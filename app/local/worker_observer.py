"""Observer of the workers of a deployment: which accept requests, and which run elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from kvlane.app.local.processes import READY_POLL_S
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import BrokerClock
from kvlane.streams.ports import Log, Partition
from kvlane.streams.topics import KV_EVENTS, REGISTRY
from kvlane.streams.views.follower import Follower

CATCH_UP_S = 30.0
HEARTBEAT_WINDOW_MS = 60_000
"""Age of the oldest heartbeats that are read; also the largest clock difference to brokers."""
LIVENESS_HEARTBEATS = 2.5
"""Heartbeat intervals within which every live worker has sent one."""


class WorkerObserver:
    def __init__(self, log: Log, ctx: ProcessContext, heartbeat_s: float) -> None:
        self._log = log
        self._ctx = ctx
        self._heartbeat_s = heartbeat_s
        self._reading: asyncio.Task[None] | None = None
        self.fleet = Fleet()
        self._clock = BrokerClock(ctx.clock)
        self._follower = Follower(
            log, self.fleet, [REGISTRY, KV_EVENTS], ctx.clock,
            broker_clock=self._clock, start=self._start,
        )  # fmt: skip

    async def start(self) -> None:
        """Follow the topics in the background; returns when it has reached their present ends."""
        self._reading = self._ctx.spawn("workers", self._follower.run())
        async with asyncio.timeout(CATCH_UP_S):
            await self._follower.wait_caught_up()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def find_alive(self, names: Collection[str]) -> list[str]:
        """The workers that are alive: a new heartbeat arrives while this waits."""
        before = {name: beat.offset for name in names if (beat := self.fleet.heartbeats.get(name))}
        oldest_ms = self._clock.now_ms() - HEARTBEAT_WINDOW_MS
        recent = [n for n in before if self.fleet.heartbeats[n].at_ms >= oldest_ms]
        if not recent:
            return []
        await self._ctx.clock.sleep(LIVENESS_HEARTBEATS * self._heartbeat_s)
        return [name for name in recent if self.fleet.heartbeats[name].offset != before[name]]

    def next_epoch(self) -> int:
        return self.fleet.position(Partition(REGISTRY, 0)) or 0

    def find_ready(self, since: int) -> list[str]:
        """The workers that accept requests, with epochs of at least `since`."""
        members = self.fleet.members.items()
        return [
            name for name, member in members if member.epoch >= since and self.fleet.is_ready(name)
        ]

    async def wait_ready(self, workers: int, timeout_s: float, since: int) -> bool:
        """Wait until this many are found by `find_ready`. False after `timeout_s`."""
        until = self._ctx.clock.now() + timeout_s
        while len(self.find_ready(since)) < workers:
            if self._ctx.clock.now() > until:
                return False
            await self._ctx.clock.sleep(READY_POLL_S)
        return True

    async def _start(self, source: Partition) -> int:
        if source.topic == REGISTRY:
            return 0
        since_ms = max(0, self._ctx.clock.wall_ms() - HEARTBEAT_WINDOW_MS)
        return await self._log.offset_at(source.topic, source.partition, since_ms)
