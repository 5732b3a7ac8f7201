"""The indexer process: follows the caches of all workers, and answers who holds what over HTTP.

    kv-events ─► Index ┐
    registry ──► Fleet ┴─► /query, /query_by_hash, /workers, /dump

kvlane's own routers fold kv-events themselves and need no indexer; it is for routers of others, and
for people who look. This file wires; the surface stands in `app/http/lookup.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from app.http.lookup import Lookup
from app.http.server import Server
from app.lifetime import Lifetime, serve
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.settings import Settings
from streams.follow import Follower
from streams.ports import Log
from streams.topics import KV_EVENTS, REGISTRY

if TYPE_CHECKING:
    from faststream import FastStream


class Indexer:
    """One indexer; any number of them answer alike."""

    def __init__(self, log: Log, settings: Settings, life: Lifetime) -> None:
        secret = settings.key_secret()
        index, fleet = Index(secret.fingerprint), Fleet()
        self._settings = settings
        self._life = life
        self._followers = {
            index.name: Follower(log, index, [KV_EVENTS], life.clock),
            fleet.name: Follower(log, fleet, [REGISTRY], life.clock),
        }
        lookup = Lookup(
            index, fleet, secret, self._followers, settings.http_body_bytes,
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
        settings = self._settings
        self._server = Server(self.http, settings.http_host, settings.indexer_port, self._life)
        await self._server.start()
        await self.open()

    async def open(self) -> None:
        """All of the start but the socket: `http` can be called."""
        for name, follower in self._followers.items():
            self._life.spawn(name, follower.run())
        for follower in self._followers.values():
            await follower.wait_caught_up()

    async def stop(self) -> None:
        """Answer what is under way, and nothing more."""
        if self._server is not None:
            await self._server.stop()


def __getattr__(name: str) -> FastStream:
    if name == "app":
        return serve("indexer", Indexer)
    raise AttributeError(name)
