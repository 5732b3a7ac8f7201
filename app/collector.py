"""Collector process: writes the usage of each finished request, and a result if it gets one.

requests ──group──► GroupConsumer ──► LaneCollector ──► results ──► ReplySender: their copies
responses ────────► LaneReader ─────────┘
ledger ───────────► UsageReader ──► UsageWriter ──► usage: one record for each request
registry ─────────► ModelNames   artifacts ──► ModelLoader: text of tokens, for logprobs
batch-jobs, results, file-parts ◄──► JobRunner ──► batch: the jobs of the Batch API
"""

from __future__ import annotations

import asyncio
import logging

from kvlane.app.batches.job_runner import JobRunner
from kvlane.app.http.server.probes import Checks, ObservedProcess, Probes, StatusServer
from kvlane.app.metrics.collector_metrics import CollectorMetrics
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.byte_model import Model, byte_model_of
from kvlane.app.preprocess.models.model import ModelLoader
from kvlane.app.preprocess.models.model_names import ModelNames
from kvlane.app.preprocess.prompt_errors import BadModel, InvalidPrompt
from kvlane.app.preprocess.thread_pool import ThreadPool, WorkPool
from kvlane.app.results.collector_context import CollectorContext
from kvlane.app.results.lane_collector import LaneCollector, LaneReader
from kvlane.app.results.reply_sender import ReplySender
from kvlane.app.results.usage_writer import UsageReader, UsageWriter
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.runtime.process import ProcessContext, process_app
from kvlane.app.settings import Settings
from kvlane.streams.clock import BrokerClock
from kvlane.streams.errors import StreamError
from kvlane.streams.ports import Log
from kvlane.streams.reading.dead_letter_format import DeadLetterWriter
from kvlane.streams.reading.group_consumer import GroupConsumer, PartitionClaim
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import LogRecord
from kvlane.streams.topics import REGISTRY, REQUESTS
from kvlane.streams.views.follower import Follower

log = logging.getLogger(__name__)

GROUP = "collector"
CHECK_INTERVAL_S = 5.0
MAX_CHECK_INTERVAL_S = 60.0
CHECK_PAUSE = 10.0
"""Pause after the checks of all lanes, in units of their time: they may read the whole ledger."""


class Collector(ObservedProcess):
    def __init__(
        self, log: Log, settings: Settings, ctx: ProcessContext, pool: WorkPool | None = None
    ) -> None:
        """`pool`: for loading tokenizers."""
        self._ctx = ctx
        self._lanes: dict[int, LaneCollector] = {}
        self._usage: dict[int, UsageWriter] = {}
        self._has_joined = False
        self._threads = ThreadPool(threads=1)
        pool = pool or self._threads
        fleet = Fleet()
        self._names = ModelNames(fleet)
        self._registry = Follower(log, fleet, [REGISTRY], ctx.clock)
        artifacts = ArtifactStore(log, ctx.clock, pool, settings.cache_dir / "artifacts")
        self._loader = ModelLoader(artifacts, pool, ctx)
        self._jobs = JobRunner(log, settings, ctx)
        broker_clock = BrokerClock(ctx.clock)
        self._requests = GroupConsumer(
            log, REQUESTS, GROUP, self, ctx.clock, broker_clock, writes_dead_letters=False
        )
        metrics = CollectorMetrics(
            lambda: sum(lane.open_requests for lane in self._lanes.values()),
            lambda: sum(lane.serving for lane in self._lanes.values()),
            lambda: self._jobs.running_jobs,
        )
        append_timeout_s = 3 * settings.request_timeout_ms / 1000
        self._replies = ReplySender(log, ctx, metrics, append_timeout_s)
        self._context = CollectorContext(
            log=log,
            ctx=ctx,
            broker_clock=broker_clock,
            metrics=metrics,
            replies=self._replies,
            remembered_ms=int(settings.dedup_window_s * 1000),
            resume=self._requests.resume,
            find_model=self._find_model,
            dead_letters=DeadLetterWriter(RecordPublisher(log, ctx.clock, broker_clock)),
        )
        self._reader = LaneReader(self._context, self._lanes)
        self._usage_reader = UsageReader(self._context, self._usage)
        probes = Probes(self._checks, metrics.page, lambda: ctx.error is None)
        self._status = StatusServer(settings, ctx, probes, metrics)

    async def start(self) -> None:
        """Join the group; returns when the lanes that it got are taken over."""
        await self._status.start()
        ctx = self._ctx
        ctx.spawn("registry", self._registry.run())
        await self._registry.wait_caught_up()
        ctx.spawn("requests", self._requests.run())
        ctx.spawn("replies", self._reader.run())
        ctx.spawn("usage", self._usage_reader.run())
        ctx.spawn("replies to clients", self._replies.run())
        ctx.spawn("checks", self._check())
        await self._requests.wait_joined()
        while not self._serves_lanes:
            await asyncio.wait({lane.take_over for lane in self._lanes.values()})
        self._has_joined = True
        await self._jobs.start()

    async def stop(self) -> None:
        """Leave the groups with everything committed that is done."""
        await self._jobs.stop()
        await self._requests.close()
        await self._status.stop()
        self._threads.close()

    def on_claimed(self, claim: PartitionClaim) -> None:
        self._lanes[claim.partition] = LaneCollector(self._context, claim)
        self._usage[claim.partition] = UsageWriter(self._context, claim)

    def on_record(self, claim: PartitionClaim, log_record: LogRecord) -> None:
        self._lanes[claim.partition].on_request_record(log_record)

    def on_released(self, claim: PartitionClaim) -> None:
        self._lanes.pop(claim.partition).close()
        self._usage.pop(claim.partition).close()

    @property
    def _serves_lanes(self) -> bool:
        return all(lane.serving for lane in self._lanes.values())

    def _checks(self) -> Checks:
        return {
            "registry_read": self._registry.caught_up,
            "lanes_served": self._has_joined and self._serves_lanes,
            "lanes": len(self._lanes),
            "batch_jobs_read": self._jobs.caught_up,
            "log_answers": self._ctx.broker_answers,
        }

    async def _check(self) -> None:
        clock = self._ctx.clock
        pause_s = CHECK_INTERVAL_S
        while True:
            await clock.sleep(pause_s)
            began_at = clock.now()
            for lane in list(self._lanes.values()):
                if lane.serving and not lane.claim.is_lost:
                    await lane.check()
            pause_s = max(CHECK_INTERVAL_S, CHECK_PAUSE * (clock.now() - began_at))
            pause_s = min(pause_s, MAX_CHECK_INTERVAL_S)

    async def _find_model(self, name: str) -> Model | None:
        try:
            card = self._names.find("tokens", name)
            return byte_model_of(card) or await self._loader.model(card)
        except (InvalidPrompt, BadModel, TimeoutError, StreamError) as e:
            log.warning("logprobs of model %s are written as token ids: %s", name, e)
            return None


__getattr__ = process_app("collector", Collector)
