"""The indexer process: follows the caches of all workers, and answers who holds what over HTTP.

    kv-events ─► Index ┬─► snapshots, with a pointer in the registry
    registry ──► Fleet ┴─► /query, /query_by_hash, /workers, /dump

kvlane's own routers fold kv-events themselves; they need no indexer to route, but its snapshots let
them start sooner. Its answers are for routers of others, and for people who look. This file wires;
the surface stands in `app/http/lookup.py`, who writes which snapshot in `streams/duty.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from app.http.index_metrics import IndexMetrics
from app.http.lookup import Lookup
from app.http.server import Server
from app.lifetime import Lifetime, serve
from app.preprocess.pool import Pool, Threads
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.settings import Settings
from indexer.warm import compile_all
from streams.clock import BrokerClock
from streams.duty import SnapshotDuty
from streams.follow import Follower
from streams.ports import Log
from streams.snapshots import Snapshots
from streams.topics import KV_EVENTS, REGISTRY

if TYPE_CHECKING:
    from faststream import FastStream


GROUP = "indexer"


class Indexer:
    """One indexer; any number of them answer alike, and share the writing of snapshots."""

    def __init__(
        self, log: Log, settings: Settings, life: Lifetime, pool: Pool | None = None
    ) -> None:
        """`pool`: for reading the state of a snapshot."""
        clock = life.clock
        index, fleet = Index(settings.key_secret()), Fleet()
        self._settings = settings
        self._life = life
        self._index = index
        self._threads = Threads(threads=1)
        broker_clock, snapshots = BrokerClock(clock), Snapshots(log, clock)
        follower = Follower(
            log, index, [KV_EVENTS], clock, broker_clock=broker_clock, snapshots=snapshots
        )
        self._followers = {
            index.name: follower,
            fleet.name: Follower(log, fleet, [REGISTRY], clock),
        }
        self._duty = SnapshotDuty(
            log, KV_EVENTS, GROUP, index, follower, snapshots, clock, broker_clock,
            offload=(pool or self._threads).run, every_s=settings.snapshot_every_s,
        )  # fmt: skip
        self._metrics = IndexMetrics(index, self._followers, self._duty)
        lookup = Lookup(
            index, fleet, self._followers, self._metrics, clock, settings.http_body_bytes,
            is_alive=lambda: life.failed is None,
        )  # fmt: skip
        self.http: FastAPI = lookup.build()
        self._server: Server | None = None

    @property
    def url(self) -> str:
        """Where it listens. Only after `start`."""
        assert self._server is not None
        return self._server.url

    async def start(self) -> None:
        """Listen at once, so that `/readyz` can tell how far it is; return when all is read."""
        compile_all()
        settings = self._settings
        self._server = Server(self.http, settings.http_host, settings.indexer_port, self._life)
        await self._server.start()
        await self.open()

    async def open(self) -> None:
        """All of the start but the socket: `http` can be called."""
        for name, follower in self._followers.items():
            self._life.spawn(name, follower.run())
        self._life.spawn("loop delay", self._metrics.loop_delay.watch(self._life.clock))
        for follower in self._followers.values():
            await follower.wait_caught_up()
        self._life.spawn("ownership", self._duty.belong())
        self._life.spawn("snapshots", self._duty.work())

    async def stop(self) -> None:
        """Leave the snapshots to others, answer what is under way, and nothing more."""
        await self._duty.close()
        if self._server is not None:
            await self._server.stop()
        self._threads.close()


def __getattr__(name: str) -> FastStream:
    if name == "app":
        return serve("indexer", Indexer)
    raise AttributeError(name)
