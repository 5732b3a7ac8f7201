"""A gateway and what stands behind it, on the log in memory."""

from __future__ import annotations

import random
from typing import Any

from app.engine.contract import Engine
from app.engine.echo import EchoEngine
from app.gateway import Gateway
from app.lifetime import Lifetime
from app.preprocess.pool import Inline
from app.router import Router
from app.settings import Settings
from app.worker import Worker
from streams.codecs import decode
from streams.memory.broker import MemoryLog
from streams.records import Cancel, End, EngineConfig, Request, WorkerCard
from streams.topics import REGISTRY, REQUESTS, RESPONSES, lane_of
from tests.exchange import Exchange
from tests.worlds import World

CONTEXT = 512
STEP_S = 0.02
NOWHERE = "/dev/null/cache"
"""Nothing can be kept there: what is loaded comes from the log."""


def settings_of(**over: Any) -> Settings:
    fields = {"worker_id": "-", "router_id": "-", "cache_dir": NOWHERE} | over
    return Settings(**fields)


class House:
    """A gateway in a world; router and worker move in when they are asked to."""

    def __init__(self, world: World, gateway: Gateway, life: Lifetime) -> None:
        self.world = world
        self.gateway = gateway
        self.life = life
        self.hired: dict[str, tuple[MemoryLog, Lifetime]] = {}

    @staticmethod
    async def open(world: World, name: str = "g1", **over: Any) -> House:
        life = Lifetime(name, world.clock, random.Random(name))
        rng = random.Random(f"ids of {name}")
        gateway = Gateway(await world.connect(name), settings_of(**over), life, rng, Inline())
        await gateway.open()
        return House(world, gateway, life)

    async def staff(self, model: str = "demo", **over: Any) -> Worker:
        """A router and a worker; returns when the worker is known here."""
        await self.route(**over)
        return await self.hire("w1", model, **over)

    async def route(self, name: str = "r1", **over: Any) -> Router:
        """A router that has started."""
        life = Lifetime(name, self.world.clock, random.Random(name))
        router = Router(await self.world.connect(name), settings_of(**over), life)
        await router.start()
        return router

    async def hire(
        self, name: str, model: str = "demo", engine: Engine | None = None, **over: Any
    ) -> Worker:
        """A worker; returns when it is known here."""
        world = self.world
        life = Lifetime(name, world.clock, random.Random(name))
        if engine is None:
            engine = EchoEngine(world.clock, STEP_S, model=model, context_length=CONTEXT)
        log = await world.connect(name)
        worker = Worker(log, settings_of(**over), life, engine, worker_id=name)
        await worker.start()
        self.hired[name] = log, life
        await world.until(lambda: model in self.models())
        return worker

    async def kill(self, name: str) -> None:
        """End a worker in the hard way, as kill -9 does."""
        log, life = self.hired.pop(name)
        log.cut()
        await life.end()

    def card(self, model: str = "demo", name: str = "w1", **over: Any) -> int:
        """A worker that is registered and does nothing; its epoch."""
        config = EngineConfig(model=model, context_length=CONTEXT)
        fields: dict[str, Any] = {"id": name, "slot": 0, "model": model, "config": config} | over
        key = f"worker/{name}"
        epoch = self.world.append(REGISTRY, 0, WorkerCard(**fields), key=key)
        self.world.append(REGISTRY, 0, WorkerCard(**fields, epoch=epoch), key=key)
        return epoch

    async def listed(self, model: str = "demo", **over: Any) -> None:
        """`card`, and the gateway knows of it."""
        self.card(model, **over)
        await self.world.until(lambda: model in self.models())

    def models(self) -> list[str]:
        return [m.name for m in self.gateway.parts.served.models()]

    def ask(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Exchange:
        return Exchange(self.gateway.http, method, url, body, headers)

    def chat(
        self, text: str = "hello", headers: dict[str, str] | None = None, **over: Any
    ) -> Exchange:
        body = {"model": "demo", "messages": [{"role": "user", "content": text}]} | over
        return self.ask("POST", "/v1/chat/completions", body, headers)

    def complete(self, prompt: Any = "hello", **over: Any) -> Exchange:
        return self.ask("POST", "/v1/completions", {"model": "demo", "prompt": prompt} | over)

    async def published(self, count: int = 1) -> list[Request]:
        """The requests on the log, as soon as there are so many."""
        await self.world.until(lambda: len(self.requests()) >= count)
        return self.requests()

    async def cancelled(self, count: int = 1) -> list[str]:
        """The ids that are cancelled, as soon as there are so many."""
        await self.world.until(lambda: len(self.cancels()) >= count)
        return [cancel.id for cancel in self.cancels()]

    def end(self, request_id: str, code: str, **over: Any) -> None:
        """A router ends a request."""
        lane = lane_of(request_id, self.world.lanes)
        self.world.append(RESPONSES, lane, End(id=request_id, code=code, **over), key=request_id)

    def requests(self) -> list[Request]:
        return [r for r in map(decode, self.world.everywhere(REQUESTS)) if isinstance(r, Request)]

    def cancels(self) -> list[Cancel]:
        return [r for r in map(decode, self.world.everywhere(REQUESTS)) if isinstance(r, Cancel)]
