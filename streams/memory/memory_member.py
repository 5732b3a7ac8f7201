"""One member of a consumer group of the in-memory broker.

Owns its copy of the assignment, which may be out of date, and the positions; the decisions of the
group are in `streams/memory/consumer_groups.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from streams.errors import AppendFailed, LogClosed, OwnershipLost
from streams.memory.consumer_groups import NEVER, ConsumerGroup
from streams.memory.memory_connection import MemoryConnection
from streams.memory.partition_log import Cursor
from streams.ports import Batches, Partition, RebalanceListener


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
        self._owned: frozenset[int] = frozenset()
        self._generation = 0
        self._polling = False
        self._polled_at = connection.broker.clock.now()
        self._closed = False

    async def poll(self, timeout_s: float, max_records: int = 500) -> Batches:
        """Contact the group, then return the next records."""
        self._check_open()
        clock = self._connection.broker.clock
        deadline = clock.now() + timeout_s
        self._polling = True
        try:
            await self._connection.send_request("poll")
            while True:
                self._check_open()
                if self._connection.broker.available:
                    if self._news():
                        await self._connection.send_request("heartbeat")
                        self._check_open()
                    self._attend()
                    if batch := self._take(max_records):
                        return batch
                now = clock.now()
                if deadline <= now:
                    return {}
                alarm = self._group.next_change() if self._connection.broker.available else deadline
                await self.cursor.wake_up.wait(min(deadline, alarm) - now)
                await self._connection.check_alive()
        finally:
            self._polling = False
            self._polled_at = clock.now()

    def resume(self, partition: int) -> None:
        """Start reading an owned partition."""
        if (start := self._starts.pop(partition, None)) is not None:
            self.cursor.add(self._connection.broker.log(self._topic, partition), start)

    def pause(self, partition: int, position: int | None = None) -> None:
        """Read no more of a partition until it is resumed."""
        name = Partition(self._topic, partition)
        if (reached := self.cursor.positions.get(name)) is not None:
            self.cursor.remove(name)
            self._starts[partition] = reached if position is None else position

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit next offsets in the generation that this member last joined."""
        self._check_open()
        generation, lost = self._generation, offsets.keys() - self._owned
        if lost:
            raise OwnershipLost(f"{self._topic}: {sorted(lost)} are not owned")
        if (
            not await self._connection.send_request("commit")
            or not self._connection.broker.available
        ):
            raise AppendFailed(f"{self._topic}: no answer to a commit")
        self._group.commit(self.id, generation, offsets)
        await self._connection.receive_answer("commit")

    async def close(self) -> None:
        """Leave the group at once."""
        if self._closed:
            return
        self._closed = True
        self.cursor.clear()
        self.cursor.wake_up.notify()
        self._connection.forget(self)
        if not self._connection.is_killed:
            self._group.leave(self)
        await self._connection.receive_answer("leave")

    def expires_at(self) -> float:
        """When the coordinator gives this member up, by its clock."""
        broker, silent_since = self._connection.broker, self._connection.suspended_at
        if silent_since is not None:
            return silent_since + broker.session_timeout_s
        return NEVER if self._polling else self._polled_at + broker.max_poll_interval_s

    def check_timeouts(self) -> None:
        """Expire members of the group whose time-outs have passed."""
        self._group.expire()

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
        return self.cursor.read(max_records)

    def _check_open(self) -> None:
        self._connection.check_open()
        if self._closed:
            raise LogClosed(f"member of {self._topic}")
