"""The gateway process: HTTP in OpenAI's form on one side, the log on the other.

    HTTP ──► asked ──► Request, Cancel → requests
    responses ──► Replies ──► Telling ──► HTTP
    registry ──► Served: which models there are

This file wires; the surface stands in `app/http`. It holds no state that matters: a client whose
connection breaks goes on at any other gateway.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI

from app.http import api
from app.http.health import Health
from app.http.library import Library
from app.http.metrics import Metrics
from app.http.parts import Parts
from app.http.served import Served
from app.http.server import Server
from app.http.streams import Streams
from app.lifetime import Lifetime, serve
from app.preprocess.artifacts import Artifacts
from app.preprocess.loader import Loader
from app.preprocess.pool import Pool, Threads
from app.routing.fleet import Fleet
from app.settings import Settings
from streams.follow import Follower
from streams.ports import Log, Partition
from streams.records import Fact
from streams.topics import REGISTRY

if TYPE_CHECKING:
    from faststream import FastStream

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""What clients get, after the grace, to be told that their streams go on elsewhere."""


class Gateway:
    """One gateway; any number of them stand behind one address."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        life: Lifetime,
        rng: random.Random | None = None,
        pool: Pool | None = None,
    ) -> None:
        """Without `rng`, ids are drawn so that they cannot be guessed. `pool`: for tokenising."""
        self._life = life
        self._settings = settings
        fleet = Fleet()
        self._served = served = Served(fleet)
        self._registry = Follower(log, fleet, [REGISTRY], life.clock, on_applied=self._applied)
        # As many prompts may wait as answers be under way: their bodies are bounded already.
        self._threads = Threads(waiting=settings.http_streams)
        pool = pool or self._threads
        artifacts = Artifacts(log, life.clock, pool, settings.cache_dir / "artifacts")
        self._library = Library(served, Loader(artifacts, pool, life))
        self._streams = Streams(log, settings, life, rng)
        self._health = Health(log, self._streams, self._registry, life)
        self._metrics = Metrics()
        self._metrics.under_way.set_function(lambda: self._streams.open)
        self._metrics.log_silent.set_function(lambda: self._health.log_silent_s)
        self._metrics.caught_up.labels(fleet.name).set_function(lambda: self._registry.caught_up)
        self.parts = Parts(
            settings, life, self._streams, served, self._library, self._health, self._metrics
        )
        self.http: FastAPI = api.build(self.parts)
        self._server: Server | None = None

    @property
    def url(self) -> str:
        """Where it listens. Only after `start`."""
        assert self._server is not None
        return self._server.url

    async def start(self) -> None:
        """Return when requests can be answered."""
        await self.open()
        settings = self._settings
        self._server = Server(self.http, settings.http_host, settings.http_port, self._life)
        await self._server.start()

    async def open(self) -> None:
        """All of the start but the socket: `http` can be called."""
        await self._streams.start()
        self._life.spawn("registry", self._registry.run())
        await self._registry.wait_caught_up()
        self._library.refresh()
        self._life.spawn("probe", self._health.probe())
        self._life.spawn("loop delay", self._metrics.loop_delay.watch(self._life.clock))

    def _applied(self, source: Partition, facts: Sequence[Fact]) -> None:
        """Records of the registry were folded."""
        self._served.applied(source, facts)
        if self._registry.caught_up:  # before, most of what is read is over already
            self._library.refresh()

    async def stop(self) -> None:
        """Take nothing new; let answers end within the grace, the others go on elsewhere."""
        self._streams.stopping = True
        if not await self._streams.idle(self._settings.drain_grace_s):
            log.warning("%d answers go on without this gateway", self._streams.open)
        await self._streams.close()
        await self._streams.idle(FAREWELL_S)
        if self._server is not None:
            await self._server.stop()
        self._threads.close()


def __getattr__(name: str) -> FastStream:
    if name == "app":
        return serve("gateway", Gateway)
    raise AttributeError(name)
