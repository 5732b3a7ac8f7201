"""The processes of a deployment, to be hurt: killed, paused, stopped, and started again.

Whatever ends is started again at once, as an orchestrator does; what ends by itself is noted. Owns
the processes and when each of them was ready; knows nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from app.bench.ground import TAIL_LINES, BenchFailed, Child, Ground

READY = " is ready\n"
"""What every process logs when it has started."""
READY_S = 90.0
"""What a process gets to be ready, several of them at once on a busy machine."""
STOP_S = 60.0
LOOK_S = 0.05

KINDS = ("gateway", "router", "worker", "indexer", "preprocessor")


class Part(NamedTuple):
    """A process: its name, what it is, and its own settings."""

    name: str
    kind: str
    settings: Mapping[str, Any] = {}


class Fallen(NamedTuple):
    """A part that ended by itself. `was_ready`: and not only failed to start."""

    name: str
    status: int
    was_ready: bool
    tail: str


class Herd:
    """Parts of a deployment on a ground, with common settings and some of their own.

    `watch` must be running.
    """

    def __init__(self, on: Ground, parts: Iterable[Part], settings: Mapping[str, Any]) -> None:
        self._on = on
        self._parts = {part.name: part for part in parts}
        self._settings = settings
        self._children: dict[str, Child] = {}
        self._lives: dict[str, int] = {}
        self.fallen: list[Fallen] = []

    def names(self, kind: str) -> list[str]:
        """All parts of a kind, in order."""
        return [part.name for part in self._parts.values() if part.kind == kind]

    def kind(self, name: str) -> str:
        """What a part is."""
        return self._parts[name].kind

    @property
    def children(self) -> Mapping[str, Child]:
        """The processes by their names."""
        return self._children

    def start(self, *names: str) -> None:
        """Start parts, all without names; they are not ready yet."""
        for name in names or self._parts:
            part = self._parts[name]
            life = self._lives[name] = self._lives.get(name, 0) + 1
            own = {"worker_id": name, "router_id": name, **self._settings, **part.settings}
            self._children[name] = self._on.launch(
                f"{name}.{life}", "faststream", "run", f"app.{part.kind}:app",
                **{"log_level": "INFO", **own},
            )  # fmt: skip

    async def ready(self, *names: str) -> None:
        """Wait until parts have started, all without names. Raises BenchFailed."""
        deadline = self._on.clock.now() + READY_S
        for name in names or self._parts:
            while READY not in self._children[name].output:
                if self._on.clock.now() > deadline:
                    tail = _tail(self._children[name])
                    raise BenchFailed(f"{name} is not ready after {READY_S:g} s:\n{tail}")
                await self._on.clock.sleep(LOOK_S)

    def kill(self, name: str) -> None:
        """SIGKILL. The next `start` begins a new life."""
        child = self._children.pop(name)
        child.kill()
        self._on.gone(child)

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self._children[name].pause()

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._children[name].resume()

    async def restart(self, name: str) -> None:
        """SIGTERM; when it has ended, in order, a new life, until that is ready.

        Raises BenchFailed.
        """
        child = self._children.pop(name)
        child.terminate()
        deadline = self._on.clock.now() + STOP_S
        while (status := child.status) is None:
            if self._on.clock.now() > deadline:
                raise BenchFailed(f"{name} does not stop in {STOP_S:g} s:\n{_tail(child)}")
            await self._on.clock.sleep(LOOK_S)
        self._on.gone(child)
        if status != 0:
            self.fallen.append(Fallen(name, status, was_ready=True, tail=_tail(child)))
        self.start(name)
        await self.ready(name)

    async def watch(self) -> None:
        """Start again what has ended by itself, until cancelled."""
        while True:
            for name, child in list(self._children.items()):
                if (status := child.status) is not None:
                    was_ready = READY in child.output
                    self.fallen.append(Fallen(name, status, was_ready, _tail(child)))
                    self._on.gone(child)
                    self.start(name)
            await self._on.clock.sleep(LOOK_S)

    def rss_bytes(self) -> dict[str, int]:
        """The memory of each part."""
        return {name: child.rss_bytes for name, child in self._children.items()}


def _tail(child: Child) -> str:
    return "\n".join(child.output.splitlines()[-TAIL_LINES:])
