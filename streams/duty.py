"""Snapshot duty: who writes the snapshots of a fold, and when.

Replicas that fold the same topic share the work: a consumer group deals its partitions out, and
each replica writes those that it owns. The group is used for that alone; nothing is read or
committed through it. When a replica dies, the group gives its partitions to others.

Owning is no lock. A replica that does not know yet that a partition was taken from it may write a
snapshot beside the new owner's: both are whole, and either may be the newest one. What is half
written when a partition is taken away has no pointer, so nobody sees it.

Never here: what a snapshot is made of, which is `streams/snapshots.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from streams.clock import BrokerClock, Clock
from streams.errors import BrokerUnavailable, LogClosed
from streams.follow import Fold, Follower
from streams.ports import Log, Member, Partition
from streams.snapshots import Snapshots, Taken, take

log = logging.getLogger(__name__)

POLL_S = 1.0
LOOKS = 5
"""How often in a period it is looked what is due, so none is late by more than a fifth."""
LONGEST_LOOK_S = 10.0
AFTER_RECORDS = 20_000
"""Records of one partition after which a snapshot is due before its time: reading as many again
takes a quarter of a second, and a router has 32 partitions to read."""

Offload = Callable[[Callable[[], Taken]], Awaitable[Taken]]
"""Runs a function beside the event loop."""


class SnapshotDuty:
    """Writes snapshots of the partitions of `topic` that this member of `group` owns.

    One is due when the partition has moved and the newest is `every_s` old, or missing, or
    AFTER_RECORDS behind. They are written one after the other. `belong` and `work` are to be run
    both. `written` and `bytes` (of the fold, before compression) count what was written, `last_s`
    is what the last one took, from state to pointer.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        group: str,
        fold: Fold,
        follower: Follower,
        snapshots: Snapshots,
        clock: Clock,
        broker_clock: BrokerClock,
        *,
        offload: Offload,
        every_s: float,
    ) -> None:
        self._log = log
        self._topic = topic
        self._group = group
        self._fold = fold
        self._follower = follower
        self._snapshots = snapshots
        self._clock = clock
        self._broker_clock = broker_clock
        self._offload = offload
        self._every_s = every_s
        self._member: Member | None = None
        self._closing = False
        self.owned: frozenset[int] = frozenset()
        self.written = 0
        self.bytes = 0
        self.last_s = 0.0

    async def belong(self) -> None:
        """Be a member of the group, until cancelled or closed. Raises what polling raises."""
        self._member = member = self._log.member(self._topic, self._group, self)
        try:
            while True:
                await member.poll(POLL_S)  # never a record: no partition is resumed
        except LogClosed:
            if not self._closing:
                raise

    async def work(self) -> None:
        """Write what is due, until cancelled. Raises what appending raises."""
        await self._follower.wait_caught_up()
        while True:
            try:
                await self._snapshots.refresh()
                for partition in sorted(self.owned):
                    source = Partition(self._topic, partition)
                    if partition in self.owned and self._is_due(source):
                        await self._write(source)
            except BrokerUnavailable as e:
                log.warning("no snapshots for now: %s", e)
            await self._clock.sleep(min(self._every_s / LOOKS, LONGEST_LOOK_S))

    async def close(self) -> None:
        """Leave the group, so that others take over at once. Idempotent."""
        self._closing = True
        self.owned = frozenset()
        if self._member is not None:
            await self._member.close()

    def age_s(self, partition: int) -> float | None:
        """How old the newest snapshot is that was heard of; None without one."""
        newest = self._snapshots.newest(self._fold.name, Partition(self._topic, partition))
        if newest is None:
            return None
        return max(0.0, (self._broker_clock.now_ms() - newest.written_ms) / 1000)

    # --- ownership, called by the member ---

    def assigned(self, starts: Mapping[int, int]) -> None:
        """These partitions are ours from now on."""
        self.owned |= starts.keys()

    def revoked(self, partitions: frozenset[int]) -> None:
        """These are no more: what is being written of them is left without a pointer."""
        self.owned -= partitions

    # --- parts ---

    def _is_due(self, source: Partition) -> bool:
        position = self._fold.position(source)
        if not position or not self._follower.caught_up:
            return False
        newest = self._snapshots.newest(self._fold.name, source)
        if newest is None:
            return True
        moved = position - newest.pointer.position
        age_s = self.age_s(source.partition) or 0.0
        # Below it: the topic was made anew, and the pointer is of the one before.
        return moved < 0 or moved >= AFTER_RECORDS or (moved > 0 and age_s >= self._every_s)

    async def _write(self, source: Partition) -> None:
        began = self._clock.now()
        async with self._follower.still():
            if self._fold.position(source) is None:
                return  # it is being built again
            taken = await self._offload(partial(take, self._fold, source))
        pointer = await self._snapshots.write(taken, lambda: source.partition in self.owned)
        if pointer is None:
            return
        self.written += 1
        self.bytes += len(taken.data)
        self.last_s = self._clock.now() - began
        log.debug(
            "snapshot of %s, %s[%d], at %d: %d bytes in %.2f s",
            self._fold.name, *source, pointer.position, len(taken.data), self.last_s,
        )  # fmt: skip
