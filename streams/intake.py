"""Taking records in at least once: who owns a lane, what is done, what may be committed.

`Intake` reads one topic as a member of a group. For every partition it owns there is a `Claim`,
from one assignment to its revocation; a lane's records are handed on in offset order, each once a
claim, and the lane's owner says `done` when a record's effect is acknowledged. What is committed
is the low-water mark: the lowest offset that is not done. So after any crash or move, the next
owner gets every record whose effect might be missing, and some whose effect stands already.

Records that cannot be read, are of no type that the topic's table names, or are refused by the
lane they lie in, go to dead-letters and are done when the letter is acknowledged; a lane never
stops for one. Whoever sent what cannot be read may wait for an answer: where its key can be that of
a request, the lane gets a `Refused` in its place, and must be done with that, too.

Never here: a bound on what is handed on and not done. Records are passed on as soon as they are
polled, since a Cancel must not wait behind a full lane; how many requests may be held, and what
happens to one too many, is the rule of the `Lanes` that take them (the router refuses at once).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from streams.clock import BrokerClock, Clock
from streams.codecs import AnyRecord, decode
from streams.deadletters import LONGEST_REASON, DeadLetters
from streams.errors import AppendFailed, LogClosed, Malformed, OwnershipLost, RecordError
from streams.outbox import Outbox
from streams.ports import Log, Member, Record
from streams.records import LONGEST_ID, Fact, Refused
from streams.topics import TOPICS

log = logging.getLogger(__name__)

POLL_S = 1.0
RECORDS_PER_POLL = 200
"""Handed on without a pause in between, at tens of microseconds each: a few milliseconds."""
LETTERS_QUEUED = 1000
"""Dead letters that wait for their acknowledgement. One more and polling waits: with this many
open, the broker takes no appends, and then no request can be answered either."""
LETTERS_AT_ONCE = 50

_TYPES = {t.name: frozenset(t.records) for t in TOPICS}


class Claim:
    """One partition, from its assignment to its revocation, and what of it is done.

    `partition`; `start`, the first offset it may get; `lost`, true once it is revoked.
    """

    __slots__ = (
        "_delivered",
        "_moved",
        "_undone",
        "_unwritten",
        "committed",
        "lost",
        "partition",
        "position",
        "start",
    )

    def __init__(self, partition: int, start: int, moved: asyncio.Event | None = None) -> None:
        self.partition = partition
        self.start = start
        self.lost = False
        self.position = start  # after the last record that was handed on
        self.committed = start  # what the group knows
        self._delivered: deque[int] = deque()  # in offset order; its head is undone or about to go
        self._undone: set[int] = set()
        self._unwritten: set[int] = set()  # whose dead letters are on their way
        self._moved = moved

    @property
    def low_water(self) -> int:
        """The lowest offset that was handed on and is not done; without one, the position."""
        delivered, undone, unwritten = self._delivered, self._undone, self._unwritten
        while delivered and delivered[0] not in undone and delivered[0] not in unwritten:
            delivered.popleft()
        return delivered[0] if delivered else self.position

    @property
    def undone(self) -> int:
        """How many records were handed on and are not done."""
        return len(self._undone)

    def done(self, offset: int) -> None:
        """The effect of this record stands in the log. Harmless twice, and on a lost claim."""
        if self.lost:
            return
        assert self.start <= offset < self.position, f"offset {offset} was never handed on"
        self._undone.discard(offset)
        if self._moved is not None:
            self._moved.set()

    def take(self, offset: int) -> None:
        """Intake only: this record is handed on now."""
        self._delivered.append(offset)
        self._undone.add(offset)
        self.position = offset + 1

    def owe_letter(self, offset: int) -> None:
        """Intake only: besides, this record is not done before its dead letter is written."""
        self._unwritten.add(offset)

    def letter_written(self, offset: int) -> None:
        """Intake only: it is."""
        self._unwritten.discard(offset)
        if self._moved is not None and not self.lost:
            self._moved.set()


class Lanes(Protocol):
    """Who takes the records. All three are called on the event loop and must not block."""

    def opened(self, claim: Claim) -> None:
        """A lane is owned from now on. Nothing is read before `Intake.resume(claim)`."""

    def received(self, claim: Claim, fact: Fact) -> None:
        """The next record of a lane. `claim.done(fact.offset)` is due for each one, at any time.

        Raises RecordError for one that must not be taken: it goes to dead-letters with that reason.
        """

    def closed(self, claim: Claim) -> None:
        """The lane is owned no more: what is not done there is handed to the next owner."""


class _Letter(NamedTuple):
    claim: Claim
    record: Record
    reason: str


class Intake:
    """Reads one topic as a member of `group`, and commits what is done.

    Commits follow within `commit_every_s` of a `done`; one that fails is repeated with the next.
    `run` ends with an error when polling does, and returns after `close`.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        group: str,
        lanes: Lanes,
        clock: Clock,
        broker_clock: BrokerClock | None = None,
        commit_every_s: float = 0.2,
        *,
        keep_prompts: bool = False,
    ) -> None:
        self._log = log
        self._topic = topic
        self._group = group
        self._lanes = lanes
        self._clock = clock
        self._broker_clock = broker_clock
        self._commit_every_s = commit_every_s
        self._types = _TYPES[topic]
        self._dead_letters = DeadLetters(
            Outbox(log, clock, broker_clock), keep_prompts=keep_prompts
        )
        self._letters: asyncio.Queue[_Letter] = asyncio.Queue(LETTERS_QUEUED)
        self._claims: dict[int, Claim] = {}
        self._moved = asyncio.Event()
        self._closing = False
        self._member: Member | None = None
        self.undecodable = 0

    def resume(self, claim: Claim) -> None:
        """Start reading a lane. Ignored for a claim that is lost."""
        if self._member is not None and not claim.lost:
            self._member.resume(claim.partition)

    async def run(self) -> None:
        """Poll, commit and write dead letters, until cancelled or closed."""
        self._member = member = self._log.member(self._topic, self._group, self)
        work = (self._poll_loop(member), self._commit_loop(member), self._letter_loop())
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
        """Commit what is done, leave the group, close every claim. Idempotent."""
        if self._closing:
            return
        self._closing = True
        member = self._member
        if member is None:
            return
        try:
            await self._commit(member)
        finally:
            await member.close()
            self.revoked(frozenset(self._claims))

    # --- Ownership, called by the member ---

    def assigned(self, starts: Mapping[int, int]) -> None:
        """Open a claim for each partition; one that was held before ends first."""
        self.revoked(frozenset(starts))
        for partition, start in sorted(starts.items()):
            claim = self._claims[partition] = Claim(partition, start, self._moved)
            self._lanes.opened(claim)

    def revoked(self, partitions: frozenset[int]) -> None:
        """Close the claims of these partitions, before anybody can act on them again."""
        for partition in sorted(partitions):
            claim = self._claims.pop(partition, None)
            if claim is not None:
                claim.lost = True
                self._lanes.closed(claim)

    # --- reading ---

    async def _poll_loop(self, member: Member) -> None:
        while True:
            batches = await member.poll(POLL_S, RECORDS_PER_POLL)
            if self._closing:
                return
            letters: list[_Letter] = []
            for partition, records in batches.items():  # no await here: it could change the claims
                claim = self._claims.get(partition.partition)
                if claim is None:
                    continue
                if self._broker_clock is not None:
                    self._broker_clock.observe(records[-1].timestamp)
                letters += self._hand_on(claim, records)
            for letter in letters:
                await self._letters.put(letter)
            await self._clock.sleep(0)

    def _hand_on(self, claim: Claim, records: Sequence[Record]) -> list[_Letter]:
        """Pass records to the lanes; what cannot be read comes back as letters to be written."""
        letters = []
        for record in records:
            if claim.lost:  # through what the lanes did with the record before
                break
            if record.offset < claim.position:
                continue  # fetched again by the client
            claim.take(record.offset)
            try:
                fact = Fact(record.offset, record.timestamp, self._read(record))
                self._lanes.received(claim, fact)
            except RecordError as e:
                letters.append(_Letter(claim, record, str(e)))
                claim.owe_letter(record.offset)
                if not self._refuse(claim, record, e):
                    claim.done(record.offset)
        if letters:
            self.undecodable += len(letters)
            log.warning(
                "%d records of %s[%d] go to dead-letters, the first from offset %d: %s",
                len(letters), self._topic, claim.partition, letters[0].record.offset,
                letters[0].reason,
            )  # fmt: skip
        return letters

    def _read(self, record: Record) -> AnyRecord:
        decoded = decode(record)
        name = type(decoded).__name__
        if name not in self._types:
            raise RecordError(f"a {name} does not belong on {self._topic}")
        return decoded

    def _refuse(self, claim: Claim, record: Record, error: RecordError) -> bool:
        """Let the lane tell the sender of a record what is wrong with it; false if it need not.

        Of a type that is not known yet nobody can tell whether it was a request at all.
        """
        if not isinstance(error, Malformed) or Refused.__name__ not in self._types:
            return False
        try:
            name = (record.key or b"").decode()
            if not 0 < len(name) <= LONGEST_ID:
                return False
            refusal = Refused(id=name, code="invalid", message=str(error)[:LONGEST_REASON])
            self._lanes.received(claim, Fact(record.offset, record.timestamp, refusal))
        except (UnicodeDecodeError, RecordError):
            return False
        return True

    async def _letter_loop(self) -> None:
        while True:
            letters = [await self._letters.get()]
            while len(letters) < LETTERS_AT_ONCE and not self._letters.empty():
                letters.append(self._letters.get_nowait())
            ends = await asyncio.gather(*map(self._bury, letters), return_exceptions=True)
            for error in ends:
                if error is not None:
                    raise error

    async def _bury(self, letter: _Letter) -> None:
        await self._dead_letters.persist(self._topic, letter.record, letter.reason)
        letter.claim.letter_written(letter.record.offset)

    # --- committing ---

    async def _commit_loop(self, member: Member) -> None:
        while True:
            await self._moved.wait()
            await self._clock.sleep(self._commit_every_s)
            self._moved.clear()
            if not await self._commit(member):
                self._moved.set()

    async def _commit(self, member: Member) -> bool:
        """Commit the marks that moved; false when that must be tried again."""
        claims = list(self._claims.values())
        marks = {c.partition: m for c in claims if (m := c.low_water) > c.committed}
        if not marks:
            return True
        try:
            await member.commit(marks)
        except OwnershipLost as e:
            # The revocation follows; until then there is nothing to say that anybody hears.
            log.info("commit to %s refused: %s", self._topic, e)
            return False
        except AppendFailed as e:
            log.warning("commit to %s failed, repeating: %s", self._topic, e)
            return False
        for claim in claims:
            if claim.partition in marks:
                claim.committed = marks[claim.partition]
        return True
