"""A simulated process: one run of the real process class, on its own broker connection."""

from __future__ import annotations

import asyncio
import random
from typing import Literal, Protocol

from kvlane.app.collector import Collector
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import Engine
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.transfers import KvTransfers
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.gateway import Gateway
from kvlane.app.indexer import Indexer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext, run_process
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from workbench.testing.simulation_engines import FlakyEngine, cached_engine
from workbench.testing.virtual_time import VirtualClock, VirtualLoop, process_context
from workbench.testing.world_parameters import ProcessKind, WorldParameters

NodeState = Literal["starting", "up", "paused", "stopping", "killed", "ended"]

ECHO_STEP_S = 0.2
MAX_CLOCK_OFFSET_MS = 5000
"""Largest offset of a process's wall clock."""
UNSET_CLOCK_SHARE, MAX_UNSET_CLOCK_OFFSET_MS = 0.2, 3_600_000
"""Share of processes whose wall clock was never set, and the largest offset of such a clock."""
MAX_CLOCK_DRIFT = 0.002
"""Largest drift of a process's clock, far more than that of any real one."""


class ProcessEnvironment(Protocol):
    """The parts of a world that one process needs."""

    @property
    def seed(self) -> int:
        """Seed of all random draws."""

    @property
    def loop(self) -> VirtualLoop:
        """The loop that all processes share."""

    @property
    def broker(self) -> MemoryBroker:
        """The broker that all processes connect to."""

    @property
    def settings(self) -> Settings:
        """Settings of all processes."""

    @property
    def parameters(self) -> WorldParameters:
        """Size and faults of the world."""

    @property
    def faults_stopped(self) -> asyncio.Event:
        """Set when faults have stopped."""

    @property
    def transfers(self) -> KvTransfers:
        """The transfers between all engines."""

    def model_of(self, worker: str) -> str:
        """The model that a worker of this name serves."""


class SimulatedProcess:
    """One process. `label` is unique in the world; `name` is its worker or router id."""

    def __init__(self, world: ProcessEnvironment, kind: ProcessKind, name: str, label: str) -> None:
        self._rng = rng = random.Random(f"{world.seed} {label}")
        self._world = world
        self.kind = kind
        self.name = name
        self.label = label
        self.state: NodeState = "starting"
        self.running_since_s = world.loop.time()
        """When it began to run, or to run on after a pause."""
        self.was_connected = False
        """Whether it has ever connected to a broker."""
        self.was_up = False
        """Whether its start has ever ended."""
        ahead_ms = rng.randint(-MAX_CLOCK_OFFSET_MS, MAX_CLOCK_OFFSET_MS) + _wrong_by_ms(
            f"{world.seed} {label} clock"
        )
        self.clock = VirtualClock(
            world.loop, ahead_ms, 1 + rng.uniform(-MAX_CLOCK_DRIFT, MAX_CLOCK_DRIFT)
        )
        self.log = MemoryLog(world.broker, label)
        self.ctx = ProcessContext(label, self.clock, rng)
        self.engine: FlakyEngine | None = None
        self._cached: SimulatedEngine | None = None
        self.process = self._build()
        self.context = process_context(label)
        self.exchanges: set[asyncio.Task[None]] = set()
        """HTTP exchanges that a gateway is serving."""
        self.is_gone = asyncio.Event()
        """Set when it no longer serves any connection."""
        self._stop_requested = asyncio.Event()
        self.task = world.loop.create_task(self._live(), name=f"{label}/main", context=self.context)

    @property
    def exists(self) -> bool:
        """Whether the process exists: running, paused or stopping."""
        return self.state in ("starting", "up", "paused", "stopping")

    def kill(self) -> None:
        """SIGKILL: its connections are gone, and so are the blocks that its engine held for
        others."""
        self.log.kill()
        self.state = "killed"
        if self._cached is not None:
            self._world.transfers.remove_engine(self._cached.transfer_name)
        self.is_gone.set()

    def terminate(self) -> None:
        self._stop_requested.set()

    def _build(self) -> Router | Worker | Preprocessor | Gateway | Indexer | Collector:
        world, settings = self._world, self._world.settings
        if self.kind == "router":
            return Router(self.log, settings, self.ctx, self.name)
        if self.kind == "preprocessor":
            return Preprocessor(self.log, settings, self.ctx, InlinePool())
        if self.kind == "gateway":
            return Gateway(self.log, settings, self.ctx, self._rng, InlinePool())
        if self.kind == "collector":
            return Collector(self.log, settings, self.ctx, InlinePool())
        if self.kind == "indexer":
            return Indexer(self.log, settings, self.ctx, InlinePool())
        self.engine = FlakyEngine(self._engine(), self.clock, self._rng, world.faults_stopped)
        engine = ValidatingEngine(self.engine)
        role = world.parameters.role_of(self.name)
        settings = settings.model_copy(update={"worker_role": role})
        return Worker(self.log, settings, self.ctx, engine, worker_id=self.name)

    def _engine(self) -> Engine:
        model, sequences = self._world.model_of(self.name), self._world.parameters.sequences
        if self._world.parameters.has_caches:
            self._cached = cached_engine(self.clock, model, sequences, self._world.transfers)
            return self._cached
        return EchoEngine(self.clock, ECHO_STEP_S, model=model, max_num_seqs=sequences)

    async def _live(self) -> None:
        try:
            await self.log.start()
            self.was_connected = True
            await run_process(self.ctx, self._start, self._end, self._stop_requested)
        except Exception as e:  # noqa: BLE001 - checked by the invariants
            self.ctx.fail(e)
        finally:
            for task in self.exchanges:
                task.cancel()
            await self.log.close()
            self.state = "ended"
            self.is_gone.set()

    async def _start(self) -> None:
        if isinstance(self.process, Gateway | Indexer):
            await self.process.open()  # without a socket
        else:
            await self.process.start()
        self.state = "up"
        self.was_up = True

    async def _end(self) -> None:
        self.state = "stopping"
        await self.process.stop()


def _wrong_by_ms(seed: str) -> int:
    rng = random.Random(seed)
    return (
        rng.randint(-MAX_UNSET_CLOCK_OFFSET_MS, MAX_UNSET_CLOCK_OFFSET_MS)
        if rng.random() < UNSET_CLOCK_SHARE
        else 0
    )
