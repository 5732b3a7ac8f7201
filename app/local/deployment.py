"""A small deployment on this machine: one of each process and some workers.

`ProcessDeployment` runs each as `kvlane run NAME`; `InProcessDeployment` runs them in this process,
on the log in memory.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from kvlane.app.local.processes import (
    READY_POLL_S,
    DeploymentFailed,
    ManagedProcess,
    http_get,
    launch,
    process_command,
)
from kvlane.app.runtime.process import ProcessContext, ProcessLifecycle
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker import LOOPBACK, free_ports
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.clock import Clock
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log

STOP_TIMEOUT_S = 20.0
READY_TIMEOUT_S = 180.0
"""Start timeout of a process, with several of them starting on a busy machine."""
NO_URLS: Mapping[str, str] = {}
NO_CHANGES: Mapping[str, Any] = {}
PORT_FIELDS = {"gateway": "http_port", "indexer": "indexer_port"}
"""Port settings by kind of process; all others listen on a status port."""
STATUS_PORT_FIELD = "status_port"
SINGLE_KINDS = ("router", "indexer", "preprocessor", "collector", "gateway")


class DeploymentPart(NamedTuple):
    """One process: its name, the kind of process it runs, and its own settings by field."""

    name: str
    kind: str
    settings: Mapping[str, object] = NO_CHANGES

    @property
    def role(self) -> object:
        """The role of a worker; None: that of the common settings."""
        return self.settings.get("worker_role")

    @property
    def port_field(self) -> str:
        return PORT_FIELDS.get(self.kind, STATUS_PORT_FIELD)


def deployment_parts(workers: int, prefill_workers: int = 0) -> list[DeploymentPart]:
    """`workers` workers, the first ones for prefill, and one of each other process."""
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


def assign_ports(settings: Settings, parts: Sequence[DeploymentPart]) -> list[DeploymentPart]:
    """The parts, each with its given port or a free one. A given status port is the router's."""
    free = iter(free_ports(len(parts)))
    listening = []
    for part in parts:
        has_given = part.kind in PORT_FIELDS or part.kind == "router"
        port = (has_given and getattr(settings, part.port_field)) or next(free)
        listening.append(part._replace(settings={**part.settings, part.port_field: port}))
    return listening


def part_url(settings: Settings, part: DeploymentPart) -> str:
    host, port = settings.http_host, part.settings[part.port_field]
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)  # noqa: S104 - only compared
    scheme = "http" if settings.http_tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def part_settings(part: DeploymentPart) -> dict[str, object]:
    return {"worker_id": part.name, "router_id": part.name, **part.settings}


class LocalDeployment(ABC):
    """The processes of a deployment, started and stopped together."""

    def __init__(self, parts: Iterable[DeploymentPart]) -> None:
        self.parts = {part.name: part for part in parts}

    async def start(self, *names: str, changes: Mapping[str, Any] = NO_CHANGES) -> None:
        """Start the named processes, or all, with changed settings."""
        for name in names or self.parts:
            await self._start(self.parts[name], changes)

    async def restart(self, kinds: Collection[str], changes: Mapping[str, Any]) -> None:
        """Stop all processes of these kinds gracefully; start new ones with changed settings."""
        names = [part.name for part in self.parts.values() if part.kind in kinds]
        await self.stop(*names)
        await self.start(*names, changes=changes)

    @abstractmethod
    async def _start(self, part: DeploymentPart, changes: Mapping[str, Any]) -> None:
        """Start a process that does not run."""

    @abstractmethod
    async def wait_ready(self, *names: str, timeout_s: float) -> None:
        """Wait until the named processes, or all, are ready. Raises DeploymentFailed."""

    @abstractmethod
    async def kill(self, *names: str) -> None:
        """End processes as kill -9 does."""

    @abstractmethod
    def check(self) -> None:
        """Raise DeploymentFailed when a process ended that was not killed."""

    @abstractmethod
    async def stop(self, *names: str) -> object:
        """Stop the named processes, or all, gracefully."""


