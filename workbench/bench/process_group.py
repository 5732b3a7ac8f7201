"""The processes of a deployment under fault injection: kill, pause, stop and restart.

An ended process is restarted at once, as an orchestrator does; one that ends by itself is recorded.
Owns the processes and their readiness, not their purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvlane.app.local.processes import ManagedProcess, process_command
from workbench.bench.bench_environment import READY_LINE, BenchEnvironment, BenchFailed
from workbench.bench.process_usage import resident_bytes

READY_TIMEOUT_S = 180.0
"""Start timeout of a process, with several of them starting on a busy machine."""
STOP_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05

PROCESS_KINDS = ("gateway", "router", "worker", "indexer", "preprocessor", "collector")


class ProcessSpec(NamedTuple):
    """A process: its name, its process file, and its own settings."""

    name: str
    kind: str
    settings: Mapping[str, Any] = {}


class ProcessCrash(NamedTuple):
    """A process that ended by itself. `was_ready`: after it had started."""

    name: str
    status: int
    was_ready: bool
    tail: str


class ProcessGroup:
    """Processes of a deployment, with common settings and settings of their own.

    `restart_crashed` must be running.
    """

    def __init__(
        self, on: BenchEnvironment, parts: Iterable[ProcessSpec], settings: Mapping[str, Any]
    ) -> None:
        self._on = on
        self._parts = {part.name: part for part in parts}
        self._settings = settings
        self._children: dict[str, ManagedProcess] = {}
        self._starts: dict[str, int] = {}
        self.crashes: list[ProcessCrash] = []

    def names_of_kind(self, kind: str) -> list[str]:
        """The names of all processes of a kind, in order."""
        return [part.name for part in self._parts.values() if part.kind == kind]

    @property
    def processes(self) -> Mapping[str, ManagedProcess]:
        return self._children

    def start(self, *names: str) -> None:
        """Start the named processes, or all; they are not ready yet."""
        for name in names or self._parts:
            part = self._parts[name]
            start = self._starts[name] = self._starts.get(name, 0) + 1
            own = {"worker_id": name, "router_id": name, **self._settings, **part.settings}
            self._children[name] = self._on.launch(
                f"{name}.{start}", *process_command(part.kind), **own
            )

    async def wait_ready(self, *names: str) -> None:
        """Wait until the named processes, or all, have started. Raises BenchFailed."""
        deadline = self._on.clock.now() + READY_TIMEOUT_S
        for name in names or self._parts:
            while READY_LINE not in self._children[name].output:
                if self._on.clock.now() > deadline:
                    tail = self._children[name].tail
                    raise BenchFailed(f"{name} is not ready after {READY_TIMEOUT_S:g} s:\n{tail}")
                await self._on.clock.sleep(POLL_INTERVAL_S)

    def kill(self, name: str) -> None:
        """SIGKILL. `start` starts it again."""
        child = self._children.pop(name)
        child.kill()
        self._on.forget_process(child)

    def pause(self, name: str) -> None:
        self._children[name].pause()

    def resume(self, name: str) -> None:
        self._children[name].resume()

    async def restart(self, name: str) -> None:
        """SIGTERM; after its end start it again, and wait until it is ready. Raises BenchFailed."""
        child = self._children.pop(name)
        child.terminate()
        deadline = self._on.clock.now() + STOP_TIMEOUT_S
        while (status := child.status) is None:
            if self._on.clock.now() > deadline:
                raise BenchFailed(f"{name} does not stop in {STOP_TIMEOUT_S:g} s:\n{child.tail}")
            await self._on.clock.sleep(POLL_INTERVAL_S)
        self._on.forget_process(child)
        if status != 0:
            self.crashes.append(ProcessCrash(name, status, was_ready=True, tail=child.tail))
        self.start(name)
        await self.wait_ready(name)

    async def restart_crashed(self) -> None:
        """Restart processes that end by themselves, until cancelled."""
        while True:
            for name, child in list(self._children.items()):
                if (status := child.status) is not None:
                    was_ready = READY_LINE in child.output
                    self.crashes.append(ProcessCrash(name, status, was_ready, child.tail))
                    self._on.forget_process(child)
                    self.start(name)
            await self._on.clock.sleep(POLL_INTERVAL_S)

    def rss_bytes(self) -> dict[str, int]:
        """The resident memory of each process."""
        return {name: resident_bytes(child) for name, child in self._children.items()}
