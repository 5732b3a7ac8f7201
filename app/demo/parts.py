"""A small deployment on this machine: one of each process and some workers, for demos and trials.

`ProcessParts` runs each part as `faststream run app.NAME:app`, the way a deployment does;
`MemoryParts` runs them in this process, on the log in memory. Both can kill a part in the hard way.
Owns the parts' lives; asks nothing of them and reads no topic.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from app.lifetime import Lifetime, Process
from app.settings import Settings, variable
from streams.brokers.watchdog import Guard
from streams.clock import Clock
from streams.memory.broker import MemoryBroker, MemoryLog
from streams.ports import Log

STOP_S = 20.0
"""What the parts get to stop in good order before they are killed, in seconds."""
TAIL_LINES = 15
NONE: Mapping[str, str] = {}
OTHERS = ("router", "indexer", "preprocessor", "gateway")


class DemoFailed(Exception):
    """A part ended by itself, or does not do its work; the message has its last lines."""


class Part(NamedTuple):
    """One part: its name and the process file it runs."""

    name: str
    kind: str


def parts_of(workers: int) -> list[Part]:
    """That many workers, and one of each other process."""
    names = [Part(f"worker-{n}", "worker") for n in range(1, workers + 1)]
    return [*names, *(Part(f"{kind}-1", kind) for kind in OTHERS)]


class Parts(Protocol):
    """What a demo does with them."""

    async def start(self) -> None:
        """Start all parts."""

    async def kill(self, name: str) -> None:
        """End a part as kill -9 does."""

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        """End all parts of these kinds in good order; start new ones with changed settings."""

    def check(self) -> None:
        """Raise DemoFailed when a part ended that was not killed."""

    async def stop(self) -> None:
        """End everything in good order, what does not end by itself in the hard way."""


class ProcessParts:
    """Parts as processes. They end with the guard, however this process ends."""

    def __init__(
        self, parts: list[Part], environment: Mapping[str, str], guard: Guard, clock: Clock
    ) -> None:
        """`environment` is what the parts get beside their own names."""
        self._parts = parts
        self._environment = environment
        self._guard = guard
        self._clock = clock
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        """Start all parts at once; they are ready when their work shows on the topics."""
        for part in self._parts:
            self._running[part.name] = self._launch(part)

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        """See `Parts`."""
        parts = [part for part in self._parts if part.kind in kinds]
        await self._end({part.name for part in parts})
        changed = {variable(name): str(value) for name, value in changes.items()}
        for part in parts:
            self._running[part.name] = self._launch(part, changed)

    def check(self) -> None:
        """See `Parts`."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise DemoFailed(
                    f"{name} ended with status {process.returncode}:\n{self.tail(name)}"
                )

    def tail(self, name: str) -> str:
        """The last lines that a part wrote."""
        lines = self._output(name).read_text("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    async def stop(self) -> None:
        """SIGTERM to all; SIGKILL to those that are still there after STOP_S."""
        await self._end(set(self._running))

    async def _end(self, names: set[str]) -> None:
        ending = [self._running.pop(name) for name in names if name in self._running]
        for process in ending:
            if process.poll() is None:
                process.terminate()
        deadline = self._clock.now() + STOP_S
        while any(p.poll() is None for p in ending) and self._clock.now() < deadline:
            await self._clock.sleep(0.05)
        for process in ending:
            process.kill()
            process.wait()

    def _launch(self, part: Part, changed: Mapping[str, str] = NONE) -> subprocess.Popen[bytes]:
        names = {variable("worker_id"): part.name, variable("router_id"): part.name}
        with self._output(part.name).open("ab") as output:
            return subprocess.Popen(  # noqa: S603 - our own interpreter
                [
                    *(sys.executable, "-X", self._guard.mark),  # -X: Python ignores what it does
                    *("-m", "faststream", "run"),  # not know, and the watchdog finds it there
                    f"app.{part.kind}:app",
                ],
                env={**os.environ, **self._environment, **changed, **names},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us; the parts end by SIGTERM
            )

    def _output(self, name: str) -> Path:
        return self._guard.directory / f"{name}.log"


Build = Callable[[Log, Settings, Lifetime], Process]


class MemoryParts:
    """Parts in this process, each with its own connection to the log in memory."""

    def __init__(
        self,
        parts: list[Part],
        builds: Mapping[str, Build],
        settings: Settings,
        broker: MemoryBroker,
        rng: random.Random,
    ) -> None:
        """`builds` says how to build a part of each kind."""
        self._parts = parts
        self._builds = builds
        self._settings = settings
        self._broker = broker
        self._rng = rng
        self._running: dict[str, tuple[MemoryLog, Lifetime, Process]] = {}

    async def start(self) -> None:
        """Start the parts one after the other; returns when all are ready."""
        for part in self._parts:
            await self._launch(part, {})

    async def kill(self, name: str) -> None:
        """Cut its connection in the middle of whatever it does, and end its tasks."""
        log, life, _ = self._running.pop(name)
        log.cut()
        await life.end()

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        """See `Parts`."""
        parts = [part for part in self._parts if part.kind in kinds]
        ending = [self._running.pop(part.name) for part in parts if part.name in self._running]
        await asyncio.gather(*(_ended(*running) for running in ending))
        for part in parts:
            await self._launch(part, changes)

    def check(self) -> None:
        """See `Parts`."""
        for name, (_, life, _) in self._running.items():
            if life.failed is not None:
                raise DemoFailed(f"{name} failed: {life.failed!r}")

    async def stop(self) -> None:
        """Stop the parts in reverse; workers drain last."""
        while self._running:
            _, running = self._running.popitem()
            await _ended(*running)

    async def _launch(self, part: Part, changes: Mapping[str, Any]) -> None:
        name = part.name
        log = self._broker.connect(name)
        life = Lifetime(name, self._broker.clock, random.Random(self._rng.random()))
        settings = self._settings.model_copy(
            update={"worker_id": name, "router_id": name, **changes}
        )
        process = self._builds[part.kind](log, settings, life)
        self._running[name] = log, life, process
        await log.start()
        await process.start()


async def _ended(log: MemoryLog, life: Lifetime, process: Process) -> None:
    try:
        if life.failed is None:
            await process.stop()
    finally:
        await life.end()
        await log.close()


async def played(parts: Parts, acts: Coroutine[Any, Any, bool], clock: Clock) -> bool:
    """What the acts come to, played with parts that run. Raises DemoFailed if a part ends."""
    playing = asyncio.create_task(acts)
    watching = asyncio.create_task(_watch(parts, clock))
    try:
        await asyncio.wait([playing, watching], return_when=asyncio.FIRST_COMPLETED)
        return await (watching if watching.done() else playing)
    finally:
        playing.cancel()
        watching.cancel()
        await asyncio.gather(playing, watching, return_exceptions=True)


async def _watch(parts: Parts, clock: Clock) -> bool:
    while True:
        parts.check()
        await clock.sleep(0.5)
