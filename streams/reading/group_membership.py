"""Membership of a consumer group that assigns partitions, without reads or commits.

For work that is divided by partitions of a topic and read by other means. Ownership is no lock: a
member that has not yet noticed a reassignment may work beside the new owner.
"""

from __future__ import annotations

from kvlane.streams.errors import LogClosed
from kvlane.streams.ports import Log, Member, RebalanceListener

POLL_S = 1.0


class GroupMembership:
    """One member; `ownership` gets its partitions. `run` must be running."""

    def __init__(self, log: Log, topic: str, group: str, ownership: RebalanceListener) -> None:
        self._log = log
        self._topic = topic
        self._group = group
        self._ownership = ownership
        self._member: Member | None = None
        self._is_closed = False

    async def run(self) -> None:
        """Take part in the group until cancelled or closed. Raises as `Member.poll`."""
        self._member = member = self._log.member(self._topic, self._group, self._ownership)
        try:
            while True:
                await member.poll(POLL_S)  # never a record: no partition is resumed
        except LogClosed:
            if not self._is_closed:
                raise

    async def close(self) -> None:
        """Leave the group, so that others take over at once. Idempotent."""
        self._is_closed = True
        if self._member is not None:
            await self._member.close()
