"""One member of a consumer group of the in-memory broker.

Owns its copy of the assignment and the positions; `streams/memory/consumer_groups.py` decides.
There are no heartbeats: a session time-out after the client was suspended or cut off, or the broker
failed, the member leaves its partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import copy_context

from kvlane.streams.errors import AppendFailed, LogClosed, OwnershipLost
from kvlane.streams.memory.consumer_groups import NEVER, ConsumerGroup
from kvlane.streams.memory.memory_broker import MemoryConnection
from kvlane.streams.memory.partition_log import Cursor
from kvlane.streams.ports import Batches, Partition, RebalanceListener


class MemoryMember:
    """Implements `Member`; made by `MemoryLog.member`."""

    def __init__(
        self,
        connection: MemoryConnection,
        topic: str,
        group: ConsumerGroup,
        ownership: RebalanceListener,
    ) -> None:
        self.id = connection.broker.member_id(connection.client_id)
        self.cursor = Cursor()
        self._connection = connection
        self._topic = topic
        self._group = group
        self._ownership = ownership
        self._starts: dict[int, int] = {}  # owned partitions that were not resumed yet
        self._returned: dict[int, int] = {}  # of those that were resumed: after the last record
        self._owned: frozenset[int] = frozenset()
        self._generation = 0
        self._polling = False
        self._polled_at = connection.broker.clock.now()
        self._closed = False
        self._context = copy_context()  # of its process

    async def poll(self, timeout_s: float, max_records: int = 500) -> Batches:
        self._check_open()
        clock = self._connection.broker.clock
        deadline = clock.now() + timeout_s
        self._polling = True
        try:
            await self._connection.send_request("poll")
            while True:
                self._check_open()
                self._check_lease()
                if self._connection.broker.available:
                    if self._is_connected:
                        if self._news():
                            await self._connection.send_request("heartbeat")
                            self._check_open()
                        if self._is_connected:
                            self._attend()
                    if batch := self._take(max_records):
                        return batch
                now = clock.now()
                if deadline <= now:
                    return {}
                alarm = self._group.next_change() if self._is_connected else deadline
                await self.cursor.wake_up.wait(min(deadline, alarm) - now)
                await self._connection.check_alive()
        finally:
            self._polling = False
            self._polled_at = clock.now()

    def resume(self, partition: int) -> None:
        if (start := self._starts.pop(partition, None)) is not None:
            self._returned[partition] = start
            self.cursor.add(self._connection.broker.log(self._topic, partition), start)

    def pause(self, partition: int, position: int | None = None) -> None:
        name = Partition(self._topic, partition)
        if (reached := self.cursor.positions.get(name)) is not None:
            self.cursor.remove(name)
            self._starts[partition] = reached if position is None else position

    def end_of_gap(self, partition: int, position: int) -> int:
        reached = self.cursor.positions.get(Partition(self._topic, partition))
        if reached is None or self._returned[partition] != position:
            return position
        return max(position, reached)

    async def commit(self, offsets: Mapping[int, int]) -> None:
        self._check_open()
        self._check_lease()
        generation, lost = self._generation, offsets.keys() - self._owned
        if lost:
            raise OwnershipLost(f"{self._topic}: {sorted(lost)} are not owned")
        if not await self._connection.send_request("commit") or not self._is_connected:
            raise AppendFailed(f"{self._topic}: no answer to a commit")
        self._group.commit(self.id, generation, offsets)
        await self._connection.receive_answer("commit")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.cursor.clear()
        self.cursor.wake_up.notify()
        self._connection.forget(self)
        if not self._connection.is_killed and self._connection.cut_off_at is None:
            self._group.leave(self)
        await self._connection.receive_answer("leave")

    def expires_at(self) -> float:
        broker, silent_since = self._connection.broker, self._silent_since()
        if silent_since < NEVER:
            return silent_since + broker.session_timeout_s
        return NEVER if self._polling else self._polled_at + broker.max_poll_interval_s

    def check_timeouts(self) -> None:
        """Expire members of the group whose time-outs have passed, and this one's lease."""
        self._group.expire()
        self._context.copy().run(self._check_lease)

    def watch_lease(self) -> None:
        """Leave the partitions after a session time-out without an answered heartbeat."""
        session_s = self._connection.broker.session_timeout_s
        loop, context = asyncio.get_running_loop(), self._context.copy()
        loop.call_later(session_s, self._check_lease, context=context)

    @property
    def _is_connected(self) -> bool:
        """Whether it can contact its coordinator: not while it is suspended, either."""
        return self._connection.broker.available and self._silent_since() == NEVER

    def _silent_since(self) -> float:
        """When this client has sent its last heartbeat; NEVER while it sends any."""
        connection = self._connection
        times = (connection.suspended_at, connection.cut_off_at)
        return min((time for time in times if time is not None), default=NEVER)

    def _check_lease(self) -> None:
        """Give the partitions up if no heartbeat was answered for a session time-out."""
        broker, connection = self._connection.broker, self._connection
        last = min(self._silent_since(), broker.failed_at)
        is_over = last + broker.session_timeout_s <= broker.clock.now()
        if self._owned and is_over and not connection.is_killed and not self._closed:
            self._generation = 0  # what is left of the assignment is taken over again
            self._give_up()

    def _news(self) -> bool:
        """Whether the group's state differs from this member's copy."""
        group = self._group
        group.expire()
        if self.id not in group.members:
            return self._generation > 0
        return group.waits_for(self) or (group.is_stable and self._generation != group.generation)

    def _attend(self) -> None:
        """Contact the group: release partitions, join, take over."""
        group = self._group
        group.expire()
        if self.id not in group.members:
            self._give_up()
            group.join(self)
        elif group.waits_for(self):
            self._give_up()
            group.rejoin(self)
        if group.is_stable and self._generation != group.generation:
            self._take_over()

    def _give_up(self) -> None:
        owned, self._owned, self._starts = self._owned, frozenset(), {}
        self.cursor.clear()
        if owned:
            self._ownership.revoked(owned)

    def _take_over(self) -> None:
        group, broker = self._group, self._connection.broker
        self._generation = group.generation
        share = group.assignment[self.id]
        self._owned = frozenset(share)
        self._starts = {
            p: max(group.committed.get(p, 0), broker.log(self._topic, p).start) for p in share
        }
        self._ownership.assigned(dict(self._starts))

    def _take(self, max_records: int) -> Batches:
        for log in self.cursor.ready:
            position = self.cursor.positions[log.name]
            self.cursor.positions[log.name] = max(position, log.start)  # auto.offset.reset=earliest
        batch = self.cursor.read(max_records)
        for name, records in batch.items():
            self._returned[name.partition] = records[-1].offset + 1
        return batch

    def _check_open(self) -> None:
        self._connection.check_open()
        if self._closed:
            raise LogClosed(f"member of {self._topic}")
