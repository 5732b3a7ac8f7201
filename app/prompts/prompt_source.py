"""A topic of prompts as one member of its group reads it: publication by credit, pauses, commits.

    handle ──► convert ──► admit, as credit allows ──► requests ──► commit

A prompt is done when everything that follows from it is acknowledged; the low-water mark of its
partition is committed soon after. While a batch waits for credit, the member keeps polling with all
partitions paused; otherwise the group would assign them elsewhere, to wait as well.

The sources of the classes of work (`app/preprocessor.py`) share models, tokenizers and the
connection, and no state, so neither waits behind the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvlane.app.prompts.backlog import Backlog
from kvlane.app.prompts.job_order import BatchItem, JobOrder
from kvlane.app.prompts.prompt_credit import CreditDebit, PromptCredit
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.asyncapi import PromptPayload
from kvlane.streams.clock import BrokerClock
from kvlane.streams.errors import RecordTooLarge
from kvlane.streams.ports import Log, Member, Record
from kvlane.streams.prompt import appended_ms
from kvlane.streams.reading.group_consumer import OffsetCommits, PartitionClaim
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Cancel, Refused
from kvlane.streams.request import Request
from kvlane.streams.topics import GROUPS, REQUESTS, lane_of

log = logging.getLogger(__name__)

MAX_BATCH = 200
"""Prompts handled together: at most this number waits for credit outside of the log."""
PAUSE_AFTER_S = 0.5
"""Time that a batch may take before partitions are paused."""
RESUMED_AFTER_S = 1.0
"""Time without another pause after which a topic counts as read as it grows."""
PAUSED_POLL_S = 0.25
"""Poll time of paused partitions, which delays the reaction to a completed batch."""
STOP_S = 2.0
"""Time for appends under way at an orderly stop, before the last commit."""
CREDIT_POLL_S = 1.0
"""Period of checks for credit and deadlines without a new report."""

MAX_PREFIX_BYTES = 16_384
"""Beginning of a prompt by which batch requests are ordered: 4096 tokens."""

PreprocessedRecord = Request | Cancel | Refused


class ConvertedPrompt(NamedTuple):
    """The result of preprocessing: a record for `requests`, an append to another topic, or both."""

    source: Record
    answer: PreprocessedRecord | None = None
    append: Coroutine[Any, Any, object] | None = None


@dataclass(eq=False, slots=True)
class _OpenPrompt:
    """A prompt with the number of its appends that are not acknowledged. `claim`: the assignment
    under which it was read; none if it was not read by a member."""

    claim: PartitionClaim | None
    offset: int
    appends: int

    @property
    def is_left(self) -> bool:
        """True if the next owner of its partition has to publish it."""
        return self.claim is not None and self.claim.is_lost

    def acknowledge(self) -> None:
        self.appends -= 1
        if not self.appends and self.claim is not None:
            self.claim.mark_done(self.offset)


class _PreparedRecord(NamedTuple):
    """A record of a prompt; `debit`: of its credit, once it is admitted."""

    record: PreprocessedRecord
    prompt: _OpenPrompt
    debit: CreditDebit | None = None


class PromptSource:
    """One topic of prompts; its own `RebalanceListener`. `convert`: of the records of a poll.
    `on_published`: for each acknowledged record. `max_lifetime_s`: longest time limit of its
    requests. `order`: of the requests that are read together, over all lanes; without one each lane
    keeps the order of the log."""

    def __init__(
        self,
        topic: str,
        log: Log,
        ctx: ProcessContext,
        publisher: RecordPublisher,
        credit: PromptCredit,
        convert: Callable[[Sequence[Record]], Awaitable[Sequence[ConvertedPrompt]]],
        *,
        broker_clock: BrokerClock,
        on_published: Callable[[PreprocessedRecord], None],
        max_lifetime_s: float,
        order: JobOrder | None = None,
    ) -> None:
        self.topic = topic
        self._log = log
        self._ctx = ctx
        self._publisher = publisher
        self._broker_clock = broker_clock
        self._credit = credit
        self._convert = convert
        self._on_published = on_published
        self._max_lifetime_s = max_lifetime_s
        self._order = order
        self._lanes = self._partitions = 1
        self._claims: dict[int, PartitionClaim] = {}
        self.backlog = Backlog(topic, log, ctx.clock, self._claims)
        self._commits = OffsetCommits(topic, self._claims, ctx.clock)
        self._member: Member | None = None
        self._committing: asyncio.Task[None] | None = None
        self._handling: asyncio.Future[None] | None = None
        self._is_paused = False
        self._paused_at: float | None = None
        """Start of the current pause, which may be of several batches."""
        self._resumed_at = 0.0
        self._unpublished = 0
        self._stopping = asyncio.Event()
        [self.group] = [group for group, read in GROUPS.items() if read == topic]

    @property
    def is_paused(self) -> bool:
        """Whether prompts wait in the log, for room in routers or for a broker that answers."""
        now = self._ctx.clock.now()
        return self._is_paused or (
            self._paused_at is not None and now - self._resumed_at < RESUMED_AFTER_S
        )

    async def start(self) -> None:
        """Ask for the topics, before anything is read."""
        self._lanes = await self._log.partitions(REQUESTS)
        self._partitions = await self._log.partitions(self.topic)
        self._member = self._log.member(self.topic, self.group, self)
        # In the background: a stuck coordinator must not delay prompts.
        self._committing = self._ctx.spawn("commits", self._commits.run(self._member))

    async def stop(self) -> None:
        """Publish nothing more, and commit what is published, before the member is closed."""
        self._stopping.set()
        self._credit.credit_changed.notify_all()
        if self._handling is not None:
            await asyncio.wait({self._handling}, timeout=STOP_S)
        if self._committing is not None and self._member is not None:
            self._committing.cancel()
            await asyncio.gather(self._committing, return_exceptions=True)
            await self._commits.commit(self._member)

    def open_member(self) -> Member:
        """The member whose records `handle` gets; it joins its group at its first poll."""
        return self._opened

    async def handle(self, records: PromptPayload) -> None:
        """Publish these prompts; those of partitions that were revoked are left to their owner."""
        if self._stopping.is_set():
            return
        claims = dict(self._claims)
        received = [record for record in records if self._deliver(record)]
        for record in reversed(received):
            self.backlog.reach(record.partition, record.timestamp)
        await self._wait_for(self.publish_requests(received))
        if self._stopping.is_set():
            return
        for record in received:  # also those that nothing follows from
            claim = claims[record.partition]
            claim.mark_done(record.offset)
            if not claim.is_lost:
                self.backlog.reach(record.partition, record.timestamp)

    def _deliver(self, record: Record) -> bool:
        """Count a record of an owned partition as read; false if it is not, or was read before."""
        claim = self._claims.get(record.partition)
        if claim is None or record.offset < claim.position:
            return False
        claim.deliver(record.offset)
        return True

    # --- publication -----------------------------------------------------------------------------

    async def publish_requests(self, records: Sequence[Record]) -> None:
        """Publish the records of these prompts; returns when all of them are acknowledged. A Cancel
        follows its Request. Prompts of revoked partitions are left to their next owner."""
        claims = dict(self._claims)  # the assignments under which the records were polled
        answers: list[_PreparedRecord] = []
        appends: list[Coroutine[Any, Any, None]] = []
        for source, answer, append in await self._convert(records):
            expected = (answer is not None) + (append is not None)
            prompt = _OpenPrompt(claims.get(source.partition), source.offset, expected)
            if append is not None:
                appends.append(_acknowledged_by(append, prompt))
            if isinstance(answer, Refused):
                answer = replace(answer, queued_ms=appended_ms(source))  # noqa: PLW2901
            if answer is not None:
                answers.append(_PreparedRecord(answer, prompt))
        lanes: dict[int, list[_PreparedRecord]] = {}
        for prepared in answers:
            lanes.setdefault(self._lane(prepared.record), []).append(prepared)
        together = [self._in_order(answers)] if self._order is not None else lanes.values()
        await asyncio.gather(*appends, *map(self._publish_all, together))

    def _in_order(self, answers: Sequence[_PreparedRecord]) -> list[_PreparedRecord]:
        """The requests in the order of the class, then the other records as they came."""
        assert self._order is not None
        requests = [(a, a.record) for a in answers if isinstance(a.record, Request)]
        items = [
            BatchItem(_job(request), request.token_ids[:MAX_PREFIX_BYTES], request.prompt_tokens)
            for _, request in requests
        ]
        others = [a for a in answers if not isinstance(a.record, Request)]
        return [requests[i][0] for i in self._order.arranged(items)] + others

    def _lane(self, record: PreprocessedRecord) -> int:
        return lane_of(record.id, self._lanes)

    async def _publish_all(self, answers: Sequence[_PreparedRecord]) -> None:
        """Publish these records, as far as credit allows at a time."""
        self._unpublished += (left := len(answers))
        self.backlog.waiting_tokens += (tokens := _tokens(answers))
        try:
            while answers := [a for a in answers if not a.prompt.is_left]:
                if self._stopping.is_set():
                    return
                ready, answers = self._admit(answers)
                try:
                    await asyncio.gather(
                        *(self._publish(lane, records) for lane, records in ready.items())
                    )
                finally:
                    for records in ready.values():
                        for _, _, debit in records:
                            if debit is not None and debit.offset is None:
                                self._credit.release(debit)
                self._unpublished -= left - len(answers)
                left = len(answers)
                self.backlog.waiting_tokens -= tokens - (tokens := _tokens(answers))
                if answers and not ready:
                    await self._credit.credit_changed.wait(CREDIT_POLL_S)
        finally:
            self._unpublished -= left
            self.backlog.waiting_tokens -= tokens

    def _admit(
        self, answers: Sequence[_PreparedRecord]
    ) -> tuple[dict[int, list[_PreparedRecord]], list[_PreparedRecord]]:
        """Records that may be published now, by lane, and those that must wait. Requests of a lane
        keep their order; a Cancel waits behind its own request only."""
        ready: dict[int, list[_PreparedRecord]] = {}
        waiting: list[_PreparedRecord] = []
        full_lanes: set[int] = set()
        for answer in answers:
            record, debit = answer.record, None
            lane = self._lane(record)
            if isinstance(record, Request):
                if self._is_late(record):
                    late = "its deadline passed while routers had no room for it"
                    refused = Refused(
                        id=record.id, code="deadline", message=late, result=record.result,
                        queued_ms=record.queued_ms, account=record.account,
                    )  # fmt: skip
                    ready.setdefault(lane, []).append(answer._replace(record=refused))
                    continue
                if lane not in full_lanes:
                    debit = self._credit.acquire(lane, record)
                must_wait = debit is None
            else:
                must_wait = any(other.record.id == record.id for other in waiting)
            if must_wait:
                waiting.append(answer)
                full_lanes.add(lane)
            else:
                ready.setdefault(lane, []).append(answer._replace(debit=debit))
        return ready, waiting

    def _is_late(self, request: Request) -> bool:
        lifetime_s = min(request.deadline_s, self._max_lifetime_s)
        return self._broker_clock.now_ms() > request.queued_ms + lifetime_s * 1000

    async def _publish(self, lane: int, ready: Sequence[_PreparedRecord]) -> None:
        if len(ready) > 1:
            try:
                pairs = [(each.record.id, each.record) for each in ready]
                appended = await self._publisher.publish_batch(REQUESTS, lane, pairs)
            except RecordTooLarge:
                middle = len(ready) // 2
                await self._publish(lane, ready[:middle])
                await self._publish(lane, ready[middle:])
            else:
                for offset, each in enumerate(ready, appended.offset):
                    self._acknowledged(each, offset)
            return
        [each] = ready
        record = each.record
        try:
            appended = await self._publisher.publish(REQUESTS, record.id, record, lane)
        except RecordTooLarge as e:
            assert not isinstance(record, Cancel), "it has two short texts"
            refusal = Refused(
                id=record.id, code="too_large", message=str(e), result=record.result,
                queued_ms=record.queued_ms, account=record.account,
            )  # fmt: skip
            appended = await self._publisher.publish(REQUESTS, record.id, refusal, lane)
            self._acknowledged(_PreparedRecord(refusal, each.prompt), appended.offset)
        else:
            self._acknowledged(each, appended.offset)

    def _acknowledged(self, admitted: _PreparedRecord, offset: int) -> None:
        self._on_published(admitted.record)
        if admitted.debit is not None:
            admitted.debit.offset = offset
        admitted.prompt.acknowledge()

    # --- membership ------------------------------------------------------------------------------

    def assigned(self, starts: Mapping[int, int]) -> None:
        """Own partitions of the topic, which need no preparation."""
        self._close_claims(starts)
        for partition, start in starts.items():
            self._claims[partition] = PartitionClaim(partition, start, self._commits.moved)
            if not self._is_paused:
                self._opened.resume(partition)
        self._shares()

    def revoked(self, partitions: frozenset[int]) -> None:
        """Drop partitions that another member owns now, with their uncommitted offsets."""
        self._close_claims(partitions)
        for partition in partitions:
            self.backlog.revoked(partition)
        self._shares()

    def _close_claims(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            if (claim := self._claims.pop(partition, None)) is not None:
                claim.is_lost = True

    @property
    def _opened(self) -> Member:
        assert self._member is not None, "the source is started"
        return self._member

    def _shares(self) -> None:
        self._credit.prompts_share = len(self._claims) / self._partitions
        self._credit.credit_changed.notify_all()

    async def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a batch without losing the membership of the group."""
        handling = self._handling = asyncio.ensure_future(work)
        try:
            if (await asyncio.wait({handling}, timeout=PAUSE_AFTER_S))[0]:
                self._handled_at_once()
            else:
                self._pause()
                while not handling.done():
                    unread = await self._opened.poll(PAUSED_POLL_S)
                    assert not unread, "a partition was read while it was paused"
                self._resume()
            await handling
        finally:
            handling.cancel()
            await asyncio.gather(handling, return_exceptions=True)

    def _pause(self) -> None:
        was_paused, self._is_paused = self.is_paused, True
        for partition in self._claims:
            self._opened.pause(partition)
        if not was_paused:
            self._paused_at = self._ctx.clock.now()
            log.info(
                "records of %s wait in the log: %d that were read cannot be published now, routers "
                "have room for %.0f more",
                self.topic,
                self._unpublished,
                self._credit.available_requests(),
            )

    def _resume(self) -> None:
        self._is_paused, self._resumed_at = False, self._ctx.clock.now()
        for partition in self._claims:
            self._opened.resume(partition)

    def _handled_at_once(self) -> None:
        if self._paused_at is not None:
            waited_s = self._resumed_at - self._paused_at
            log.info("%s is read as it grows again, after %.0f s", self.topic, waited_s)
            self._paused_at = None


async def _acknowledged_by(append: Coroutine[Any, Any, object], prompt: _OpenPrompt) -> None:
    await append
    prompt.acknowledge()


def _tokens(answers: Sequence[_PreparedRecord]) -> int:
    records = (answer.record for answer in answers)
    return sum(record.prompt_tokens for record in records if isinstance(record, Request))


def _job(request: Request) -> str:
    """The job that a batch request belongs to: its batch, else its tenant."""
    result = request.result
    return (result.batch_id if result is not None else "") or request.tenant
