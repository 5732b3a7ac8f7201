"""Snapshot writer: decides which replica writes the snapshots of a view, and when.

A consumer group assigns partitions to replicas; nothing is read or committed through it. Ownership
is no lock: of two complete snapshots either may be the newest. An unfinished one of a revoked
partition gets no pointer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from kvlane.streams.clock import BrokerClock, Clock
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.group_consumer import GroupMembership
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.snapshot_store import CapturedState, SnapshotStore, capture
from kvlane.streams.views.view import MaterializedView

log = logging.getLogger(__name__)


CHECKS_PER_PERIOD = 5
"""Due checks per snapshot period; a snapshot is at most a fifth of a period late."""
MAX_CHECK_INTERVAL_S = 10.0
MAX_RECORDS_BEHIND = 20_000
"""A partition that has advanced by this many records is due early."""

CaptureInThread = Callable[[Callable[[], CapturedState]], Awaitable[CapturedState]]
"""Runs a function off the event loop."""


class SnapshotWriter:
    """Writes snapshots of the partitions of `topic` that this member of `group` owns, one at a
    time.

    Due when the partition has advanced and the newest snapshot is `interval_s` old, missing, or
    MAX_RECORDS_BEHIND behind. Both `join_group` and `run` must be running. `bytes`: before
    compression.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        group: str,
        view: MaterializedView,
        follower: Follower,
        snapshots: SnapshotStore,
        clock: Clock,
        broker_clock: BrokerClock,
        *,
        offload: CaptureInThread,
        interval_s: float,
    ) -> None:
        self._topic = topic
        self._view = view
        self._follower = follower
        self._snapshots = snapshots
        self._clock = clock
        self._broker_clock = broker_clock
        self._offload = offload
        self._interval_s = interval_s
        self._membership = GroupMembership(log, topic, group, self)
        self.owned: frozenset[int] = frozenset()
        self.written = 0
        self.bytes = 0
        self.last_duration_s = 0.0

    async def join_group(self) -> None:
        """Take part in the group until cancelled or closed. Raises as `Member.poll`."""
        await self._membership.run()

    async def run(self) -> None:
        """Write due snapshots until cancelled. Raises as `Log.append`."""
        await self._follower.wait_caught_up()
        while True:
            try:
                await self._snapshots.refresh()
                for partition in sorted(self.owned):
                    source = Partition(self._topic, partition)
                    if partition in self.owned and self._is_due(source):
                        await self._write(source)
            except BrokerUnavailable as e:
                log.warning("cannot write snapshots, broker unavailable: %s", e)
            await self._clock.sleep(min(self._interval_s / CHECKS_PER_PERIOD, MAX_CHECK_INTERVAL_S))

    async def close(self) -> None:
        """Leave the group, so that other replicas take over at once. Idempotent."""
        self.owned = frozenset()
        await self._membership.close()

    def age_s(self, partition: int) -> float | None:
        newest = self._snapshots.newest(self._view.name, Partition(self._topic, partition))
        if newest is None:
            return None
        return max(0.0, (self._broker_clock.now_ms() - newest.written_ms) / 1000)

    # --- ownership, called by the member ---

    def assigned(self, starts: Mapping[int, int]) -> None:
        self.owned |= starts.keys()

    def revoked(self, partitions: frozenset[int]) -> None:
        """The group has revoked these: a snapshot in progress gets no pointer."""
        self.owned -= partitions

    # --- parts ---

    def _is_due(self, source: Partition) -> bool:
        position = self._view.position(source)
        if not position or not self._follower.caught_up:
            return False
        newest = self._snapshots.newest(self._view.name, source)
        if newest is None:
            return True
        moved = position - newest.pointer.position
        age_s = self.age_s(source.partition) or 0.0
        # Below it: the topic was recreated, and the pointer belongs to the old one.
        return moved < 0 or moved >= MAX_RECORDS_BEHIND or (moved > 0 and age_s >= self._interval_s)

    async def _write(self, source: Partition) -> None:
        began = self._clock.now()
        async with self._follower.paused():
            if self._view.position(source) is None:
                return  # it is being rebuilt
            taken = await self._offload(partial(capture, self._view, source))
        pointer = await self._snapshots.write(taken, lambda: source.partition in self.owned)
        if pointer is None:
            return
        self.written += 1
        self.bytes += len(taken.data)
        self.last_duration_s = self._clock.now() - began
        log.debug(
            "snapshot of %s, %s[%d], at %d: %d bytes in %.2f s",
            self._view.name, *source, pointer.position, len(taken.data), self.last_duration_s,
        )  # fmt: skip
