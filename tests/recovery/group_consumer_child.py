"""A process that takes requests in, for tests that kill it. Not a test itself.

    python tests/recovery/group_consumer_child.py BOOTSTRAP PREFIX [POINT [N]]

Every request has one effect: an Ended in the ledger, in the same lane. When POINT is reached for
the Nth time, the process says so on its standard output and stands still as a whole, waiting to be
killed. The points lie around the ports that the intake uses; the intake itself knows none.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Appended, Batches, Entry, Member, RebalanceListener
from kvlane.streams.reading.group_consumer import GroupConsumer, PartitionClaim
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Ended, LogRecord, Refused
from kvlane.streams.request import Request
from kvlane.streams.topics import DEAD_LETTERS, LEDGER, REQUESTS

GROUP = "intake"
SESSION_MS = 1500
UNDER_WAY_S = 0.002
"""After so long a request has left this process, and its answer has hardly come."""

LETTER_S = 1.5
"""How long a dead letter waits before it is sent: all effects around it are committed by then."""

POINTS = {
    "assigned": "told by the group, before a lane is opened",
    "revoked": "told by the group, before a lane is closed",
    "opened": "a lane is open, before it is read",
    "polled": "records are here, before any is handed on",
    "received": "a record is handed on, before its effect is sent",
    "sending": "the effect is on its way",
    "appended": "the effect stands, before anybody here knows",
    "acknowledged": "the effect is acknowledged, before it is done",
    "done": "it is done, before that is committed",
    "committing": "a commit is on its way",
    "committed": "a commit stands, before anybody here knows",
    "burying": "a dead letter is on its way",
    "buried": "a dead letter stands, before anybody here knows",
}


class Points:
    """Where this process is to stand still."""

    def __init__(self, point: str, number: int) -> None:
        assert not point or point in POINTS, point
        self._stop_at = (point, number)
        self._reached: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        self._reached[point] += 1
        if (point, self._reached[point]) == self._stop_at:
            print(f"at {point}", flush=True)  # noqa: T201
            while True:
                signal.pause()

    async def around(self, before: str, work: Any, after: str) -> Any:
        """Do work that has a point while it is under way, and one when it is complete."""
        task = asyncio.ensure_future(work)
        if self._stop_at[0] == before:
            await asyncio.sleep(UNDER_WAY_S)
            self.reach(before)
        result = await task
        self.reach(after)
        return result


class WatchedLog:
    """The log, with points around the appends of effects and dead letters."""

    def __init__(self, log: KafkaLog, points: Points) -> None:
        self._log = log
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, topic: str, entry: Entry, partition: int | None = None) -> Appended:
        names = {LEDGER: ("sending", "appended"), DEAD_LETTERS: ("burying", "buried")}[topic]
        before, after = names
        if topic == DEAD_LETTERS:
            await asyncio.sleep(LETTER_S)
        appended: Appended = await self._points.around(
            before, self._log.append(topic, entry, partition), after
        )
        return appended

    def member(self, topic: str, group: str, ownership: RebalanceListener) -> Member:
        owner = WatchedOwnership(ownership, self._points)
        return WatchedMember(self._log.member(topic, group, owner), self._points)


class WatchedOwnership:
    """Points before the intake hears from the group."""

    def __init__(self, ownership: RebalanceListener, points: Points) -> None:
        self._ownership = ownership
        self._points = points

    def assigned(self, starts: Mapping[int, int]) -> None:
        self._points.reach("assigned")
        self._ownership.assigned(starts)

    def revoked(self, partitions: frozenset[int]) -> None:
        self._points.reach("revoked")
        self._ownership.revoked(partitions)


class WatchedMember:
    """Points around polls and commits."""

    def __init__(self, member: Member, points: Points) -> None:
        self._member = member
        self._points = points

    async def poll(self, timeout_s: float, max_records: int = 500) -> Batches:
        batches = await self._member.poll(timeout_s, max_records)
        if batches:
            self._points.reach("polled")
        return batches

    def resume(self, partition: int) -> None:
        self._points.reach("opened")
        self._member.resume(partition)

    def pause(self, partition: int, position: int | None = None) -> None:
        self._member.pause(partition, position)

    def end_of_gap(self, partition: int, position: int) -> int:
        return self._member.end_of_gap(partition, position)

    async def commit(self, offsets: Mapping[int, int]) -> None:
        await self._points.around("committing", self._member.commit(offsets), "committed")

    async def close(self) -> None:
        await self._member.close()


class Lanes:
    """Gives every request its effect, in another order than they came in."""

    def __init__(self, publisher: RecordPublisher, points: Points) -> None:
        self.intake: GroupConsumer | None = None
        self._publisher = publisher
        self._points = points
        self._tasks: set[asyncio.Task[None]] = set()

    def on_claimed(self, claim: PartitionClaim) -> None:
        assert self.intake is not None
        self.intake.resume(claim)
        print(f"owns {claim.partition}", flush=True)  # noqa: T201

    def on_record(self, claim: PartitionClaim, log_record: LogRecord) -> None:
        self._points.reach("received")
        task = asyncio.get_running_loop().create_task(self._answer(claim, log_record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_released(self, claim: PartitionClaim) -> None:
        pass

    async def _answer(self, claim: PartitionClaim, log_record: LogRecord) -> None:
        assert isinstance(log_record.record, Request | Refused)
        await asyncio.sleep(0.1 * (3 - log_record.offset % 4) + 0.2 * (log_record.offset // 4 % 3))
        ended = Ended(id=log_record.record.id, code="seen")
        await self._publisher.publish(LEDGER, log_record.record.id, ended, claim.partition)
        self._points.reach("acknowledged")
        claim.mark_done(log_record.offset)
        self._points.reach("done")


async def main(bootstrap_servers: str, prefix: str, point: str = "", number: str = "1") -> None:
    points, clock = Points(point, int(number)), SystemClock()
    connection = ConnectionOptions(bootstrap_servers, "intake-child", session_timeout_ms=SESSION_MS)
    kafka = KafkaLog(connection, prefix)
    await kafka.start()
    log: Any = WatchedLog(kafka, points)
    lanes = Lanes(RecordPublisher(log, clock), points)
    lanes.intake = GroupConsumer(log, REQUESTS, GROUP, lanes, clock, commit_every_s=0.05)
    await lanes.intake.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(*sys.argv[1:]))
