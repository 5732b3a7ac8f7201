"""A group consumer with at-least-once processing: ownership, completion, commits.

Each owned partition has a `PartitionClaim`. Records are delivered in offset order, once per claim,
and the handler calls `mark_done` when the effect of one is acknowledged. The low-water mark is
committed, the lowest offset that is not done: the next owner gets every record whose effect may be
missing. Ownership is no lock: a member that has not noticed a reassignment works beside the owner.

Malformed or rejected records go to dead-letters, and are done with its acknowledgement. If the key
of a malformed one can be a request id, the handler gets a `Refused`. The number of unfinished
records is not bounded here, since a Cancel must not wait behind a full queue: the handler bounds
the queued requests, and pauses a partition only while it can answer no record of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvlane.streams.clock import BrokerClock, Clock
from kvlane.streams.codecs import AnyRecord, decode
from kvlane.streams.errors import (
    AppendFailed,
    LogClosed,
    Malformed,
    OwnershipLost,
    RecordError,
    UnknownType,
)
from kvlane.streams.ports import POLL_S, Log, Member, RebalanceListener, Record
from kvlane.streams.reading.dead_letter_format import MAX_REASON_BYTES, DeadLetterWriter
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import MAX_ID_CHARS, LogRecord, Refused
from kvlane.streams.topics import TYPES_BY_TOPIC


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


log = logging.getLogger(__name__)

GAP_CHECK_S = 5.0
"""Interval of the look for gaps in a log without new records. An uncommitted gap counts as lag."""
RECORDS_PER_POLL = 200
"""Delivered without yielding, at tens of microseconds each: a few milliseconds."""
MAX_QUEUED_DEAD_LETTERS = 1000
"""Bound of unacknowledged dead letters; polling stops at it."""
DEAD_LETTER_BATCH = 50


class PartitionClaim:
    """A partition from its assignment to its revocation, with the records that are done. `start`:
    the first offset to deliver. `is_lost`: it was revoked. `is_paused`: nothing is delivered."""

    __slots__ = (
        "_delivered",
        "_moved",
        "_undone",
        "_unwritten",
        "committed",
        "is_lost",
        "is_paused",
        "partition",
        "position",
        "start",
    )

    def __init__(self, partition: int, start: int, moved: asyncio.Event | None = None) -> None:
        self.partition = partition
        self.start = start
        self.is_lost = False
        self.is_paused = False
        self.position = start  # after the last delivered record
        self.committed = start  # by the group
        self._delivered: deque[int] = deque()  # in offset order; a done head is removed lazily
        self._undone: set[int] = set()
        self._unwritten: set[int] = set()  # with unacknowledged dead letters
        self._moved = moved

    @property
    def low_water(self) -> int:
        """The lowest delivered offset that is not done; without one, the position."""
        delivered, undone, unwritten = self._delivered, self._undone, self._unwritten
        while delivered and delivered[0] not in undone and delivered[0] not in unwritten:
            delivered.popleft()
        return delivered[0] if delivered else self.position

    @property
    def unfinished(self) -> int:
        return len(self._undone)

    def mark_done(self, offset: int) -> None:
        """The effect of this record is in the log. Idempotent; ignored on a lost claim."""
        if self.is_lost:
            return
        assert self.start <= offset < self.position, f"offset {offset} was never delivered"
        self._undone.discard(offset)
        if self._moved is not None:
            self._moved.set()

    def skip_to(self, offset: int) -> None:
        """Intake only: there is no record between the position and this offset."""
        if offset > self.position:
            self.position = offset
            if self._moved is not None and not self.is_lost:
                self._moved.set()

    def deliver(self, offset: int) -> None:
        """Intake only: this record is delivered now."""
        self._delivered.append(offset)
        self._undone.add(offset)
        self.position = offset + 1

    def require_dead_letter(self, offset: int) -> None:
        """Intake only: this record is also not done before its dead letter is written."""
        self._unwritten.add(offset)

    def dead_letter_written(self, offset: int) -> None:
        """Intake only: the dead letter of this record is acknowledged."""
        self._unwritten.discard(offset)
        if self._moved is not None and not self.is_lost:
            self._moved.set()


class OffsetCommits:
    """The commits of one member: low-water marks, never lower than before, within `every_s` of a
    `mark_done`. None of a lost claim is committed: its next owner may be ahead."""

    def __init__(
        self, topic: str, claims: Mapping[int, PartitionClaim], clock: Clock, every_s: float = 0.2
    ) -> None:
        """`claims`: the open ones by partition, each made with `moved`."""
        self.moved = asyncio.Event()
        self._topic = topic
        self._claims = claims
        self._clock = clock
        self._every_s = every_s

    async def run(self, member: Member) -> None:
        """Commit until cancelled."""
        while True:
            try:
                async with asyncio.timeout(GAP_CHECK_S):
                    await self.moved.wait()
            except TimeoutError:
                for claim in self._claims.values():
                    claim.skip_to(member.end_of_gap(claim.partition, claim.position))
                continue
            await self._clock.sleep(self._every_s)
            self.moved.clear()
            if not await self.commit(member):
                self.moved.set()

    async def commit(self, member: Member) -> bool:
        """Commit the marks that advanced; false if that must be retried."""
        claims = list(self._claims.values())
        marks = {c.partition: m for c in claims if (m := c.low_water) > c.committed}
        if not marks:
            return True
        try:
            await member.commit(marks)
        except OwnershipLost as e:
            # The revocation follows.
            log.info("commit to %s rejected: %s", self._topic, e)
            return False
        except AppendFailed as e:
            log.warning("commit to %s failed, retrying: %s", self._topic, e)
            return False
        for claim in claims:
            if claim.partition in marks:
                claim.committed = marks[claim.partition]
        return True


class RecordHandler(Protocol):
    """The handler of the records. All methods are called on the event loop and must not block."""

    def on_claimed(self, claim: PartitionClaim) -> None:
        """A partition is assigned. It is not read before `GroupConsumer.resume(claim)`."""

    def on_record(self, claim: PartitionClaim, log_record: LogRecord) -> None:
        """The next record. Each needs a `claim.mark_done(log_record.offset)`, at any time. Raises
        RecordError to reject a record: it goes to dead-letters with that reason."""

    def on_released(self, claim: PartitionClaim) -> None:
        """The partition is revoked: its unfinished records are delivered to the next owner."""


class _RejectedRecord(NamedTuple):
    claim: PartitionClaim
    record: Record
    reason: str


class GroupConsumer:
    """Reads one topic as a member of `group`, and commits the records that are done."""

    def __init__(
        self,
        log: Log,
        topic: str,
        group: str,
        lanes: RecordHandler,
        clock: Clock,
        broker_clock: BrokerClock | None = None,
        commit_every_s: float = 0.2,
        *,
        keep_prompts: bool = False,
        writes_dead_letters: bool = True,
    ) -> None:
        """Without `writes_dead_letters` rejected records are done at once."""
        self._log = log
        self._topic = topic
        self._group = group
        self._lanes = lanes
        self._clock = clock
        self._broker_clock = broker_clock
        self._types = TYPES_BY_TOPIC[topic]
        self._writes_dead_letters = writes_dead_letters
        self._dead_letters = DeadLetterWriter(
            RecordPublisher(log, clock, broker_clock), keep_prompts=keep_prompts
        )
        self._queue: asyncio.Queue[_RejectedRecord] = asyncio.Queue(MAX_QUEUED_DEAD_LETTERS)
        self._claims: dict[int, PartitionClaim] = {}
        self._commits = OffsetCommits(topic, self._claims, clock, commit_every_s)
        self._joined = asyncio.Event()
        self._closing = False
        self._member: Member | None = None

    async def wait_joined(self) -> None:
        """Wait for the first assignment, also an empty one."""
        await self._joined.wait()

    def resume(self, claim: PartitionClaim) -> None:
        """Start reading a partition. Ignored for a lost claim."""
        if self._member is not None and not claim.is_lost:
            claim.is_paused = False
            self._member.resume(claim.partition)

    def pause(self, claim: PartitionClaim) -> None:
        """Stop delivering records of a partition until `resume`; polled ones are read again."""
        if self._member is not None and not claim.is_lost:
            claim.is_paused = True
            self._member.pause(claim.partition, claim.position)

    async def run(self) -> None:
        """Poll, commit and write dead letters, until cancelled or closed."""
        self._member = member = self._log.member(self._topic, self._group, self)
        work = (self._poll_loop(member), self._commits.run(member), self._dead_letter_loop())
        tasks = [asyncio.ensure_future(w) for w in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except LogClosed:
            if not self._closing:
                raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Commit, leave the group, close all claims. Idempotent."""
        if self._closing:
            return
        self._closing = True
        member = self._member
        if member is None:
            return
        try:
            await self._commits.commit(member)
        finally:
            await member.close()
            self.revoked(frozenset(self._claims))

    # --- Ownership, called by the member ---

    def assigned(self, starts: Mapping[int, int]) -> None:
        """Open a claim for each partition; an existing one is closed first."""
        self.revoked(frozenset(starts))
        for partition, start in sorted(starts.items()):
            claim = self._claims[partition] = PartitionClaim(partition, start, self._commits.moved)
            self._lanes.on_claimed(claim)
        self._joined.set()

    def revoked(self, partitions: frozenset[int]) -> None:
        """Close the claims of these partitions, before any handler acts on them again."""
        for partition in sorted(partitions):
            claim = self._claims.pop(partition, None)
            if claim is not None:
                claim.is_lost = True
                self._lanes.on_released(claim)

    # --- reading ---

    async def _poll_loop(self, member: Member) -> None:
        while True:
            batches = await member.poll(POLL_S, RECORDS_PER_POLL)
            if self._closing:
                return
            dead_letters: list[_RejectedRecord] = []
            for partition, records in batches.items():  # no await here: it could change the claims
                claim = self._claims.get(partition.partition)
                if claim is None:
                    continue
                if self._broker_clock is not None:
                    self._broker_clock.observe(records[-1].timestamp)
                dead_letters += self._process(claim, records)
            for letter in dead_letters:
                await self._queue.put(letter)
            await self._clock.sleep(0)

    def _process(self, claim: PartitionClaim, records: Sequence[Record]) -> list[_RejectedRecord]:
        """Deliver records; returns the dead letters of those that were rejected."""
        dead_letters = []
        for record in records:
            if (
                claim.is_lost or claim.is_paused
            ):  # the handler may have done it with the record before
                break
            if record.offset < claim.position:
                continue  # fetched again by the client
            claim.deliver(record.offset)
            try:
                log_record = LogRecord(record.offset, record.timestamp, self._read(record))
                self._lanes.on_record(claim, log_record)
            except RecordError as e:
                if not self._writes_dead_letters:
                    claim.mark_done(record.offset)
                    continue
                dead_letters.append(_RejectedRecord(claim, record, str(e)))
                claim.require_dead_letter(record.offset)
                if not self._refuse(claim, record, e):
                    claim.mark_done(record.offset)
        if dead_letters:
            log.warning(
                "moving %d records of %s[%d] to dead-letters, the first from offset %d: %s",
                len(dead_letters), self._topic, claim.partition, dead_letters[0].record.offset,
                dead_letters[0].reason,
            )  # fmt: skip
        return dead_letters

    def _read(self, record: Record) -> AnyRecord:
        decoded = decode(record)
        name = type(decoded).__name__
        if name not in self._types:
            raise RecordError(f"a {name} does not belong on {self._topic}")
        return decoded

    def _refuse(self, claim: PartitionClaim, record: Record, error: RecordError) -> bool:
        """Deliver a `Refused` to the sender of a malformed record; false if none is due."""
        if not isinstance(error, Malformed) or isinstance(error, UnknownType):
            return False
        if Refused.__name__ not in self._types:
            return False
        try:
            name = (record.key or b"").decode()
            if not 0 < len(name) <= MAX_ID_CHARS:
                return False
            refusal = Refused(id=name, code="invalid", message=str(error)[:MAX_REASON_BYTES])
            self._lanes.on_record(claim, LogRecord(record.offset, record.timestamp, refusal))
        except (UnicodeDecodeError, RecordError):
            return False
        return True

    async def _dead_letter_loop(self) -> None:
        while True:
            dead_letters = [await self._queue.get()]
            while len(dead_letters) < DEAD_LETTER_BATCH and not self._queue.empty():
                dead_letters.append(self._queue.get_nowait())
            ends = await asyncio.gather(
                *map(self._write_dead_letter, dead_letters), return_exceptions=True
            )
            for error in ends:
                if error is not None:
                    raise error

    async def _write_dead_letter(self, letter: _RejectedRecord) -> None:
        await self._dead_letters.write(self._topic, letter.record, letter.reason)
        letter.claim.dead_letter_written(letter.record.offset)
