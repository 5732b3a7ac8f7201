"""Preprocessor process: converts prompts that clients publish to requests for routers.

    prompts ──► PromptSource ──prompt_steps, to_request──► requests: Request, Cancel, Refused
    batch   ──► PromptSource ───────┘   └────────► dead-letters: records that are no JSON object,
                                                   or have no id
    registry ──► ModelNames   artifacts ──► ModelLoader: tokenizers and templates
    capacity ──► PromptCredit, one for each class of work: free capacity of routers

Delivery is at least once; request ids make duplicates harmless. Without a model, without capacity
in routers, or while appends fail, the sources do not read. A prompt is never refused for load; its
deadline counts from its append.

A prompt in `prompts` that names class batch is moved to `batch`, so that no other prompt waits
behind it. Batch work differs only in its topic, group, credit and order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from faststream.kafka.prometheus import KafkaPrometheusMiddleware
from msgspec.structs import replace
from opentelemetry.trace import SpanKind

from kvlane.app.http.server.probes import Checks, ObservedProcess, Probes, StatusServer
from kvlane.app.metrics.preprocessor_metrics import PreprocessorMetrics
from kvlane.app.preprocess.kafka_prompts import (
    PromptRecord,
    ResultRules,
    UnreadablePrompt,
    prompt_steps,
    to_request,
)
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.byte_model import Model, byte_model_of
from kvlane.app.preprocess.models.model import LOAD_RETRY_S, ModelLoader
from kvlane.app.preprocess.models.model_aliases import choice_key
from kvlane.app.preprocess.models.model_names import ModelNames
from kvlane.app.preprocess.request_reader import (
    check_supported,
    unsupported_features,
    with_supported_features,
)
from kvlane.app.preprocess.thread_pool import ThreadPool, WorkPool, run_cooperatively
from kvlane.app.prompts.job_order import JobOrder
from kvlane.app.prompts.prompt_credit import BATCH_ROOM, PromptCredit
from kvlane.app.prompts.prompt_source import (
    MAX_BATCH,
    ConvertedPrompt,
    PreprocessedRecord,
    PromptSource,
)
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.runtime import spans
from kvlane.app.runtime.process import ProcessContext, process_app
from kvlane.app.settings import Settings
from kvlane.streams.asyncapi import describe_answers
from kvlane.streams.clock import BrokerClock
from kvlane.streams.errors import StreamError
from kvlane.streams.ports import Entry, Log, Partition, Record
from kvlane.streams.prompt import appended_ms, with_append_time
from kvlane.streams.reading.dead_letter_format import DeadLetterWriter
from kvlane.streams.reading.log_broker import LogBroker
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Cancel, LogRecord, Refused, WorkerCard
from kvlane.streams.request import Request
from kvlane.streams.topics import BATCH, CAPACITY, PROMPT_READABLE_MS, PROMPTS, REGISTRY
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.tail_reader import TailReader

log = logging.getLogger(__name__)

THREADS = 2
INITIAL_REPORTS = 1000
"""Reports that are read at startup: the last seconds of a few hundred routers."""


class Preprocessor(ObservedProcess):
    """One preprocessor; any number of them share the prompts."""

    def __init__(
        self, log: Log, settings: Settings, ctx: ProcessContext, pool: WorkPool | None = None
    ) -> None:
        self._log = log
        self._settings = settings
        self._ctx = ctx
        self._broker_clock = BrokerClock(ctx.clock)
        self.broker = LogBroker(
            log, settings.topic_prefix, settings.kafka_connection("preprocessor").servers
        )
        self._publisher = RecordPublisher(log, ctx.clock, self._broker_clock)
        self._batch_publisher = RecordPublisher(self.broker, ctx.clock, self._broker_clock)
        self._dead_letters = DeadLetterWriter(self._publisher, keep_prompts=settings.keep_prompts)
        self._fleet = fleet = Fleet()
        self._models = ModelNames(fleet, needs_prefill=settings.enforce_disaggregation)
        self._tail = TailReader(log, ctx.clock)
        self._registry = Follower(
            log, fleet, [REGISTRY], ctx.clock, on_applied=self._applied, tail=self._tail
        )
        self._threads = ThreadPool(THREADS, MAX_BATCH)
        pool = pool or self._threads
        artifacts = ArtifactStore(log, ctx.clock, pool, settings.cache_dir / "artifacts")
        self._loader = ModelLoader(artifacts, pool, ctx)
        self._has_models = asyncio.Event()
        self._credit = PromptCredit(ctx.clock)
        self._batch_credit = PromptCredit(ctx.clock, BATCH_ROOM)
        self._result_rules = ResultRules(
            settings.results, settings.reply_prefixes, settings.topic_prefix
        )
        self._metrics = PreprocessorMetrics(
            lambda: len(self._models.cards()),
            lambda: self.is_paused,
            lambda: self.credit,
            lambda: (self.prompts.backlog, self._batch.backlog),
        )
        self.prompts = self._source(PROMPTS, self._publisher, self._credit, settings.max_lifetime_s)
        self._batch = self._source(
            BATCH, self._batch_publisher, self._batch_credit, settings.batch_max_lifetime_s
        )
        self._declare_topics()
        self._running: asyncio.Task[None] | None = None
        probes = Probes(self._checks, self._metrics.page, lambda: ctx.error is None)
        self._status = StatusServer(settings, ctx, probes, self._metrics)

    def _checks(self) -> Checks:
        return {
            "registry_read": self._registry.caught_up,
            "log_answers": self._ctx.broker_answers,
            "models": len(self._models.cards()),
        }

    async def start(self) -> None:
        await self._status.start()
        capacity = [self._reports(credit) for credit in (self._credit, self._batch_credit)]
        self._ctx.spawn("tail", self._tail.run())
        for reports in capacity:
            self._ctx.spawn("capacity", reports.run())
        self._ctx.spawn("registry", self._registry.run())
        await self._registry.wait_caught_up()
        for reports in capacity:
            await reports.wait_caught_up()
        self._look_for_models()
        for source in (self.prompts, self._batch):
            await source.start()
        self._running = self._ctx.spawn("prompts", self._run_broker())

    def _declare_topics(self) -> None:
        self.broker.add_middleware(
            KafkaPrometheusMiddleware(registry=self._metrics.registry, app_name="preprocessor")
        )
        descriptions = {PROMPTS: "Interactive prompts.", BATCH: "Batch prompts; they give way."}
        for source in (self.prompts, self._batch):
            self.broker.subscribe(
                source.topic, source.group, source.handle, source.open_member,
                max_records=MAX_BATCH, description=descriptions[source.topic],
            )  # fmt: skip
        describe_answers(self.broker, self._settings.topic_prefix)

    async def _run_broker(self) -> None:
        await self._has_models.wait()
        if spans.provider is not None:
            from faststream.kafka.opentelemetry import KafkaTelemetryMiddleware

            self.broker.add_middleware(KafkaTelemetryMiddleware(tracer_provider=spans.provider))
        await self.broker.run()

    def _reports(self, credit: PromptCredit) -> Follower:
        return Follower(
            self._log, credit, [CAPACITY], self._ctx.clock,
            broker_clock=self._broker_clock, start=self._latest_reports, tail=self._tail,
        )  # fmt: skip

    async def stop(self) -> None:
        """Stop reading; another preprocessor reads the prompts that are not published."""
        await asyncio.gather(self.prompts.stop(), self._batch.stop())
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._status.stop()
        self._threads.close()

    @property
    def is_paused(self) -> bool:
        return self.prompts.is_paused

    @property
    def credit(self) -> float:
        """Number of requests that routers accept, of this preprocessor's share."""
        return self._credit.available_requests()

    def _source(
        self, topic: str, publisher: RecordPublisher, credit: PromptCredit, max_lifetime_s: float
    ) -> PromptSource:
        return PromptSource(
            topic, self._log, self._ctx, publisher, credit, partial(self._convert, topic),
            broker_clock=self._broker_clock, on_published=self._metrics.count_outcome,
            max_lifetime_s=max_lifetime_s, order=JobOrder() if topic == BATCH else None,
        )  # fmt: skip

    async def _convert(self, topic: str, records: Sequence[Record]) -> list[ConvertedPrompt]:
        service_class: ServiceClass = "batch" if topic == BATCH else "interactive"
        parsed = [(r, await self._parsed(r)) for r in records if not self._is_deleted(r)]
        return await asyncio.gather(
            *(self._converted(topic, *each, service_class) for each in parsed)
        )

    def _is_deleted(self, record: Record) -> bool:
        """A prompt counts as deleted by its age: its id may be forgotten."""
        self._broker_clock.observe(record.timestamp)
        if self._broker_clock.now_ms() - appended_ms(record) < PROMPT_READABLE_MS:
            return False
        self._metrics.count_deleted()
        return True

    async def _converted(
        self,
        topic: str,
        record: Record,
        parsed: PromptRecord | Cancel | Refused | UnreadablePrompt,
        service_class: ServiceClass,
    ) -> ConvertedPrompt:
        if isinstance(parsed, UnreadablePrompt):
            self._metrics.count_outcome(None)
            letter = self._dead_letters.write(topic, record, parsed.reason)
            return ConvertedPrompt(record, parsed.refusal, letter)
        if topic == PROMPTS and _is_batch(parsed):
            return ConvertedPrompt(record, append=self._move_to_batch(record))
        return ConvertedPrompt(record, await self._answer(parsed, record, service_class))

    async def _move_to_batch(self, record: Record) -> None:
        assert record.value is not None, "it was parsed"
        # Its append there would make it another prompt, if it was moved before and has ended.
        headers = with_append_time(tuple(record.headers), appended_ms(record))
        await self._batch_publisher.publish_entry(BATCH, Entry(record.key, record.value, headers))
        self._metrics.count_moved()

    async def _parsed(self, record: Record) -> PromptRecord | Cancel | Refused | UnreadablePrompt:
        received_ms = appended_ms(record)
        self._metrics.observe_read((self._ctx.clock.wall_ms() - received_ms) / 1000)
        return await run_cooperatively(
            prompt_steps(
                record.key,
                record.value,
                received_ms,
                self._models.is_passthrough,
                record.headers,
                self._result_rules,
            )
        )

    async def _answer(
        self, parsed: PromptRecord | Cancel | Refused, record: Record, service_class: ServiceClass
    ) -> PreprocessedRecord:
        if isinstance(parsed, Refused) and parsed.account is not None:
            return replace(parsed, account=replace(parsed.account, service_class=service_class))
        if not isinstance(parsed, PromptRecord):
            return parsed

        async def find(name: str) -> Model:
            return await self._find(parsed, name)

        limit_s = self._settings.deadline_s
        if service_class == "batch":
            limit_s = self._settings.batch_max_lifetime_s
        received = spans.valid_traceparent(
            next((value for name, value in record.headers if name == spans.TRACEPARENT), None)
        )
        span = spans.start_first_span("preprocessor.prompt", received, SpanKind.CONSUMER)
        try:
            traceparent = spans.traceparent_of(span, received)
            answer = await to_request(parsed, find, limit_s, service_class, traceparent)
            if isinstance(answer, Request):
                unsupported = unsupported_features(self._fleet, answer.model)
                [answer] = with_supported_features([answer], unsupported)
        finally:
            span.set_attribute("request_id", parsed.prompt.id)
            span.end()
        return answer

    async def _find(self, parsed: PromptRecord, name: str) -> Model:
        """An outage is waited out. Raises InvalidPrompt, BadModel."""
        prompt = parsed.prompt
        key = choice_key(parsed.request, prompt.tenant, prompt.id)
        card = self._models.find(prompt.kind, self._models.aliases.model(name, key))
        check_supported(parsed.request, unsupported_features(self._fleet, card.name))
        if (model := byte_model_of(card)) is not None:
            return model
        while True:
            try:
                return await self._loader.model(card)
            except StreamError as e:
                log.warning("the files of %s cannot be read now: %s", card.name, e)
                await self._ctx.clock.sleep(LOAD_RETRY_S)

    async def _latest_reports(self, source: Partition) -> int:
        end = (await self._log.end_offsets(source.topic, [source.partition]))[source.partition]
        return max(0, end - INITIAL_REPORTS)

    def _applied(self, _: Partition, log_records: Sequence[LogRecord]) -> None:
        for log_record in log_records:
            if isinstance(log_record.record, WorkerCard):
                self._models.on_worker_card(log_record.record)
        if self._registry.caught_up:  # earlier records are mostly outdated
            self._look_for_models()

    def _look_for_models(self) -> None:
        self._loader.sync(self._models.with_files())
        if self._models.has_any:
            self._has_models.set()


def _is_batch(parsed: PromptRecord | Cancel | Refused) -> bool:
    return isinstance(parsed, PromptRecord) and parsed.prompt.service_class == "batch"


__getattr__ = process_app("preprocessor", Preprocessor, subscribes=True)
