"""A topic of prompts as one member of its group reads it: publication by credit, pauses, commits.

    handle ──► convert ──► admit, as credit allows ──► requests ──► commit

`handle` is called by `run`, or by a subscriber of FastStream (`streams/reading/log_broker.py`). All
records of a batch are acknowledged before the batch is committed. While a batch waits for credit,
the member keeps polling with all its partitions paused; otherwise the group would assign them to
another process, which would wait as well. Lag is the backlog.

A preprocessor has one source for each class of work (`app/preprocessor.py`), so neither waits
behind the other: they share models, tokenizers and the connection, and no state.

Never here: the conversion of a prompt, and how much credit there is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from app.prompts.backlog import Backlog
from app.prompts.job_order import BatchItem, JobOrder
from app.prompts.prompt_credit import CreditDebit, PromptCredit
from app.runtime.process import ProcessContext
from streams.asyncapi import PromptPayload
from streams.clock import BrokerClock
from streams.errors import AppendFailed, OwnershipLost, RecordTooLarge
from streams.ports import Log, Member, Record
from streams.record_publisher import RecordPublisher
from streams.records import Cancel, Refused
from streams.request import Request
from streams.topics import GROUPS, REQUESTS, lane_of

log = logging.getLogger(__name__)

POLL_S = 1.0
MAX_BATCH = 200
"""Prompts handled together: the most that is read again after a crash."""
PAUSE_AFTER_S = 0.5
"""Time that a batch may take before partitions are paused."""
RESUMED_AFTER_S = 1.0
"""Time without another pause after which a topic counts as read as it grows."""
PAUSED_POLL_S = 0.25
"""Poll time of paused partitions, which delays the reaction to a completed batch."""
COMMIT_RETRY_S = 1.0
CREDIT_POLL_S = 1.0
"""Period of checks for credit and deadlines without a new report."""

MAX_PREFIX_BYTES = 16_384
"""Beginning of a prompt by which batch requests are ordered: 4096 tokens."""

PreprocessedRecord = Request | Cancel | Refused


class ConvertedPrompts(NamedTuple):
    """Records for `requests`, each with the partition of its prompt.

    `appends`: to other topics; they have to be acknowledged as well.
    """

    records: Sequence[tuple[PreprocessedRecord, int]]
    appends: Sequence[Coroutine[Any, Any, object]]


class _PreparedRecord(NamedTuple):
    """A record to publish for a prompt, and the assignment under which its partition was read."""

    record: PreprocessedRecord
    partition: int
    claim: object | None


_Ready = Sequence[tuple[PreprocessedRecord, CreditDebit | None]]
"""Records that may be published, with their credit."""


class PromptSource:
    """One topic of prompts; its own `RebalanceListener`.

    `convert`: of the records of a poll. `on_published`: called for each acknowledged record.
    `max_lifetime_s`: longest time limit of its requests. `order`: of the requests that are read
    together, over all lanes; without one each lane keeps the order of the log, and none waits for
    the appends of others.
    """

    def __init__(
        self,
        topic: str,
        log: Log,
        ctx: ProcessContext,
        publisher: RecordPublisher,
        credit: PromptCredit,
        convert: Callable[[Sequence[Record]], Awaitable[ConvertedPrompts]],
        *,
        broker_clock: BrokerClock,
        on_published: Callable[[PreprocessedRecord], None],
        max_lifetime_s: float,
        order: JobOrder | None = None,
    ) -> None:
        self.topic = topic
        self.backlog = Backlog(topic, log, ctx.clock)
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
        self._claims: dict[int, object] = {}
        """By owned partition, a token of its current assignment."""
        self._is_paused = False
        self._paused_at: float | None = None
        """Start of the current pause, which may be of several batches."""
        self._resumed_at = 0.0
        self._unpublished = 0
        self._done: dict[int, int] = {}
        """Next offsets of published, uncommitted prompts, by partition."""
        self._committing: asyncio.Task[Any] | None = None
        self._is_stopping = False
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

    async def stop(self) -> None:
        """Commit nothing more, before the member is closed: its next owner reads that again."""
        self._is_stopping = True
        if self._committing is not None:
            self._committing.cancel()
            await asyncio.gather(self._committing, return_exceptions=True)

    async def run(self) -> None:
        """Read the topic without a broker of FastStream, until it is cancelled."""
        member = self.open_member()
        try:
            while True:
                if batches := await member.poll(POLL_S, MAX_BATCH):
                    await self.handle([r for records in batches.values() for r in records])
        finally:
            await member.close()

    def open_member(self) -> Member:
        """The member whose records `handle` gets."""
        self._member = self._log.member(self.topic, self.group, self)
        return self._member

    async def handle(self, records: PromptPayload) -> None:
        """Publish these prompts, and commit them unless their partitions were revoked meanwhile.

        The owner after that may be ahead.
        """
        first: dict[int, Record] = {}
        last: dict[int, Record] = {}
        claims = dict(self._claims)
        for record in records:
            first.setdefault(record.partition, record)
            last[record.partition] = record
        for partition, record in first.items():
            self.backlog.received(partition, record.timestamp)
        await self._wait_for(self.publish_requests(records))
        for partition, record in last.items():
            claim = claims.get(partition)
            if claim is not None and self._claims.get(partition) is claim:
                self._done[partition] = record.offset + 1
                self.backlog.published(partition, record.offset + 1, record.timestamp)
        # In the background: a stuck coordinator must not delay prompts.
        is_free = self._committing is None or self._committing.done()
        if self._done and is_free and not self._is_stopping:
            self._committing = self._ctx.spawn("commit", self._commit())

    # --- publication -----------------------------------------------------------------------------

    async def publish_requests(self, records: Sequence[Record]) -> None:
        """Publish the records of these prompts; returns when all of them are acknowledged.

        A Cancel follows its Request. Prompts of partitions that were revoked meanwhile are left to
        their next owner.
        """
        claims = dict(self._claims)  # the assignments under which the records were polled
        converted = await self._convert(records)
        answers = [_PreparedRecord(*each, claims.get(each[1])) for each in converted.records]
        lanes: dict[int, list[_PreparedRecord]] = {}
        for answer in answers:
            lanes.setdefault(self._lane(answer.record), []).append(answer)
        together = [self._in_order(answers)] if self._order is not None else lanes.values()
        await asyncio.gather(*converted.appends, *map(self._publish_all, together))

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
            while answers := [a for a in answers if self._claims.get(a.partition) is a.claim]:
                ready, answers = self._admit(answers)
                try:
                    await asyncio.gather(
                        *(self._publish(lane, records) for lane, records in ready.items())
                    )
                finally:
                    for records in ready.values():
                        for _, sent in records:
                            if sent is not None and sent.offset is None:
                                self._credit.release(sent)
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
    ) -> tuple[
        dict[int, list[tuple[PreprocessedRecord, CreditDebit | None]]], list[_PreparedRecord]
    ]:
        """Records that may be published now, by lane with their credit, and those that must wait.

        Requests of a lane keep their order. A Cancel waits behind its own request only: the run
        that it ends may be the one that all others wait for.
        """
        ready: dict[int, list[tuple[PreprocessedRecord, CreditDebit | None]]] = {}
        waiting: list[_PreparedRecord] = []
        full_lanes: set[int] = set()
        for answer in answers:
            record, sent = answer.record, None
            lane = self._lane(record)
            of_lane = ready.get(lane) or []
            if isinstance(record, Request):
                if self._is_late(record):
                    late = "its deadline passed while routers had no room for it"
                    refused = Refused(
                        id=record.id, code="deadline", message=late, result=record.result
                    )
                    ready.setdefault(lane, of_lane).append((refused, None))
                    continue
                if lane not in full_lanes:
                    sent = self._credit.acquire(lane, record)
                must_wait = sent is None
            else:
                must_wait = any(other.record.id == record.id for other in waiting)
            if not must_wait:
                ready.setdefault(lane, of_lane).append((record, sent))
                continue
            waiting.append(answer)
            full_lanes.add(lane)
        return ready, waiting

    def _is_late(self, request: Request) -> bool:
        lifetime_s = min(request.deadline_s, self._max_lifetime_s)
        return self._broker_clock.now_ms() > request.queued_ms + lifetime_s * 1000

    async def _publish(self, lane: int, ready: _Ready) -> None:
        """Publish in order, as one batch where it fits: one at a time, a backlog of an outage would
        shrink no faster than new prompts arrive."""
        if len(ready) > 1:
            try:
                pairs = [(record.id, record) for record, _ in ready]
                appended = await self._publisher.publish_batch(REQUESTS, lane, pairs)
            except RecordTooLarge:
                middle = len(ready) // 2
                await self._publish(lane, ready[:middle])
                await self._publish(lane, ready[middle:])
            else:
                for offset, (record, sent) in enumerate(ready, appended.offset):
                    self._acknowledged(record, sent, offset)
            return
        ((record, sent),) = ready
        try:
            appended = await self._publisher.publish(REQUESTS, record.id, record, lane)
        except RecordTooLarge as e:
            result = None if isinstance(record, Cancel) else record.result
            refusal = Refused(id=record.id, code="too_large", message=str(e), result=result)
            appended = await self._publisher.publish(REQUESTS, record.id, refusal, lane)
            self._acknowledged(refusal, None, appended.offset)
        else:
            self._acknowledged(record, sent, appended.offset)

    def _acknowledged(
        self, record: PreprocessedRecord, sent: CreditDebit | None, offset: int
    ) -> None:
        self._on_published(record)
        if sent is not None:
            sent.offset = offset

    # --- membership ------------------------------------------------------------------------------

    def assigned(self, starts: Mapping[int, int]) -> None:
        """Own partitions of the topic, which need no preparation."""
        self.backlog.assigned(starts)
        for partition in starts:
            self._claims[partition] = object()
            if not self._is_paused:
                self._member.resume(partition)
        self._shares()

    def revoked(self, partitions: frozenset[int]) -> None:
        """Drop partitions that another member owns now, with their uncommitted offsets."""
        for partition in partitions:
            self._claims.pop(partition, None)
            self._done.pop(partition, None)
            self.backlog.revoked(partition)
        self._shares()

    def _shares(self) -> None:
        self._credit.prompts_share = len(self._claims) / self._partitions
        self._credit.credit_changed.notify_all()

    async def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a batch without losing the membership of the group."""
        handling = asyncio.ensure_future(work)
        try:
            if (await asyncio.wait({handling}, timeout=PAUSE_AFTER_S))[0]:
                self._handled_at_once()
            else:
                self._pause()
                while not handling.done():
                    unread = await self._member.poll(PAUSED_POLL_S)
                    assert not unread, "a partition was read while it was paused"
                self._resume()
            await handling
        finally:
            handling.cancel()
            await asyncio.gather(handling, return_exceptions=True)

    def _pause(self) -> None:
        was_paused, self._is_paused = self.is_paused, True
        for partition in self._claims:
            self._member.pause(partition)
        if not was_paused:
            self._paused_at = self._ctx.clock.now()
            log.info(
                "records of %s wait in the log: %d that were read cannot be published now, routers "
                "have room for %.0f more",
                self.topic, self._unpublished, self._credit.available_requests(),
            )  # fmt: skip

    def _resume(self) -> None:
        self._is_paused, self._resumed_at = False, self._ctx.clock.now()
        for partition in self._claims:
            self._member.resume(partition)

    def _handled_at_once(self) -> None:
        if self._paused_at is not None:
            waited_s = self._resumed_at - self._paused_at
            log.info("%s is read as it grows again, after %.0f s", self.topic, waited_s)
            self._paused_at = None

    async def _commit(self) -> None:
        """Commit finished prompts; a commit that fails is tried again.

        Not under another claim: the owner in between may have committed more.
        """
        while self._done:
            done, self._done = self._done, {}
            claims = dict(self._claims)
            try:
                await self._member.commit(done)
            except (OwnershipLost, AppendFailed) as e:
                log.info("records of %s may be read again: %s", self.topic, e)
                still = {p: n for p, n in done.items() if self._claims.get(p) is claims.get(p)}
                self._done = still | self._done
                await self._ctx.clock.sleep(COMMIT_RETRY_S)


def _tokens(answers: Sequence[_PreparedRecord]) -> int:
    records = (answer.record for answer in answers)
    return sum(record.prompt_tokens for record in records if isinstance(record, Request))


def _job(request: Request) -> str:
    """The job that a batch request belongs to: its batch, else its tenant."""
    result = request.result
    return (result.batch_id if result is not None else "") or request.tenant
