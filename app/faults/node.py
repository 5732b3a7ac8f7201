"""One life of a process in a simulated world: the real class, on a connection of its own."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Literal

from app.engine.contract import Engine
from app.engine.echo import EchoEngine
from app.engine.validator import ValidatedEngine
from app.faults.engines import engine_of
from app.faults.uneven import UnevenEngine
from app.faults.vtime import VirtualClock, process_context
from app.gateway import Gateway
from app.indexer import Indexer
from app.lifetime import Lifetime, live
from app.preprocess.pool import Inline
from app.preprocessor import Preprocessor
from app.router import Router
from app.worker import Worker

if TYPE_CHECKING:
    from app.faults.world import World

Kind = Literal["router", "worker", "preprocessor", "gateway", "indexer"]
State = Literal["starting", "up", "paused", "stopping", "killed", "ended"]

STEP_S = 0.2
SKEW_MS = 5000
"""How far a process's wall clock is off, at most."""
DRIFT = 0.002
"""How much faster or slower its clock goes, at most: far more than any real one."""


class Node:
    """`label` is unique, `name` is what the process calls itself."""

    def __init__(self, world: World, kind: Kind, name: str, label: str) -> None:
        self._rng = rng = random.Random(f"{world.seed} {label}")
        self._world = world
        self.kind = kind
        self.name = name
        self.label = label
        self.state: State = "starting"
        self.was_connected = False
        """Whether a broker has ever answered it."""
        self.clock = VirtualClock(
            world.loop, rng.randint(-SKEW_MS, SKEW_MS), 1 + rng.uniform(-DRIFT, DRIFT)
        )
        self.log = world.broker.connect(label)
        self.life = Lifetime(label, self.clock, rng)
        self.engine: UnevenEngine | None = None
        self.process = self._build()
        self.context = process_context(label)
        self.exchanges: set[asyncio.Task[None]] = set()
        """What a gateway answers at the moment."""
        self.gone = asyncio.Event()
        """Set when it answers nobody any more."""
        self._asked = asyncio.Event()
        self.task = world.loop.create_task(self._live(), name=f"{label}/main", context=self.context)

    @property
    def living(self) -> bool:
        """Whether it runs, or would if it were not paused."""
        return self.state in ("starting", "up", "paused", "stopping")

    def terminate(self) -> None:
        """SIGTERM."""
        self._asked.set()

    def _build(self) -> Router | Worker | Preprocessor | Gateway | Indexer:
        world, settings = self._world, self._world.settings
        if self.kind == "router":
            return Router(self.log, settings, self.life, self.name)
        if self.kind == "preprocessor":
            return Preprocessor(self.log, settings, self.life, Inline())
        if self.kind == "gateway":
            return Gateway(self.log, settings, self.life, self._rng, Inline())
        if self.kind == "indexer":
            return Indexer(self.log, settings, self.life, Inline())
        self.engine = UnevenEngine(self._engine(), self.clock, self._rng, world.calm)
        engine = ValidatedEngine(self.engine)
        return Worker(self.log, settings, self.life, engine, worker_id=self.name)

    def _engine(self) -> Engine:
        model, sequences = self._world.model_of(self.name), self._world.shape.sequences
        if self._world.shape.caches:
            return engine_of(self.clock, model, sequences)
        return EchoEngine(self.clock, STEP_S, model=model, max_num_seqs=sequences)

    async def _live(self) -> None:
        try:
            await self.log.start()
            self.was_connected = True
            await live(self.life, self._start, self._end, self._asked)
        except Exception as e:  # noqa: BLE001 - it is judged by the invariants
            self.life.fail(e)
        finally:
            for task in self.exchanges:
                task.cancel()
            await self.log.close()
            self.state = "ended"
            self.gone.set()

    async def _start(self) -> None:
        if isinstance(self.process, Gateway | Indexer):
            await self.process.open()  # without a socket
        else:
            await self.process.start()
        self.state = "up"

    async def _end(self) -> None:
        self.state = "stopping"
        await self.process.stop()
