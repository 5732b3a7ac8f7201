"""Preprocessor process: converts prompts that clients publish to requests for routers.

    prompts ──group──► prompt_steps ──► to_request ──► requests: Request, Cancel, Refused
                            └────────► dead-letters: records that are no JSON object, or have no id
    registry ──► ModelNames   artifacts ──► ModelLoader: tokenizers and templates
    capacity ──► PromptCredit: free capacity of routers

Delivery is at least once: all records of a batch are acknowledged before the batch is committed,
and request ids make duplicates harmless. Backpressure is applied here: without a model, without
capacity in routers, or while appends fail, prompts are not read; their lag is the backlog. A prompt
is never refused for load. Its deadline counts from its append, and one that is past it ends with
that reason. A cancel passes waiting prompts of other requests that were read together with it; it
waits behind those that were read before. Nothing is retried because of its content.

While a batch waits, its group member keeps polling with all partitions paused; otherwise the group
would assign them to another preprocessor, which would wait as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from app.http.probes import Checks, Probes, StatusServer
from app.metrics.preprocessor_metrics import PreprocessorMetrics
from app.preprocess.cooperative_steps import run_cooperatively
from app.preprocess.kafka_prompts import (
    PromptRecord,
    UnreadablePrompt,
    prompt_steps,
    to_request,
)
from app.preprocess.models.artifacts import ArtifactStore
from app.preprocess.models.byte_model import ByteModel, Model
from app.preprocess.models.model_loader import LOAD_RETRY_S, ModelLoader
from app.preprocess.models.model_names import ModelNames
from app.preprocess.requests.engine_features import check_supported, unsupported_features
from app.preprocess.thread_pool import ThreadPool, WorkPool
from app.prompt_credit import CreditDebit, PromptCredit
from app.routing.state.fleet import Fleet
from app.runtime.process import ProcessContext, faststream_app
from app.settings import Settings
from streams.clock import BrokerClock
from streams.errors import AppendFailed, OwnershipLost, RecordTooLarge, StreamError
from streams.ports import Log, Partition, Record
from streams.reading.dead_letter_format import DeadLetterWriter
from streams.record_publisher import RecordPublisher
from streams.records import Cancel, LogRecord, Refused, WorkerCard
from streams.request import Request
from streams.topics import CAPACITY, PROMPTS, REGISTRY, REQUESTS, lane_of
from streams.views.follower import Follower
from streams.views.tail_reader import TailReader

if TYPE_CHECKING:
    from faststream import FastStream
    from starlette.applications import Starlette

log = logging.getLogger(__name__)

GROUP = "preprocessor"
POLL_S = 1.0
MAX_BATCH = 200
"""Prompts handled together: the most that is read again after a crash."""
THREADS = 2
PAUSE_AFTER_S = 0.5
"""Time that a batch may take before partitions are paused."""
PAUSED_POLL_S = 0.25
"""Poll time of paused partitions, which delays the reaction to a completed batch."""
CREDIT_POLL_S = 1.0
"""Period of checks for credit and deadlines without a new report."""

INITIAL_REPORTS = 1000
"""Reports that are read at startup: the last seconds of a few hundred routers."""

PreprocessedRecord = Request | Cancel | Refused


class _PreparedRecord(NamedTuple):
    """A record to publish for a prompt, and the assignment under which its partition was read."""

    asked: PreprocessedRecord
    partition: int
    claim: object | None


class Preprocessor:
    """One preprocessor; any number of them share the prompts."""

    def __init__(
        self, log: Log, settings: Settings, life: ProcessContext, pool: WorkPool | None = None
    ) -> None:
        """`pool`: for tokenising; by default threads, with room for a whole batch."""
        self._log = log
        self._settings = settings
        self._life = life
        self._broker_clock = BrokerClock(life.clock)
        self._outbox = RecordPublisher(log, life.clock, self._broker_clock)
        self._credit = PromptCredit(life.clock)
        self._letters = DeadLetterWriter(self._outbox, keep_prompts=settings.keep_prompts)
        self._fleet = fleet = Fleet()
        self._models = ModelNames(fleet)
        self._tail = TailReader(log, life.clock)
        self._registry = Follower(
            log, fleet, [REGISTRY], life.clock, on_applied=self._applied, tail=self._tail
        )
        self._threads = ThreadPool(THREADS, MAX_BATCH)
        pool = pool or self._threads
        artifacts = ArtifactStore(log, life.clock, pool, settings.cache_dir / "artifacts")
        self._loader = ModelLoader(artifacts, pool, life)
        self._has_models = asyncio.Event()
        self._reading: asyncio.Task[Any] | None = None
        self._claims: dict[int, object] = {}
        """By owned partition, a token of its current assignment."""
        self._is_paused = False
        self._paused_at: float | None = None
        """Start of the current pause."""
        self._unpublished = 0
        self._done: dict[int, int] = {}
        """Next offsets of published, uncommitted prompts, by partition."""
        self._metrics = PreprocessorMetrics(
            lambda: len(self._models.cards()), lambda: self.is_paused, lambda: self.credit
        )
        probes = Probes(self._checks, self._metrics.page, lambda: life.error is None)
        self._status = StatusServer(settings, life, probes, self._metrics.loop_delay)

    @property
    def http(self) -> Starlette:
        """The application of its probes."""
        return self._status.http

    @property
    def url(self) -> str:
        """The address of its probes, if they have a port. Only after `start`."""
        return self._status.url

    def _checks(self) -> Checks:
        return {
            "registry_read": self._registry.caught_up,
            "log_answers": self._life.broker_answers,
            "models": len(self._models.cards()),
        }

    async def start(self) -> None:
        """Return when the registry was read, against which prompts are checked."""
        await self._status.start()
        self._lanes = await self._log.partitions(REQUESTS)
        self._partitions = await self._log.partitions(PROMPTS)
        reports = Follower(
            self._log, self._credit, [CAPACITY], self._life.clock,
            broker_clock=self._broker_clock, start=self._latest_reports, tail=self._tail,
        )  # fmt: skip
        self._life.spawn("tail", self._tail.run())
        self._life.spawn("capacity", reports.run())
        self._life.spawn("registry", self._registry.run())
        await self._registry.wait_caught_up()
        await reports.wait_caught_up()
        self._look_for_models()
        self._reading = self._life.spawn("prompts", self._read())

    async def stop(self) -> None:
        """Stop reading; another preprocessor reads uncommitted prompts again."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._status.stop()
        self._threads.close()

    @property
    def is_paused(self) -> bool:
        """Whether prompts wait in the log, for room in routers or for a broker that answers."""
        return self._paused_at is not None

    @property
    def credit(self) -> float:
        """Number of requests that routers accept, of this preprocessor's share."""
        return self._credit.available_requests()

    async def publish_requests(self, records: Iterable[Record]) -> None:
        """Publish the records of these prompts; returns when all of them are acknowledged.

        A Cancel follows its Request. Prompts of partitions that were revoked meanwhile are left to
        their next owner.
        """
        claims = dict(self._claims)  # the assignments under which the records were polled
        letters = []
        answers: list[Coroutine[Any, Any, _PreparedRecord]] = []
        for record, said in [(record, await self._parsed(record)) for record in records]:
            if isinstance(said, UnreadablePrompt):
                self._metrics.count_outcome(None)
                letters.append(self._letters.write(PROMPTS, record, said.reason))
                if said.refusal is not None:
                    answers.append(self._answer(said.refusal, record.partition, claims))
            else:
                answers.append(self._answer(said, record.partition, claims))
        lanes: dict[int, list[_PreparedRecord]] = {}
        for answer in await asyncio.gather(*answers):
            lanes.setdefault(lane_of(answer.asked.id, self._lanes), []).append(answer)
        await asyncio.gather(*letters, *(self._publish_all(lane, a) for lane, a in lanes.items()))

    async def _parsed(self, record: Record) -> PromptRecord | Cancel | Refused | UnreadablePrompt:
        """Parse a record; large ones in several steps of the event loop."""
        self._metrics.observe_read(self._life.clock.wall_ms() / 1000 - record.timestamp / 1000)
        self._broker_clock.observe(record.timestamp)
        return await run_cooperatively(
            prompt_steps(record.key, record.value, record.timestamp, self._models.is_passthrough)
        )

    async def _answer(
        self, said: PromptRecord | Cancel | Refused, partition: int, claims: Mapping[int, object]
    ) -> _PreparedRecord:
        return _PreparedRecord(await self._answered(said), partition, claims.get(partition))

    async def _answered(self, said: PromptRecord | Cancel | Refused) -> PreprocessedRecord:
        if not isinstance(said, PromptRecord):
            return said

        async def find(name: str) -> Model:
            return await self._find(said, name)

        return await to_request(said, find, self._settings.deadline_s)

    async def _find(self, said: PromptRecord, name: str) -> Model:
        """The model of a prompt; an outage is waited out. Raises InvalidPrompt, BadModel."""
        card = self._models.find(said.prompt.kind, name)
        check_supported(said.request, unsupported_features(self._fleet, card.name))
        if card.tokenizer is None:
            return ByteModel(card.name, card.context_length)
        while True:
            try:
                return await self._loader.model(card)
            except StreamError as e:
                log.warning("the files of %s cannot be read now: %s", card.name, e)
                await self._life.clock.sleep(LOAD_RETRY_S)

    async def _publish_all(self, lane: int, answers: Sequence[_PreparedRecord]) -> None:
        """Publish the records of one lane, as far as credit allows at a time."""
        self._unpublished += (left := len(answers))
        try:
            while answers := [a for a in answers if self._claims.get(a.partition) is a.claim]:
                ready, answers = self._admit(lane, answers)
                try:
                    if ready:
                        await self._publish(lane, ready)
                finally:
                    for _, sent in ready:
                        if sent is not None and sent.offset is None:
                            self._credit.release(sent)
                self._unpublished -= left - len(answers)
                left = len(answers)
                if answers and not ready:
                    await self._credit.credit_changed.wait(CREDIT_POLL_S)
        finally:
            self._unpublished -= left

    def _admit(
        self, lane: int, answers: Sequence[_PreparedRecord]
    ) -> tuple[list[tuple[PreprocessedRecord, CreditDebit | None]], list[_PreparedRecord]]:
        """Records that may be published now, with their credit, and those that must wait.

        Requests keep their order. A Cancel waits behind its own request only: the run that it ends
        may be the one that all others wait for.
        """
        ready: list[tuple[PreprocessedRecord, CreditDebit | None]] = []
        waiting: list[_PreparedRecord] = []
        for answer in answers:
            asked, sent = answer.asked, None
            if isinstance(asked, Request):
                if self._is_late(asked):
                    late = "its deadline passed while routers had no room for it"
                    ready.append((Refused(id=asked.id, code="deadline", message=late), None))
                    continue
                if not waiting:
                    sent = self._credit.acquire(lane, asked)
                must_wait = sent is None
            else:
                must_wait = any(other.asked.id == asked.id for other in waiting)
            if must_wait:
                waiting.append(answer)
            else:
                ready.append((asked, sent))
        return ready, waiting

    def _is_late(self, request: Request) -> bool:
        lifetime_s = min(request.deadline_s, self._settings.max_lifetime_s)
        return self._broker_clock.now_ms() > request.queued_ms + lifetime_s * 1000

    async def _publish(
        self, lane: int, ready: Sequence[tuple[PreprocessedRecord, CreditDebit | None]]
    ) -> None:
        """Publish in order, as one batch where it fits: one at a time, a backlog of an outage would
        shrink no faster than new prompts arrive."""
        if len(ready) > 1:
            try:
                pairs = [(record.id, record) for record, _ in ready]
                appended = await self._outbox.publish_batch(REQUESTS, lane, pairs)
            except RecordTooLarge:
                middle = len(ready) // 2
                await self._publish(lane, ready[:middle])
                await self._publish(lane, ready[middle:])
            else:
                for offset, (record, sent) in enumerate(ready, appended.offset):
                    self._on_published(record, sent, offset)
            return
        ((record, sent),) = ready
        try:
            appended = await self._outbox.publish(REQUESTS, record.id, record, lane)
        except RecordTooLarge as e:
            refusal = Refused(id=record.id, code="too_large", message=str(e))
            appended = await self._outbox.publish(REQUESTS, record.id, refusal, lane)
            record, sent = refusal, None
        self._on_published(record, sent, appended.offset)

    def _on_published(
        self, record: PreprocessedRecord, sent: CreditDebit | None, offset: int
    ) -> None:
        self._metrics.count_outcome(record)
        if sent is not None:
            sent.offset = offset

    async def _latest_reports(self, source: Partition) -> int:
        end = (await self._log.end_offsets(source.topic, [source.partition]))[source.partition]
        return max(0, end - INITIAL_REPORTS)

    def _applied(self, _: Partition, facts: Sequence[LogRecord]) -> None:
        """Update models after new records of the registry."""
        for fact in facts:
            if isinstance(fact.record, WorkerCard):
                self._models.on_worker_card(fact.record)
        if self._registry.caught_up:  # earlier records are mostly outdated
            self._look_for_models()

    def _look_for_models(self) -> None:
        self._loader.sync(self._models.with_files())
        if self._models.has_any:
            self._has_models.set()

    def assigned(self, starts: Mapping[int, int]) -> None:
        """Own partitions of `prompts`, which need no preparation."""
        for partition in starts:
            self._claims[partition] = object()
            if not self._is_paused:
                self._member.resume(partition)
        self._shares()

    def revoked(self, partitions: frozenset[int]) -> None:
        """Drop partitions that another preprocessor owns now, with their uncommitted offsets."""
        for partition in partitions:
            self._claims.pop(partition, None)
            self._done.pop(partition, None)
        self._shares()

    def _shares(self) -> None:
        self._credit.prompts_share = len(self._claims) / self._partitions
        self._credit.credit_changed.notify_all()

    async def _read(self) -> None:
        await self._has_models.wait()
        self._member = self._log.member(PROMPTS, GROUP, self)
        committing: asyncio.Task[Any] | None = None
        try:
            while True:
                batches = await self._member.poll(POLL_S, MAX_BATCH)
                claims = {name: self._claims.get(name.partition) for name in batches}
                await self._wait_for(
                    self.publish_requests(r for records in batches.values() for r in records)
                )
                # Skip partitions that were revoked meanwhile: their next owner may be ahead.
                for name, records in batches.items():
                    if (
                        claims[name] is not None
                        and self._claims.get(name.partition) is claims[name]
                    ):
                        self._done[name.partition] = records[-1].offset + 1
                # In the background: a stuck coordinator must not delay prompts.
                if self._done and (committing is None or committing.done()):
                    committing = self._life.spawn("commit", self._commit())
        finally:
            if committing is not None:
                committing.cancel()
                await asyncio.gather(committing, return_exceptions=True)
            await self._member.close()

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
        self._is_paused = True
        for partition in self._claims:
            self._member.pause(partition)
        if self._paused_at is None:
            self._paused_at = self._life.clock.now()
            log.info(
                "prompts wait in the log: %d that were read cannot be published now, routers have "
                "room for %.0f more", self._unpublished, self.credit,
            )  # fmt: skip

    def _resume(self) -> None:
        self._is_paused = False
        for partition in self._claims:
            self._member.resume(partition)

    def _handled_at_once(self) -> None:
        if self._paused_at is not None:
            waited_s = self._life.clock.now() - self._paused_at
            log.info("prompts are read as they come again, after %.0f s", waited_s)
            self._paused_at = None

    async def _commit(self) -> None:
        """Commit what is done; what cannot be committed now is tried again after the next poll."""
        done, self._done = self._done, {}
        try:
            await self._member.commit(done)
        except (OwnershipLost, AppendFailed) as e:
            log.info("prompts may be read again: %s", e)
            self._done = {p: n for p, n in done.items() if p in self._claims} | self._done


def __getattr__(name: str) -> FastStream:
    if name == "app":
        return faststream_app("preprocessor", Preprocessor)
    raise AttributeError(name)
