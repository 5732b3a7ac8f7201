"""A small deployment on this machine: one of each process and some workers.

`ProcessDeployment` runs each as `kvlane run NAME`; `InProcessDeployment` runs them in this process,
on the log in memory. Both can kill a single one. They send no request and read no topic.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvlane.app.local.http_probe import READY_POLL_S, http_get
from kvlane.app.local.processes import ManagedProcess, launch, process_command
from kvlane.app.operator_error import OperatorError
from kvlane.app.runtime.process import ProcessContext, ProcessLifecycle
from kvlane.app.settings import Settings, variable_name
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.clock import Clock
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log
from kvlane.streams.records import Role

STOP_TIMEOUT_S = 20.0
"""Grace period of a stop, before processes are killed."""
NO_VARIABLES: Mapping[str, str] = {}
NO_OWN_VARIABLES: Mapping[str, Mapping[str, str]] = {}
SINGLE_KINDS = ("router", "indexer", "preprocessor", "collector", "gateway")


class DemoFailed(OperatorError):
    """A process does not work; the message has the reason."""


class DeploymentPart(NamedTuple):
    """One process: its name, and the kind of process it runs. `role`: of a worker; None: that of
    the settings."""

    name: str
    kind: str
    role: Role | None = None


def deployment_parts(workers: int, prefill_workers: int = 0) -> list[DeploymentPart]:
    """`workers` workers, and one of each other process. With `prefill_workers`, the first workers
    have the role prefill, and the others decode."""
    assert prefill_workers < max(workers, 1), "none is left to decode"
    roles: list[Role | None] = [None] * workers
    if prefill_workers:
        roles = ["decode"] * workers
        roles[:prefill_workers] = ["prefill"] * prefill_workers
    names = [DeploymentPart(f"worker-{n}", "worker", role) for n, role in enumerate(roles, 1)]
    return [*names, *(DeploymentPart(f"{kind}-1", kind) for kind in SINGLE_KINDS)]


def count_workers(parts: Sequence[DeploymentPart]) -> str:
    """The number of workers in words, and of each role where they have one."""
    roles = [part.role for part in parts if part.kind == "worker"]
    words = f"{len(roles)} worker{'s'[: len(roles) > 1]}"
    if not (prefill := roles.count("prefill")):
        return words
    return f"{words} ({prefill} prefill, {len(roles) - prefill} decode)"


def part_settings(part: DeploymentPart) -> dict[str, str]:
    """The settings of this process alone: its name, and the role of a worker."""
    names = {"worker_id": part.name, "router_id": part.name}
    return names if part.role is None else {**names, "worker_role": part.role}


class LocalDeployment(Protocol):
    """The processes of a deployment, started and stopped together."""

    async def start(self) -> None:
        """Start all processes."""

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the processes whose state has an address are ready. Raises DemoFailed."""

    async def kill(self, name: str) -> None:
        """End a process as kill -9 does."""

    async def start_again(self, name: str) -> None:
        """Start a process that was killed."""

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        """Stop all processes of these kinds gracefully; start new ones with changed settings."""

    def check(self) -> None:
        """Raise DemoFailed or ProcessFailed when a process ended that was not killed."""

    async def stop(self) -> None:
        """Stop everything gracefully, and kill the processes that do not stop in time."""


class ProcessDeployment:
    """A deployment of child processes. They end with the guard, however this process ends."""

    def __init__(
        self,
        parts: Sequence[DeploymentPart],
        environment: Mapping[str, str],
        guard: ProcessGuard,
        clock: Clock,
        *,
        own: Mapping[str, Mapping[str, str]] = NO_OWN_VARIABLES,
        logs: Path | None = None,
        status_urls: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        """`environment`: variables of all processes; `own`: of single ones, by name.

        `logs`: the folder of the output files, by default the guard's. `status_urls`: addresses of
        `/readyz`, by process name.
        """
        self._parts = parts
        self._environment = environment
        self._guard = guard
        self._clock = clock
        self._own = own
        self._logs = logs or guard.directory
        self._status_urls = status_urls
        self._running: dict[str, ManagedProcess] = {}

    async def start(self) -> None:
        """Start all processes at once; does not wait until they are ready."""
        for part in self._parts:
            self._running[part.name] = self._launch(part)

    async def wait_ready(self, timeout_s: float) -> None:
        until = self._clock.now() + timeout_s
        for name, url in self._status_urls.items():
            while (await asyncio.to_thread(http_get, f"{url}/readyz")).status != HTTPStatus.OK:
                if self._clock.now() > until:
                    raise DemoFailed(f"{name} is not ready after {timeout_s:g} s")
                await self._clock.sleep(READY_POLL_S)

    async def kill(self, name: str) -> None:
        self._running.pop(name).kill()

    async def start_again(self, name: str) -> None:
        self.restart_one(name)

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        parts = [part for part in self._parts if part.kind in kinds]
        await self._end({part.name for part in parts})
        changed = {variable_name(name): str(value) for name, value in changes.items()}
        for part in parts:
            self._running[part.name] = self._launch(part, changed)

    def take_exited(self) -> dict[str, int]:
        """The exit status of each process that ended since the last call; negative: a signal."""
        ended = {n: p.status for n, p in self._running.items() if p.status is not None}
        for name in ended:
            del self._running[name]
        return ended

    def restart_one(self, name: str) -> None:
        """Restart a process that has ended."""
        assert name not in self._running, f"{name} is running"
        [part] = [part for part in self._parts if part.name == name]
        self._running[name] = self._launch(part)

    def check(self) -> None:
        for process in self._running.values():
            process.check()

    async def stop(self) -> None:
        """Send SIGTERM to all, and SIGKILL to those that still run after STOP_TIMEOUT_S."""
        await self._end(set(self._running))

    async def _end(self, names: set[str]) -> None:
        ending = [self._running.pop(name) for name in names if name in self._running]
        for process in ending:
            if process.status is None:
                process.terminate()
        deadline = self._clock.now() + STOP_TIMEOUT_S
        while any(p.status is None for p in ending) and self._clock.now() < deadline:
            await self._clock.sleep(0.05)
        for process in ending:
            process.kill()

    def _launch(
        self, part: DeploymentPart, changed: Mapping[str, str] = NO_VARIABLES
    ) -> ManagedProcess:
        environment = {
            **self._environment,
            **self._own.get(part.name, NO_VARIABLES),
            **changed,
            **{variable_name(name): value for name, value in part_settings(part).items()},
        }
        command, output_file = process_command(part.kind), self.output_file(part.name)
        return launch(self._guard, part.name, command, environment, output_file)

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
        self._parts = parts
        self._builds = builds
        self._settings = settings
        self._broker = broker
        self._rng = rng
        self._running: dict[str, tuple[MemoryLog, ProcessContext, ProcessLifecycle]] = {}

    async def start(self) -> None:
        """Start the processes one after the other; returns when all are ready."""
        for part in self._parts:
            await self._launch(part, {})

    async def wait_ready(self, timeout_s: float) -> None:
        """Nothing to wait for: a process that was started is ready."""

    async def kill(self, name: str) -> None:
        """Cut its connection at once, and cancel its tasks."""
        log, ctx, _ = self._running.pop(name)
        log.kill()
        await ctx.cancel_tasks()

    async def start_again(self, name: str) -> None:
        [part] = [part for part in self._parts if part.name == name]
        await self._launch(part, {})

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        parts = [part for part in self._parts if part.kind in kinds]
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
