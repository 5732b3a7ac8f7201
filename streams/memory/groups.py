"""Consumer groups of the in-memory broker, after Kafka's classic protocol with eager rebalances.

A change of members starts a rebalance: every member hears of it at its next heartbeat, gives up
everything it owns and joins again; when all have, or the session time-out is over, a new
generation begins and the range assignor deals the partitions out. Commits count only in the
generation in which they were sent. A member whose client is silent for the session time-out, or
that does not poll for the poll interval, is left out of the next generation and does not know it:
it goes on believing in what it owned until it next hears from the group.

Members hear of the group inside `poll`; a waiting poll is woken. There are no background tasks:
time-outs are looked at whenever somebody deals with the group, and a waiting poll sets its alarm
for the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streams.errors import AppendFailed, LogClosed, OwnershipLost
from streams.memory.partition import Cursor
from streams.ports import Batches, Ownership

if TYPE_CHECKING:
    from streams.memory.broker import MemoryBroker, MemoryLog

_NEVER = float("inf")


class Group:
    """One group on one topic, as its coordinator sees it."""

    def __init__(self, broker: MemoryBroker, topic: str) -> None:
        self.topic = topic
        self.generation = 0
        self.members: dict[str, MemoryMember] = {}
        self.committed: dict[int, int] = {}
        self.assignment: dict[str, list[int]] = {}
        self._broker = broker
        self._rejoined: dict[str, None] | None = None  # None: no rebalance is going on
        self._rebalance_ends = _NEVER

    @property
    def stable(self) -> bool:
        """No rebalance is going on."""
        return self._rejoined is None

    def join(self, member: MemoryMember) -> None:
        """A new member, or one that was left out: everybody joins again."""
        self.members[member.id] = member
        self._rebalance()
        self.rejoin(member)

    def rejoin(self, member: MemoryMember) -> None:
        """The member has given up what it owned and waits for its new share."""
        assert self._rejoined is not None
        self._rejoined[member.id] = None
        self._complete()

    def waits_for(self, member: MemoryMember) -> bool:
        """A rebalance goes on and this member has not joined it yet."""
        return self._rejoined is not None and member.id not in self._rejoined

    def leave(self, member: MemoryMember) -> None:
        """The member is gone of its own accord."""
        if self.members.pop(member.id, None) is not None:
            self._rebalance()

    def evict(self, member_id: str) -> None:
        """As if the member's time-out had struck; it does not know."""
        if self.members.pop(member_id, None) is not None:
            self._rebalance()

    def expire(self) -> None:
        """Drop members whose time is over, and end a rebalance that has waited long enough."""
        now = self._broker.clock.now()
        gone = [m for m in self.members.values() if m.expires_at() <= now]
        if self._rejoined is not None and self._rebalance_ends <= now:
            gone += [m for m in self.members.values() if m.id not in self._rejoined]
        for member in gone:
            self.members.pop(member.id, None)
        if gone:
            self._rebalance()

    def next_change(self) -> float:
        """When a time-out will strike if nothing happens until then."""
        expiries = (m.expires_at() for m in self.members.values())
        return min(self._rebalance_ends, min(expiries, default=_NEVER))

    def commit(self, member_id: str, generation: int, offsets: Mapping[int, int]) -> None:
        """Raises OwnershipLost unless the member is of this generation."""
        self.expire()
        if member_id not in self.members or generation != self.generation:
            raise OwnershipLost(f"{self.topic}: generation {generation} is over")
        self.committed.update(offsets)

    def _rebalance(self) -> None:
        if self._rejoined is None:
            self._rejoined = {}
            self._rebalance_ends = self._broker.clock.now() + self._broker.session_timeout_s
        else:
            self._rejoined = {m: None for m in self._rejoined if m in self.members}
        for member in self.members.values():
            member.cursor.bell.ring()
        self._complete()

    def _complete(self) -> None:
        if self._rejoined is None or len(self._rejoined) < len(self.members):
            return
        self._rejoined, self._rebalance_ends = None, _NEVER
        self.generation += 1
        self.assignment = _ranges(self._broker.partitions[self.topic], sorted(self.members))
        for member in self.members.values():
            member.cursor.bell.ring()


def _ranges(partitions: int, members: list[str]) -> dict[str, list[int]]:
    """The range assignor: consecutive partitions, the first members take one more."""
    if not members:
        return {}
    each, more = divmod(partitions, len(members))
    shares, first = {}, 0
    for i, member in enumerate(members):
        size = each + (i < more)
        shares[member] = list(range(first, first + size))
        first += size
    return shares


