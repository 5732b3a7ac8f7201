"""A gateway, a router and workers on the log in memory, and what was decided in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from app.engine.batch import Shape
from app.engine.contract import Engine
from app.engine.echo import EchoEngine
from app.engine.simulated import SimulatedEngine
from app.router import Router
from app.worker import Worker
from streams.codecs import decode, pack_tokens
from streams.records import Assigned, Assignment, Ended, EngineConfig, Hints, Request
from streams.topics import ASSIGNMENTS, LEDGER, REQUESTS
from tests.exchange import Exchange
from tests.gateways import CONTEXT, STEP_S, House
from tests.routers import write
from tests.worlds import World

BLOCK = 16
PROMPT = list(range(97, 97 + 26)) * 4
TOKENS = len(PROMPT) + 1
"""With the one that begins the answer: six whole blocks and nine tokens."""


class Ranked(EchoEngine):
    """An echo with several ranks."""

    async def start(self, worker_id: str) -> EngineConfig:
        return replace(await super().start(worker_id), data_parallel_size=3)


def ranked(world: World) -> Engine:
    return Ranked(world.clock, STEP_S, model="demo", context_length=CONTEXT)


def caching(world: World, **shape: Any) -> Engine:
    """An engine with a prefix cache, which it tells of."""
    shape = {"block_size": BLOCK, "blocks": 256} | shape
    return SimulatedEngine(
        world.clock, Shape(**shape), model="demo", context_length=CONTEXT, speedup=1000
    )


class Town(House):
    """A house with the decisions that were made in it."""

    over: dict[str, Any]
    router: Router

    @staticmethod
    async def found(world: World, workers: Sequence[str] = ("w1", "w2"), **over: Any) -> Town:
        """Router and workers, all with these settings. Nobody minds an engine that says nothing."""
        over = {"canary_idle_s": 1e6, "engine_stall_s": 1e6, "engine_dead_s": 1e6} | over
        town = await Town._of(world, over)
        town.router = await town.route(**over)
        for name in workers:
            await town.hire(name, **over)
        return town

    @staticmethod
    async def gate(world: World) -> Town:
        """A gateway alone, which knows of a worker."""
        town = await Town._of(world, {})
        await town.listed()
        return town

    @staticmethod
    async def _of(world: World, over: dict[str, Any]) -> Town:
        house = await House.open(world, **over)
        town = Town(world, house.gateway, house.life)
        town.over = over
        return town

    async def hire(self, name: str, *args: Any, **over: Any) -> Worker:
        """A worker with the settings of the others, and its own."""
        return await super().hire(name, *args, **(self.over | over))

    def say(
        self, headers: dict[str, str] | None = None, body: dict[str, Any] | None = None, **ext: Any
    ) -> Exchange:
        """Complete a text with this in `nvext`."""
        fields = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "nvext": ext} | (body or {})
        return self.ask("POST", "/v1/completions", fields, headers)

    async def placed(self, **ext: Any) -> Assigned:
        """The decision about a request that says this, which is answered."""
        answer = await self.say(**ext).done()
        assert answer.status == 200, answer.content
        return self.decision(answer)

    def decision(self, answer: Exchange) -> Assigned:
        (decision,) = (d for d in self.decisions() if d.id == answer.headers["x-kvlane-id"])
        return decision

    def decisions(self) -> list[Assigned]:
        return [r for r in self._all(LEDGER) if isinstance(r, Assigned)]

    def ended(self) -> dict[str, str]:
        return {r.id: r.code for r in self._all(LEDGER) if isinstance(r, Ended)}

    def assigned(self) -> list[Assignment]:
        return [r for r in self._all(ASSIGNMENTS) if isinstance(r, Assignment)]

    def given(self, decision: Assigned) -> Request:
        """The request as its worker got it."""
        (request,) = (a.request for a in self.assigned() if a.request.id == decision.id)
        return request

    async def occupy(self, worker: str) -> None:
        """A request lies on a worker for a long time."""
        hints = Hints(backend_instance_id=worker)
        tokens = pack_tokens(PROMPT)
        hog = Request(id="hog", model="demo", token_ids=tokens, hints=hints, deadline_s=300)
        write(self.world, REQUESTS, hog)
        await self.world.until(lambda: "hog" in {d.id for d in self.decisions()})

    @property
    def is_idle(self) -> bool:
        """Whether nothing lies on any worker, by what the router has read and decided."""
        told, own = self.router._load.burdens, self.router._context._undelivered
        return not told and not own

    def _all(self, topic: str) -> list[Any]:
        return [decode(r) for r in self.world.everywhere(topic)]


def stopped(world: World) -> Engine:
    """An engine that takes very long."""
    return EchoEngine(world.clock, 1000.0, model="demo", context_length=CONTEXT)


async def two_caches(world: World, **over: Any) -> Town:
    """w1 has the prompt in its cache, w2 has nothing."""
    town = await Town.found(world, (), **over)
    for name in ("w1", "w2"):
        await town.hire(name, engine=caching(world))
    await town.placed(backend_instance_id="w1")
    await world.sleep(2)
    return town


def session(name: str = "s", **over: Any) -> dict[str, Any]:
    return {"session_control": {"session_id": name} | over}
