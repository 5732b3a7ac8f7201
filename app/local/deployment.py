"""A small deployment on this machine: one of each process and some workers.

`ProcessDeployment` runs each as `kvlane run NAME`; `InProcessDeployment` runs them in this process,
on the log in memory. Both can kill a single one. They send no request and read no topic.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvlane.app.local.processes import (
    READY_POLL_S,
    ManagedProcess,
    http_get,
    launch,
    process_command,
)
from kvlane.app.operator_error import OperatorError
from kvlane.app.runtime.process import ProcessContext, ProcessLifecycle
from kvlane.app.settings import Settings
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.clock import Clock
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log

STOP_TIMEOUT_S = 20.0
"""Grace period of a stop, before processes are killed."""
READY_TIMEOUT_S = 180.0
"""Start timeout of a process, with several of them starting on a busy machine."""
NO_URLS: Mapping[str, str] = {}
NO_CHANGES: Mapping[str, Any] = {}
PORT_FIELDS = {"gateway": "http_port", "indexer": "indexer_port"}
"""Port settings by kind of process; all others listen on a status port."""
STATUS_PORT_FIELD = "status_port"
SINGLE_KINDS = ("router", "indexer", "preprocessor", "collector", "gateway")


class DemoFailed(OperatorError):
    """A process does not work; the message has the reason."""


class DeploymentPart(NamedTuple):
    """One process: its name, the kind of process it runs, and its own settings by field."""

    name: str
    kind: str
    settings: Mapping[str, object] = NO_CHANGES

    @property
    def role(self) -> object:
        """The role of a worker; None: that of the common settings."""
        return self.settings.get("worker_role")


def deployment_parts(workers: int, prefill_workers: int = 0) -> list[DeploymentPart]:
    """`workers` workers, and one of each other process. With `prefill_workers`, the first workers
    have the role prefill, and the others decode."""
    assert prefill_workers < max(workers, 1), "none is left to decode"
    roles: list[Mapping[str, object]] = [NO_CHANGES] * workers
    if prefill_workers:
        roles = [{"worker_role": "decode"}] * workers
        roles[:prefill_workers] = [{"worker_role": "prefill"}] * prefill_workers
    named = [DeploymentPart(f"worker-{n}", "worker", role) for n, role in enumerate(roles, 1)]
    return [*named, *(DeploymentPart(f"{kind}-1", kind) for kind in SINGLE_KINDS)]


def count_workers(parts: Sequence[DeploymentPart]) -> str:
    """The number of workers in words, and of each role where they have one."""
    roles = [part.role for part in parts if part.kind == "worker"]
    words = f"{len(roles)} worker{'s'[: len(roles) > 1]}"
    if not (prefill := roles.count("prefill")):
        return words
    return f"{words} ({prefill} prefill, {len(roles) - prefill} decode)"


def part_settings(part: DeploymentPart) -> dict[str, object]:
    """The settings of this process alone: its name, and its own."""
    return {"worker_id": part.name, "router_id": part.name, **part.settings}


class LocalDeployment(Protocol):
    """The processes of a deployment, started and stopped together."""

    async def start(self, *names: str) -> None:
        """Start the named processes, or all."""

    async def wait_ready(self, *names: str, timeout_s: float) -> None:
        """Wait until the named processes, or all, are ready. Raises DemoFailed."""

    async def kill(self, *names: str) -> None:
        """End processes as kill -9 does."""

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        """Stop all processes of these kinds gracefully; start new ones with changed settings."""

    def check(self) -> None:
        """Raise DemoFailed or ProcessFailed when a process ended that was not killed."""

    async def stop(self) -> object:
        """Stop everything gracefully, and kill the processes that do not stop in time."""


class ProcessDeployment:
    """A deployment of child processes. They end with the guard, however this process ends."""

    def __init__(
        self,
        parts: Iterable[DeploymentPart],
        settings: Mapping[str, object],
        guard: ProcessGuard,
        clock: Clock,
        *,
        logs: Path | None = None,
        status_urls: Mapping[str, str] = NO_URLS,
        command: Callable[[str], Sequence[str]] = process_command,
    ) -> None:
        """`settings`: of all processes, by field; those of a part win.

        `logs`: the folder of the output files, by default the guard's. `status_urls`: addresses of
        `/readyz` by process name; another process is ready when it has logged it.
        `command`: the module and arguments that run a kind of process.
        """
        self.parts = {part.name: part for part in parts}
        self._settings = settings
        self._guard = guard
        self._clock = clock
        self._logs = logs or guard.directory
        self._status_urls = status_urls
        self._command = command
        self.processes: dict[str, ManagedProcess] = {}
        """Those that were started, and not ended from here."""

    async def start(self, *names: str) -> None:
        """Start the named processes, or all, at once; does not wait until they are ready."""
        self.launch(*names or self.parts)

    async def wait_ready(self, *names: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        until = self._clock.now() + timeout_s
        for name in names or self.parts:
            while not await self._is_ready(name):
                if self._clock.now() > until:
                    tail = self.processes[name].tail
                    raise DemoFailed(f"{name} is not ready after {timeout_s:g} s:\n{tail}")
                await self._clock.sleep(READY_POLL_S)

    async def _is_ready(self, name: str) -> bool:
        if (url := self._status_urls.get(name)) is None:
            return self.processes[name].has_started
        return (await asyncio.to_thread(http_get, f"{url}/readyz")).status == HTTPStatus.OK

    async def kill(self, *names: str) -> None:
        for name in names:
            self.processes.pop(name).kill()

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        names = [part.name for part in self.parts.values() if part.kind in kinds]
        await self.stop(*names)
        self.launch(*names, changes=changes)

    def take_exited(self) -> dict[str, int]:
        """The exit status of each process that ended since the last call; negative: a signal."""
        ended = {n: p.status for n, p in self.processes.items() if p.status is not None}
        for name in ended:
            del self.processes[name]
        return ended

    def check(self) -> None:
        for process in self.processes.values():
            process.check()

    async def stop(self, *names: str, within_s: float = STOP_TIMEOUT_S) -> dict[str, int]:
        """Send SIGTERM to the named processes, or all, and SIGKILL to those that still run after
        `within_s`; returns their exit status."""
        ending = {
            name: self.processes.pop(name)
            for name in names or [*self.processes]
            if name in self.processes
        }
        for process in ending.values():
            process.terminate()
            process.resume()
        deadline = self._clock.now() + within_s
        while any(p.status is None for p in ending.values()) and self._clock.now() < deadline:
            await self._clock.sleep(0.05)
        for process in ending.values():
            process.kill()
        return {name: process.status or 0 for name, process in ending.items()}

    def launch(
        self, *names: str, changes: Mapping[str, Any] = NO_CHANGES, folder: Path | None = None
    ) -> None:
        """Start processes that do not run, with changed settings, in a folder."""
        for name in names:
            assert name not in self.processes, f"{name} is running"
            part = self.parts[name]
            settings = {**self._settings, **part_settings(part), **changes}
            command, output = self._command(part.kind), self.output_file(name)
            child = launch(self._guard, name, command, settings, output, folder)
            self.processes[name] = child

    def output_file(self, name: str) -> Path:
        return self._logs / f"{name}.log"


ProcessFactory = Callable[[Log, Settings, ProcessContext], ProcessLifecycle]


class InProcessDeployment:
    """A deployment inside this process, each part with its own connection to the log in memory."""

    def __init__(
        self,
        parts: Sequence[DeploymentPart],
        builds: Mapping[str, ProcessFactory],
        settings: Settings,
        broker: MemoryBroker,
        rng: random.Random,
    ) -> None:
        """`builds` constructs a process of each kind."""
        self._parts = {part.name: part for part in parts}
        self._builds = builds
        self._settings = settings
        self._broker = broker
        self._rng = rng
        self._running: dict[str, tuple[MemoryLog, ProcessContext, ProcessLifecycle]] = {}

    async def start(self, *names: str) -> None:
        """Start the processes one after the other; returns when all are ready."""
        for name in names or self._parts:
            await self._launch(self._parts[name], NO_CHANGES)

    async def wait_ready(self, *names: str, timeout_s: float) -> None:
        """Nothing to wait for: a process that was started is ready."""

    async def kill(self, *names: str) -> None:
        """Cut their connections at once, and cancel their tasks."""
        for name in names:
            log, ctx, _ = self._running.pop(name)
            log.kill()
            await ctx.cancel_tasks()

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        parts = [part for part in self._parts.values() if part.kind in kinds]
        ending = [self._running.pop(part.name) for part in parts if part.name in self._running]
        await asyncio.gather(*(_ended(*running) for running in ending))
        for part in parts:
            await self._launch(part, changes)

    def check(self) -> None:
        for name, (_, ctx, _) in self._running.items():
            if ctx.error is not None:
                raise DemoFailed(f"{name} failed: {ctx.error!r}")

    async def stop(self) -> None:
        """Stop the processes in reverse order; workers drain last."""
        while self._running:
            _, running = self._running.popitem()
            await _ended(*running)

    async def _launch(self, part: DeploymentPart, changes: Mapping[str, Any]) -> None:
        name = part.name
        log = MemoryLog(self._broker, name)
        ctx = ProcessContext(name, self._broker.clock, random.Random(self._rng.random()))
        settings = self._settings.model_copy(update={**part_settings(part), **changes})
        process = self._builds[part.kind](log, settings, ctx)
        self._running[name] = log, ctx, process
        await log.start()
        await process.start()


async def _ended(log: MemoryLog, ctx: ProcessContext, process: ProcessLifecycle) -> None:
    try:
        if ctx.error is None:
            await process.stop()
    finally:
        await ctx.cancel_tasks()
        await log.close()


async def run_scenario(
    parts: LocalDeployment, scenario: Coroutine[Any, Any, bool], clock: Clock
) -> bool:
    """Run a scenario while its processes run. Raises DemoFailed when a process ends."""
    playing = asyncio.create_task(scenario)
    watching = asyncio.create_task(_watch(parts, clock))
    try:
        await asyncio.wait([playing, watching], return_when=asyncio.FIRST_COMPLETED)
        return await (watching if watching.done() else playing)
    finally:
        playing.cancel()
        watching.cancel()
        await asyncio.gather(playing, watching, return_exceptions=True)


async def _watch(parts: LocalDeployment, clock: Clock) -> bool:
    while True:
        parts.check()
        await clock.sleep(0.5)
