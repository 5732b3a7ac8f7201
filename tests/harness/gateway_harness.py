"""A gateway harness on the log in memory, with a router and workers on demand."""

from __future__ import annotations

import random
from typing import Any

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import Engine
from kvlane.app.gateway import Gateway
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import decode
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.records import Cancel, End, EngineConfig, WorkerCard
from kvlane.streams.request import Request
from kvlane.streams.topics import REGISTRY, REQUESTS, RESPONSES, lane_of
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld

CONTEXT = 512
STEP_S = 0.02
NO_CACHE_DIR = "/dev/null/cache"
"""An unusable cache folder, so that files are loaded from the log."""


def memory_settings(**over: Any) -> Settings:
    fields = {
        "worker_id": "-",
        "router_id": "-",
        "cache_dir": NO_CACHE_DIR,
        "status_port": None,
    } | over
    return Settings(**fields)


class GatewayHarness:
    """A gateway in a world; a router and workers are started on demand."""

    def __init__(self, world: MemoryWorld, gateway: Gateway, ctx: ProcessContext) -> None:
        self.world = world
        self.gateway = gateway
        self.ctx = ctx
        self.workers: dict[str, tuple[MemoryLog, ProcessContext]] = {}

    @staticmethod
    async def open(
        world: MemoryWorld, name: str = "g1", clock: Clock | None = None, **over: Any
    ) -> GatewayHarness:
        ctx = ProcessContext(name, clock or world.clock, random.Random(name))
        rng = random.Random(f"ids of {name}")
        gateway = Gateway(
            await world.connect(name), memory_settings(**over), ctx, rng, InlinePool()
        )
        await gateway.open()
        return GatewayHarness(world, gateway, ctx)

    @staticmethod
    async def with_backend(world: MemoryWorld, **over: Any) -> GatewayHarness:
        """A gateway with these settings, a router and a worker."""
        harness = await GatewayHarness.open(world, **over)
        await harness.start_backend()
        return harness

    @staticmethod
    async def with_card(world: MemoryWorld, **over: Any) -> GatewayHarness:
        """A gateway with these settings that knows a worker's card; nothing serves requests."""
        harness = await GatewayHarness.open(world, **over)
        await harness.register_and_wait()
        return harness

    async def start_backend(self, model: str = "demo", **over: Any) -> Worker:
        """Start a router and a worker; returns when the gateway knows the worker."""
        await self.start_router(**over)
        return await self.start_worker("w1", model, **over)

    async def start_router(self, name: str = "r1", **over: Any) -> Router:
        ctx = ProcessContext(name, self.world.clock, random.Random(name))
        router = Router(await self.world.connect(name), memory_settings(**over), ctx)
        await router.start()
        return router

    async def start_worker(
        self, name: str, model: str = "demo", engine: Engine | None = None, **over: Any
    ) -> Worker:
        """Start a worker; returns when the gateway knows it."""
        world = self.world
        ctx = ProcessContext(name, world.clock, random.Random(name))
        if engine is None:
            engine = EchoEngine(world.clock, STEP_S, model=model, context_length=CONTEXT)
        log = await world.connect(name)
        worker = Worker(log, memory_settings(**over), ctx, engine, worker_id=name)
        await worker.start()
        self.workers[name] = log, ctx
        await world.wait_until(lambda: model in self.models())
        return worker

    async def kill(self, name: str) -> None:
        """Kill a worker, as kill -9 does."""
        log, ctx = self.workers.pop(name)
        log.kill()
        await ctx.cancel_tasks()

    def register_worker(self, model: str = "demo", name: str = "w1", **over: Any) -> int:
        """Register a worker that does nothing; returns its epoch."""
        config = EngineConfig(model=model, context_length=CONTEXT)
        fields: dict[str, Any] = {"id": name, "slot": 0, "model": model, "config": config} | over
        key = f"worker/{name}"
        epoch = self.world.append(REGISTRY, 0, WorkerCard(**fields), key=key)
        self.world.append(REGISTRY, 0, WorkerCard(**fields, epoch=epoch), key=key)
        return epoch

    async def register_and_wait(self, model: str = "demo", **over: Any) -> None:
        """Register a worker, and wait until the gateway knows it."""
        self.register_worker(model, **over)
        await self.world.wait_until(lambda: model in self.models())

    def models(self) -> list[str]:
        return [m.name for m in self.gateway.parts.served_models.models()]

    def send(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> HttpExchange:
        return HttpExchange(self.gateway.http, method, url, body, headers)

    def chat(
        self, text: str = "hello", headers: dict[str, str] | None = None, **over: Any
    ) -> HttpExchange:
        body = {"model": "demo", "messages": [{"role": "user", "content": text}]} | over
        return self.send("POST", "/v1/chat/completions", body, headers)

    def complete(self, prompt: Any = "hello", **over: Any) -> HttpExchange:
        return self.send("POST", "/v1/completions", {"model": "demo", "prompt": prompt} | over)

    async def published(self, count: int = 1) -> list[Request]:
        """The requests on the log, once there are `count`."""
        await self.world.wait_until(lambda: len(self.requests()) >= count)
        return self.requests()

    async def cancelled(self, count: int = 1) -> list[str]:
        """The cancelled ids, once there are `count`."""
        await self.world.wait_until(lambda: len(self.cancels()) >= count)
        return [cancel.id for cancel in self.cancels()]

    def end_request(self, request_id: str, code: str, **over: Any) -> None:
        lane = lane_of(request_id, self.world.lanes)
        self.world.append(RESPONSES, lane, End(id=request_id, code=code, **over), key=request_id)

    def requests(self) -> list[Request]:
        return [r for r in map(decode, self.world.all_records(REQUESTS)) if isinstance(r, Request)]

    def cancels(self) -> list[Cancel]:
        return [r for r in map(decode, self.world.all_records(REQUESTS)) if isinstance(r, Cancel)]
