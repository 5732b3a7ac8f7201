"""A small deployment on this machine: a router, a preprocessor and workers, for demos and trials.

`ProcessParts` runs each part as `faststream run app.NAME:app`, the way a deployment does;
`MemoryParts` runs them in this process, on the log in memory. Both can kill a part in the hard way.
Owns the parts' lives; asks nothing of them and reads no topic.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from app.lifetime import Lifetime, Process
from app.settings import Settings, variable
from streams.brokers.watchdog import Guard
from streams.clock import Clock
from streams.memory.broker import MemoryBroker, MemoryLog
from streams.ports import Log

STOP_S = 20.0
"""What the parts get to stop in good order before they are killed, in seconds."""
TAIL_LINES = 15


class DemoFailed(Exception):
    """A part of the fleet ended by itself; the message has its last lines."""


class Part(NamedTuple):
    """One part: its name in the fleet and the process file it runs."""

    name: str
    kind: str


def parts_of(workers: int) -> list[Part]:
    """A router, a preprocessor and that many workers."""
    names = [Part(f"worker-{n}", "worker") for n in range(1, workers + 1)]
    return [*names, Part("router-1", "router"), Part("preprocessor-1", "preprocessor")]


class Parts(Protocol):
    """What a demo does with a fleet."""

    async def start(self) -> None:
        """Start all parts."""

    async def kill(self, name: str) -> None:
        """End a part as kill -9 does."""

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
        for process in self._running.values():
            if process.poll() is None:
                process.terminate()
        deadline = self._clock.now() + STOP_S
        while any(p.poll() is None for p in self._running.values()):
            if self._clock.now() > deadline:
                break
            await self._clock.sleep(0.05)
        for process in self._running.values():
            process.kill()
            process.wait()
        self._running.clear()

    def _launch(self, part: Part) -> subprocess.Popen[bytes]:
        names = {variable("worker_id"): part.name, variable("router_id"): part.name}
        with self._output(part.name).open("wb") as output:
            return subprocess.Popen(  # noqa: S603 - our own interpreter
                [
                    *(sys.executable, "-X", self._guard.mark),  # -X: Python ignores what it does
                    *("-m", "faststream", "run"),  # not know, and the watchdog finds it there
                    f"app.{part.kind}:app",
                ],
                env={**os.environ, **self._environment, **names},
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
        for name, kind in self._parts:
            log = self._broker.connect(name)
            life = Lifetime(name, self._broker.clock, random.Random(self._rng.random()))
            settings = self._settings.model_copy(update={"worker_id": name, "router_id": name})
            process = self._builds[kind](log, settings, life)
            self._running[name] = log, life, process
            await log.start()
            await process.start()

    async def kill(self, name: str) -> None:
        """Cut its connection in the middle of whatever it does, and end its tasks."""
        log, life, _ = self._running.pop(name)
        log.cut()
        await life.end()

    def check(self) -> None:
        """See `Parts`."""
        for name, (_, life, _) in self._running.items():
            if life.failed is not None:
                raise DemoFailed(f"{name} failed: {life.failed!r}")

    async def stop(self) -> None:
        """Stop the parts in reverse; workers drain last."""
        while self._running:
            _, (log, life, process) = self._running.popitem()
            try:
                if life.failed is None:
                    await process.stop()
            finally:
                await life.end()
                await log.close()