class MemoryMember:
    """Implements `Member`; made by `MemoryLog.member`."""

    def __init__(self, log: MemoryLog, topic: str, group: Group, ownership: Ownership) -> None:
        self.id = log.broker.member_id(log.client_id)
        self.cursor = Cursor()
        self._log = log
        self._topic = topic
        self._group = group
        self._ownership = ownership
        self._starts: dict[int, int] = {}  # owned partitions that were not resumed yet
        self._owned: frozenset[int] = frozenset()
        self._generation = 0
        self._polling = False
        self._polled_at = log.broker.clock.now()
        self._closed = False

    async def poll(self, timeout_s: float, max_records: int = 500) -> Batches:
        """Hear from the group, then the next records."""
        self._check_open()
        clock = self._log.broker.clock
        deadline = clock.now() + timeout_s
        self._polling = True
        try:
            await self._log.travel("poll")
            while True:
                self._check_open()
                if self._log.broker.available:
                    if self._news():
                        await self._log.travel("heartbeat")
                        self._check_open()
                    self._attend()
                    if batch := self._take(max_records):
                        return batch
                now = clock.now()
                if deadline <= now:
                    return {}
                alarm = self._group.next_change() if self._log.broker.available else deadline
                await self.cursor.bell.wait(min(deadline, alarm) - now)
                await self._log.reachable()
        finally:
            self._polling = False
            self._polled_at = clock.now()

    def resume(self, partition: int) -> None:
        """Start reading an owned partition."""
        if (start := self._starts.pop(partition, None)) is not None:
            self.cursor.follow(self._log.broker.log(self._topic, partition), start)

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit next offsets in the generation this member believes in."""
        self._check_open()
        generation, lost = self._generation, offsets.keys() - self._owned
        if lost:
            raise OwnershipLost(f"{self._topic}: {sorted(lost)} are not owned")
        if not await self._log.travel("commit") or not self._log.broker.available:
            raise AppendFailed(f"{self._topic}: no answer to a commit")
        self._group.commit(self.id, generation, offsets)
        await self._log.answer("commit")

    async def close(self) -> None:
        """Leave the group at once."""
        if self._closed:
            return
        self._closed = True
        self.cursor.leave_all()
        self.cursor.bell.ring()
        self._log.forget(self)
        if not self._log.is_cut:
            self._group.leave(self)
        await self._log.answer("leave")

    def expires_at(self) -> float:
        """When the coordinator gives this member up, by its clock."""
        broker, silent_since = self._log.broker, self._log.silent_since
        if silent_since is not None:
            return silent_since + broker.session_timeout_s
        return _NEVER if self._polling else self._polled_at + broker.max_poll_interval_s

    def look(self) -> None:
        """Let the group notice time-outs that have passed by now."""
        self._group.expire()

    def _news(self) -> bool:
        """Whether the group has something to tell that this member does not know."""
        group = self._group
        group.expire()
        if self.id not in group.members:
            return self._generation > 0
        return group.waits_for(self) or (group.stable and self._generation != group.generation)

    def _attend(self) -> None:
        """Hear from the group: give up, join, take over."""
        group = self._group
        group.expire()
        if self.id not in group.members:
            self._give_up()
            group.join(self)
        elif group.waits_for(self):
            self._give_up()
            group.rejoin(self)
        if group.stable and self._generation != group.generation:
            self._take_over()

    def _give_up(self) -> None:
        owned, self._owned, self._starts = self._owned, frozenset(), {}
        self.cursor.leave_all()
        if owned:
            self._ownership.revoked(owned)

    def _take_over(self) -> None:
        group, broker = self._group, self._log.broker
        self._generation = group.generation
        share = group.assignment[self.id]
        self._owned = frozenset(share)
        self._starts = {
            p: max(group.committed.get(p, 0), broker.log(self._topic, p).start) for p in share
        }
        if share:
            self._ownership.assigned(dict(self._starts))

    def _take(self, max_records: int) -> Batches:
        for log in self.cursor.ready:
            position = self.cursor.positions[log.name]
            self.cursor.positions[log.name] = max(position, log.start)  # auto.offset.reset=earliest
        return self.cursor.take(max_records)

    def _check_open(self) -> None:
        self._log.check_open()
        if self._closed:
            raise LogClosed(f"member of {self._topic}")
