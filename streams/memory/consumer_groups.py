"""Consumer groups of the in-memory broker, after Kafka's classic protocol with eager rebalances.

At a change of members each releases all partitions at its next heartbeat and rejoins; when all
have, or after the session time-out, a new generation begins with the range assignor. Commits count
only in their generation. A silent member, or one that does not poll, is excluded without notice: it
keeps its partitions until it contacts the group, or finds its own session over. Members contact the
group inside `poll`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvlane.streams.clock import Clock
from kvlane.streams.errors import OwnershipLost
from kvlane.streams.memory.partition_log import Cursor

NEVER = float("inf")


class GroupMember(Protocol):
    id: str
    cursor: Cursor
    """Its bell wakes a poll that waits."""

    def expires_at(self) -> float:
        """When the coordinator removes this member, by its clock."""

    def watch_lease(self) -> None:
        """The coordinator has failed."""


class ConsumerGroup:
    """One group on one topic, as its coordinator has it."""

    def __init__(self, clock: Clock, topic: str, partitions: int, session_timeout_s: float) -> None:
        self.topic = topic
        self.generation = 0
        self.members: dict[str, GroupMember] = {}
        self.committed: dict[int, int] = {}
        self.assignment: dict[str, list[int]] = {}
        self._clock = clock
        self._partitions = partitions
        self._session_timeout_s = session_timeout_s
        self._rejoined: dict[str, None] | None = None  # None: no rebalance is going on
        self._rebalance_ends = NEVER

    @property
    def is_stable(self) -> bool:
        return self._rejoined is None

    def join(self, member: GroupMember) -> None:
        """Add a new or excluded member: all members rejoin."""
        self.members[member.id] = member
        self._rebalance()
        self.rejoin(member)

    def rejoin(self, member: GroupMember) -> None:
        """The member has released its partitions and waits for its new assignment."""
        assert self._rejoined is not None
        self._rejoined[member.id] = None
        self._complete()

    def waits_for(self, member: GroupMember) -> bool:
        """A rebalance is in progress that this member has not joined yet."""
        return self._rejoined is not None and member.id not in self._rejoined

    def leave(self, member: GroupMember) -> None:
        if self.members.pop(member.id, None) is not None:
            self._rebalance()

    def evict(self, member_id: str) -> None:
        """As if the member had timed out; it is not notified."""
        if self.members.pop(member_id, None) is not None:
            self._rebalance()

    def expire(self) -> None:
        """Remove members that have timed out, and end a rebalance that has timed out."""
        now = self._clock.now()
        gone = [m for m in self.members.values() if m.expires_at() <= now]
        if self._rejoined is not None and self._rebalance_ends <= now:
            gone += [m for m in self.members.values() if m.id not in self._rejoined]
        for member in gone:
            self.members.pop(member.id, None)
        if gone:
            self._rebalance()

    def next_change(self) -> float:
        expiries = (m.expires_at() for m in self.members.values())
        return min(self._rebalance_ends, min(expiries, default=NEVER))

    def commit(self, member_id: str, generation: int, offsets: Mapping[int, int]) -> None:
        """Raises OwnershipLost unless the member is of this generation."""
        self.expire()
        if member_id not in self.members or generation != self.generation:
            raise OwnershipLost(f"{self.topic}: generation {generation} is over")
        self.committed.update(offsets)

    def _rebalance(self) -> None:
        if self._rejoined is None:
            self._rejoined = {}
            self._rebalance_ends = self._clock.now() + self._session_timeout_s
        else:
            self._rejoined = {m: None for m in self._rejoined if m in self.members}
        for member in self.members.values():
            member.cursor.wake_up.notify()
        self._complete()

    def _complete(self) -> None:
        if self._rejoined is None or len(self._rejoined) < len(self.members):
            return
        self._rejoined, self._rebalance_ends = None, NEVER
        self.generation += 1
        self.assignment = _ranges(self._partitions, sorted(self.members))
        for member in self.members.values():
            member.cursor.wake_up.notify()


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
