"""A cluster harness on the log in memory: gateway, router, workers, and their decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import Engine
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.router import Router
from kvlane.app.worker import Worker
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.records import Assigned, Assignment, Ended, EngineConfig
from kvlane.streams.request import Hints, Request
from kvlane.streams.topics import ASSIGNMENTS, LEDGER, REQUESTS
from tests.harness.fake_worker import append_record
from tests.harness.gateway_harness import CONTEXT, STEP_S, GatewayHarness
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld

BLOCK = 16
PROMPT = list(range(97, 97 + 26)) * 4
TOKENS = len(PROMPT) + 1
"""With the token that begins the answer: six full blocks and nine tokens."""
READ_BACK_S = 0.05
"""Time until routers have read the end of a request whose client has its answer."""


class RankedEchoEngine(EchoEngine):
    async def start(self, worker_id: str) -> EngineConfig:
        return replace(await super().start(worker_id), data_parallel_size=3)


def ranked_engine(world: MemoryWorld) -> Engine:
    return RankedEchoEngine(world.clock, STEP_S, model="demo", context_length=CONTEXT)


def caching_engine(world: MemoryWorld, **shape: Any) -> Engine:
    """An engine with a prefix cache and cache events."""
    shape = {"block_size": BLOCK, "cache_blocks": 256} | shape
    return SimulatedEngine(
        world.clock, EngineLimits(**shape), model="demo", context_length=CONTEXT, speedup=1000
    )


class ClusterHarness(GatewayHarness):
    """A gateway harness with router, workers and the routing decisions."""

    over: dict[str, Any]
    router: Router

    @staticmethod
    async def start(
        world: MemoryWorld, workers: Sequence[str] = ("w1", "w2"), **over: Any
    ) -> ClusterHarness:
        """Start a router and workers with these settings; silent engines stay healthy."""
        over = {
            "health_probe_idle_s": 1e6,
            "engine_stall_timeout_s": 1e6,
            "engine_dead_timeout_s": 1e6,
        } | over
        cluster = await ClusterHarness._of(world, over)
        cluster.router = await cluster.start_router(**over)
        for name in workers:
            await cluster.start_worker(name, **over)
        return cluster

    @staticmethod
    async def gateway_only(world: MemoryWorld) -> ClusterHarness:
        """A gateway alone, with a registered worker."""
        cluster = await ClusterHarness._of(world, {})
        await cluster.register_and_wait()
        return cluster

    @staticmethod
    async def _of(world: MemoryWorld, over: dict[str, Any]) -> ClusterHarness:
        harness = await GatewayHarness.open(world, **over)
        cluster = ClusterHarness(world, harness.gateway, harness.ctx)
        cluster.over = over
        return cluster

    async def start_worker(self, name: str, *args: Any, **over: Any) -> Worker:
        """Start a worker with the common settings and its own."""
        return await super().start_worker(name, *args, **(self.over | over))

    def complete_with(
        self, headers: dict[str, str] | None = None, body: dict[str, Any] | None = None, **ext: Any
    ) -> HttpExchange:
        """Complete a text with these fields in `nvext`."""
        fields = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "nvext": ext} | (body or {})
        return self.send("POST", "/v1/completions", fields, headers)

    async def wait_decision(self, **ext: Any) -> Assigned:
        """The decision of an answered request with these `nvext` fields."""
        answer = await self.complete_with(**ext).wait_done()
        assert answer.status == 200, answer.content
        await self.world.sleep(READ_BACK_S)
        return self.decision(answer)

    def decision(self, answer: HttpExchange) -> Assigned:
        (decision,) = (d for d in self.decisions() if d.id == answer.headers["x-kvlane-id"])
        return decision

    def decisions(self) -> list[Assigned]:
        return [r for r in self._all(LEDGER) if isinstance(r, Assigned)]

    def ended_codes(self) -> dict[str, str]:
        return {r.id: r.code for r in self._all(LEDGER) if isinstance(r, Ended)}

    def assigned(self) -> list[Assignment]:
        return [r for r in self._all(ASSIGNMENTS) if isinstance(r, Assignment)]

    def assigned_request(self, decision: Assigned) -> Request:
        """The request in the assignment of a decision."""
        (request,) = (a.request for a in self.assigned() if a.request.id == decision.id)
        return request

    async def occupy(self, worker: str) -> None:
        """Occupy a worker with a long request."""
        hints = Hints(backend_instance_id=worker)
        tokens = pack_tokens(PROMPT)
        hog = Request(id="hog", model="demo", token_ids=tokens, hints=hints, deadline_s=300)
        append_record(self.world, REQUESTS, hog)
        await self.world.wait_until(lambda: "hog" in {d.id for d in self.decisions()})

    @property
    def is_idle(self) -> bool:
        """Whether no worker has load, in the router's state."""
        got, own = self.router._ledger.active_load, self.router._context.queue.inputs.unconfirmed
        return not got and not own

    def _all(self, topic: str) -> list[Any]:
        return [decode(r) for r in self.world.all_records(topic)]


def slow_engine(world: MemoryWorld) -> Engine:
    return EchoEngine(world.clock, 1000.0, model="demo", context_length=CONTEXT)


async def two_caches(world: MemoryWorld, **over: Any) -> ClusterHarness:
    """w1 has the prompt in its cache, w2 has nothing."""
    cluster = await ClusterHarness.start(world, (), **over)
    for name in ("w1", "w2"):
        await cluster.start_worker(name, engine=caching_engine(world))
    await cluster.wait_decision(backend_instance_id="w1")
    await world.sleep(2)
    return cluster


def session_hint(name: str = "s", **over: Any) -> dict[str, Any]:
    return {"session_control": {"session_id": name} | over}
