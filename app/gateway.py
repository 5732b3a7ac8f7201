"""Gateway process: serves the OpenAI API over HTTP on top of the log.

    HTTP ──► read_request ──► Request, Cancel → requests
    responses ──► ReplyReader ──► CompletionResponse ──► HTTP
    registry ──► ServedModels: models with workers
    usage ──► TenantUsage: what tenants have used of their budgets
    HTTP ◄──► file-parts: content of files   batch-jobs ──► BatchView: their cards

It holds no durable state: a broken client resumes at any gateway.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from fastapi import FastAPI

from kvlane.app.batches.batch_log import BatchLog
from kvlane.app.batches.file_store import FileStore
from kvlane.app.http import gateway_api
from kvlane.app.http.console.console_endpoint import ConsoleEndpoint
from kvlane.app.http.openai.active_streams import ActiveStreams
from kvlane.app.http.openai.gateway_deps import GatewayDeps
from kvlane.app.http.openai.served_models import ModelCatalog, ServedModels
from kvlane.app.http.server.authentication import AccessControl
from kvlane.app.http.server.http_server import (
    ConnectionLimits,
    TlsFiles,
    UvicornServer,
    fitting_streams,
    raise_file_limit,
)
from kvlane.app.http.server.probes import Checks, Probes
from kvlane.app.metrics.gateway_metrics import GatewayMetrics
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import ModelLoader
from kvlane.app.preprocess.thread_pool import ThreadPool, WorkPool
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.runtime.process import ProcessContext, process_app
from kvlane.app.settings import Settings
from kvlane.streams.clock import BrokerClock
from kvlane.streams.ids import RequestIds
from kvlane.streams.ports import Log, Partition
from kvlane.streams.records import LogRecord
from kvlane.streams.topics import REGISTRY
from kvlane.streams.views.follower import Follower

log = logging.getLogger(__name__)

READER_STALL_S = 120.0
"""Time without a returned poll after which the reader is stuck: a poll takes half a second."""
REDIRECT_TIMEOUT_S = 2.0
"""Time after the grace period to send clients the URLs at which their streams resume."""


class Gateway:
    def __init__(
        self,
        log: Log,
        settings: Settings,
        ctx: ProcessContext,
        rng: random.Random | None = None,
        pool: WorkPool | None = None,
    ) -> None:
        """Without `rng`, ids are drawn so that they cannot be guessed. `pool`: for tokenising."""
        self._log = log
        self._ctx = ctx
        self._settings = settings = fitting_streams(settings)
        self._access = AccessControl(settings, ctx)
        fleet = Fleet()
        self._served = served = ServedModels(fleet, needs_prefill=settings.enforce_disaggregation)
        registry_clock = BrokerClock(ctx.clock)
        self._registry = Follower(
            log, fleet, [REGISTRY], ctx.clock, broker_clock=registry_clock, on_applied=self._applied
        )
        # As many prompts may be queued as streams may be open: their bodies are bounded already.
        self._threads = ThreadPool(waiting=settings.http_max_streams)
        pool = pool or self._threads
        artifacts = ArtifactStore(log, ctx.clock, pool, settings.cache_dir / "artifacts")
        self._library = ModelCatalog(served, ModelLoader(artifacts, pool, ctx))
        self._streams = ActiveStreams(log, settings, ctx, registry_clock, rng)
        self._access.share_limits(log, registry_clock)
        self._metrics = GatewayMetrics()
        self._access.count_refusals(self._metrics.refused_requests)
        self._metrics.responses_in_flight.set_function(lambda: self._streams.open_streams)
        self._metrics.log_silent.set_function(self._broker_silence_s)
        self._metrics.caught_up.labels(fleet.name).set_function(lambda: self._registry.caught_up)
        self._batches = BatchLog(log, ctx.clock, results_retention_s=settings.results_retention_s)
        probes = Probes(self._checks, self._metrics.page, self._is_alive)
        self.parts = GatewayDeps(
            settings, ctx, self._streams, served, self._library, probes, self._metrics,
            self._access, self._batches, FileStore(log, ctx.clock),
            RequestIds(ctx.clock, rng or random.SystemRandom()), log,
        )  # fmt: skip
        console = ConsoleEndpoint(self.parts, pool) if settings.console else None
        self.http: FastAPI = gateway_api.build_app(self.parts, console)
        self._server: UvicornServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    async def start(self) -> None:
        await self.open()
        settings = self._settings
        self._server = UvicornServer(
            self.http, settings.http_host, settings.http_port, self._ctx,
            tls=TlsFiles.of(settings), metrics=self._metrics,
            limits=ConnectionLimits.of(raise_file_limit(), settings.http_max_streams),
            keep_alive_s=settings.http_keep_alive_s,
        )  # fmt: skip
        await self._server.start()

    async def open(self) -> None:
        """Start everything but the socket; `http` can be called directly."""
        self._access.start()
        self._ctx.start_broker_probe(self._log, self._settings.request_timeout_ms / 1000)
        await self._streams.start()
        await self._access.read_usage()
        self._ctx.spawn("registry", self._registry.run())
        self._ctx.spawn("batch jobs", self._batches.follower.run())
        await self._registry.wait_caught_up()
        await self._batches.follower.wait_caught_up()
        self._library.refresh()
        self._ctx.spawn("loop delay", self._metrics.loop_delay.watch(self._ctx.clock))

    def _is_alive(self) -> bool:
        """Whether its background tasks run. If not, the process must be restarted."""
        return self._ctx.error is None and self._streams.stalled_s < READER_STALL_S

    def _broker_silence_s(self) -> float:
        probe = self._ctx.broker_probe
        return 0.0 if probe is None else probe.silence_s

    def _checks(self) -> Checks:
        return {
            "alive": self._is_alive(),
            "registry_read": self._registry.caught_up,
            "log_answers": self._ctx.broker_answers,
            "taking_requests": not self._streams.is_stopping,
            "answers_under_way": self._streams.open_streams,
        }

    def _applied(self, source: Partition, log_records: Sequence[LogRecord]) -> None:
        self._served.on_records(source, log_records)
        if self._registry.caught_up:  # earlier records are mostly outdated
            self._library.refresh()

    async def stop(self) -> None:
        """Refuse new requests and drain; streams open after the grace period resume elsewhere."""
        self._streams.is_stopping = True
        if not await self._streams.wait_idle(self._settings.drain_grace_s):
            log.warning("%d answers continue without this gateway", self._streams.open_streams)
        await self._streams.close()
        await self._streams.wait_idle(REDIRECT_TIMEOUT_S)
        if self._access.sharing is not None:
            await self._access.sharing.close()
        if self._server is not None:
            await self._server.stop()
        self._threads.close()


__getattr__ = process_app("gateway", Gateway)