class ProcessDeployment(LocalDeployment):
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
        """`settings`: of all processes, by field; those of a part win. `logs`: the folder of the
        output files. `status_urls`: addresses of `/readyz`; another process is ready when it has
        logged it."""
        super().__init__(parts)
        self._settings = settings
        self._guard = guard
        self._clock = clock
        self._logs = logs or guard.directory
        self._status_urls = status_urls
        self._command = command
        self.processes: dict[str, ManagedProcess] = {}
        """Those that were started, and not ended from here."""

    async def _start(self, part: DeploymentPart, changes: Mapping[str, Any]) -> None:
        self.launch(part.name, changes=changes)

    async def wait_ready(self, *names: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        until = self._clock.now() + timeout_s
        for name in names or self.parts:
            while not await self._is_ready(name):
                if self._clock.now() > until:
                    tail = self.processes[name].tail
                    raise DeploymentFailed(f"{name} is not ready after {timeout_s:g} s:\n{tail}")
                await self._clock.sleep(READY_POLL_S)

    async def _is_ready(self, name: str) -> bool:
        if (url := self._status_urls.get(name)) is None:
            return self.processes[name].has_started
        return (await asyncio.to_thread(http_get, f"{url}/readyz")).status == HTTPStatus.OK

    async def kill(self, *names: str) -> None:
        for name in names:
            self.processes.pop(name).kill()

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
        """Send SIGTERM, and SIGKILL to processes that still run after `within_s`; returns the exit
        status."""
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
            self.processes[name] = launch(self._guard, name, command, settings, output, folder)

    def output_file(self, name: str) -> Path:
        return self._logs / f"{name}.log"


ProcessFactory = Callable[[Log, Settings, ProcessContext], ProcessLifecycle]


class InProcessDeployment(LocalDeployment):
    """A deployment inside this process, each part with its own connection to the log in memory."""

    def __init__(
        self,
        parts: Sequence[DeploymentPart],
        builds: Mapping[str, ProcessFactory],
        settings: Settings,
        broker: MemoryBroker,
        rng: random.Random,
    ) -> None:
        super().__init__(parts)
        self._builds = builds
        self._settings = settings
        self._broker = broker
        self._rng = rng
        self._running: dict[str, tuple[MemoryLog, ProcessContext, ProcessLifecycle]] = {}

    async def _start(self, part: DeploymentPart, changes: Mapping[str, Any]) -> None:
        name = part.name
        log = MemoryLog(self._broker, name)
        ctx = ProcessContext(name, self._broker.clock, random.Random(self._rng.random()))
        settings = self._settings.model_copy(update={**part_settings(part), **changes})
        process = self._builds[part.kind](log, settings, ctx)
        self._running[name] = log, ctx, process
        await log.start()
        await process.start()

    async def wait_ready(self, *names: str, timeout_s: float) -> None:
        """Nothing to wait for: `start` returns when its processes are ready."""

    async def kill(self, *names: str) -> None:
        """Cut their connections at once, and cancel their tasks."""
        for name in names:
            log, ctx, _ = self._running.pop(name)
            log.kill()
            await ctx.cancel_tasks()

    def check(self) -> None:
        for name, (_, ctx, _) in self._running.items():
            if ctx.error is not None:
                raise DeploymentFailed(f"{name} failed: {ctx.error!r}")

    async def stop(self, *names: str) -> None:
        """Stop the named processes together, or all in reverse order: workers drain last."""
        ending = [self._running.pop(name) for name in names if name in self._running]
        await asyncio.gather(*(_ended(*running) for running in ending))
        while self._running and not names:
            _, running = self._running.popitem()
            await _ended(*running)


async def _ended(log: MemoryLog, ctx: ProcessContext, process: ProcessLifecycle) -> None:
    try:
        if ctx.error is None:
            await process.stop()
    finally:
        await ctx.cancel_tasks()
        await log.close()
