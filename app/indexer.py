"""The indexer process: maintains the KV cache index of all workers, and answers queries over HTTP.

    kv-events ─► Index ┬─► snapshots, with a pointer in the registry
    registry ──► Fleet ┴─► /query, /query_by_hash, /workers, /dump

Routers need no indexer to route, but its snapshots let them start sooner.
"""

from __future__ import annotations

from fastapi import FastAPI

from kvlane.app.http.indexer_api import IndexerApi
from kvlane.app.http.server.authentication import AccessControl
from kvlane.app.http.server.http_server import (
    ConnectionLimits,
    TlsFiles,
    UvicornServer,
    raise_file_limit,
)
from kvlane.app.http.server.origin_guard import OriginGuard
from kvlane.app.metrics.indexer_metrics import IndexerMetrics
from kvlane.app.preprocess.thread_pool import ThreadPool, WorkPool
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.runtime.process import ProcessContext, process_app
from kvlane.app.settings import Settings
from kvlane.indexer.precompile import compile_all
from kvlane.streams.clock import BrokerClock
from kvlane.streams.ports import Log
from kvlane.streams.topics import KV_EVENTS, REGISTRY
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.snapshot_store import SnapshotStore
from kvlane.streams.views.snapshot_writer import SnapshotWriter
from kvlane.streams.views.tail_reader import TailReader

CONSUMER_GROUP = "indexer"


class Indexer:
    """One of any number of equal indexers, which share the writing of snapshots."""

    def __init__(
        self, log: Log, settings: Settings, ctx: ProcessContext, pool: WorkPool | None = None
    ) -> None:
        """`pool`: threads that serialize snapshots."""
        clock = ctx.clock
        index, fleet = KvIndexView(settings.block_key_secret()), Fleet()
        self._settings = settings
        self._ctx = ctx
        self._index = index
        self._threads = ThreadPool(threads=1)
        broker_clock, snapshots = BrokerClock(clock), SnapshotStore(log, clock)
        self._tail = TailReader(log, clock)
        follower = Follower(
            log, index, [KV_EVENTS], clock, broker_clock=broker_clock, snapshots=snapshots,
            tail=self._tail,
        )  # fmt: skip
        self._followers = {
            index.name: follower,
            fleet.name: Follower(log, fleet, [REGISTRY], clock, tail=self._tail),
        }
        self._duty = SnapshotWriter(
            log, KV_EVENTS, CONSUMER_GROUP, index, follower, snapshots, clock, broker_clock,
            offload=(pool or self._threads).run, interval_s=settings.snapshot_interval_s,
        )  # fmt: skip
        self._metrics = IndexerMetrics(index, self._followers, self._duty)
        self._access = AccessControl(settings, ctx)
        lookup = IndexerApi(
            index, fleet, self._followers, self._metrics, clock, settings.http_max_body_bytes,
            is_alive=lambda: ctx.error is None, log_answers=lambda: ctx.broker_answers,
            access=self._access,
            seal=settings.tenant_tag() if settings.api_keys_file else None,
        )  # fmt: skip
        self.http: FastAPI = lookup.build_app()
        self.http.add_middleware(
            OriginGuard, host=settings.http_host, origins=settings.allowed_origins
        )
        self._server: UvicornServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    async def start(self) -> None:
        """Start the HTTP server, so that `/readyz` reports progress; return when caught up."""
        compile_all()
        settings = self._settings
        self._server = UvicornServer(
            self.http, settings.http_host, settings.indexer_port, self._ctx,
            setting="indexer_port", tls=TlsFiles.of(settings), metrics=self._metrics,
            limits=ConnectionLimits.of(raise_file_limit(), streams=0),
            keep_alive_s=settings.http_keep_alive_s,
        )  # fmt: skip
        await self._server.start()
        await self.open()

    async def open(self) -> None:
        """Everything of `start` but the socket, for callers of `http`."""
        self._access.start()
        self._ctx.spawn("tail", self._tail.run())
        for name, follower in self._followers.items():
            self._ctx.spawn(name, follower.run())
        self._ctx.spawn("loop delay", self._metrics.loop_delay.watch(self._ctx.clock))
        for follower in self._followers.values():
            await follower.wait_caught_up()
        self._ctx.spawn("ownership", self._duty.join_group())
        self._ctx.spawn("snapshots", self._duty.run())

    async def stop(self) -> None:
        """Hand the snapshots over to other indexers, finish the open requests, and stop."""
        await self._duty.close()
        if self._server is not None:
            await self._server.stop()
        self._threads.close()


__getattr__ = process_app("indexer", Indexer)
