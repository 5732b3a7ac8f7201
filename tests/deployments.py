"""A deployment of real processes on a real broker, for tests that stop and kill them.

Each part runs as `faststream run app.KIND:app`, the way deployments do. Owns the processes and how
each of them ended: one that ends without being asked to is an error of the test, and none is left,
however the test ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvlane.app.settings import variable_name
from kvlane.streams.brokers.watchdog import ProcessGuard, marked_processes
from kvlane.streams.clock import SystemClock

READY = b" is ready\n"
"""The log line of every started process."""
READY_S = 60.0
LAST_LINES = 30
POLL_S = 0.02


def kernel_folder(code: Path) -> Path:
    """The folder with the compiled kernels of another version."""
    return code / "kernels"


class Part(NamedTuple):
    """A process: its name, what it is, and its own settings."""

    name: str
    kind: str
    settings: Mapping[str, object] = {}


class Deployment:
    """Processes with common settings and some of their own. `close` it."""

    def __init__(self, parts: Sequence[Part], settings: Mapping[str, object]) -> None:
        self._parts = {part.name: part for part in parts}
        self._settings = settings
        self._guard = ProcessGuard()
        self._clock = SystemClock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._said_before: dict[str, int] = {}
        """Size of the log of a part's earlier processes."""

    @property
    def names(self) -> set[str]:
        """All parts, whether they run or not."""
        return set(self._parts)

    @property
    def running(self) -> set[str]:
        """Parts that were started and not ended."""
        return set(self._running)

    def start(self, *names: str, code: Path | None = None) -> None:
        """Start parts, with the code of another version in the folder `code`; not ready yet."""
        for name in names:
            assert name not in self._running, f"{name} runs already"
            log = self._log(name)
            self._said_before[name] = log.stat().st_size if log.exists() else 0
            part = self._parts[name]
            own = {"worker_id": name, "router_id": name, **self._settings, **part.settings}
            if code is not None:
                own["kernel_cache_dir"] = kernel_folder(code)
            with log.open("ab") as output:
                self._running[name] = subprocess.Popen(
                    [
                        *(sys.executable, "-X", self._guard.mark),
                        *("-m", "faststream", "run", f"app.{part.kind}:app"),
                    ],
                    cwd=code,  # is before installed packages on the path of modules
                    env={
                        **{k: v for k, v in os.environ.items() if not k.startswith("KVLANE_")},
                        **{variable_name(key): str(value) for key, value in own.items()},
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    async def ready(self, *names: str) -> None:
        """Wait until parts have started."""
        deadline = self._clock.now() + READY_S
        for name in names:
            while not self._said(name).count(READY):
                self.check()
                assert self._clock.now() < deadline, f"{name} is not ready:\n{self.tail(name)}"
                await self._clock.sleep(POLL_S)

    def kill(self, *names: str) -> None:
        self.check()
        for name in names:
            self._running[name].send_signal(signal.SIGKILL)
        for name in names:
            assert self._running.pop(name).wait() == -signal.SIGKILL

    async def terminate(self, names: Collection[str], within_s: float) -> None:
        """SIGTERM all of them at once: each has to end with code 0 in time."""
        self.check()
        for name in names:
            self._running[name].terminate()
        deadline = self._clock.now() + within_s
        for name in names:
            while (status := self._running[name].poll()) is None:
                late = f"{name} has not ended after {within_s:g} s:\n{self.tail(name)}"
                assert self._clock.now() < deadline, late
                await self._clock.sleep(POLL_S)
            del self._running[name]
            assert status == 0, f"{name} ended with {status}:\n{self.tail(name)}"

    def check(self) -> None:
        """No part has ended by itself."""
        for name, process in self._running.items():
            status = process.poll()
            assert status is None, f"{name} ended with {status}:\n{self.tail(name)}"

    def tail(self, name: str) -> str:
        """The last lines that a part logged."""
        return b"\n".join(self._said(name).splitlines()[-LAST_LINES:]).decode(errors="replace")

    def close(self) -> None:
        """SIGKILL for what still runs; no process is left."""
        self._guard.close()
        for process in self._running.values():
            process.wait()
        assert not marked_processes(self._guard.mark)

    def _said(self, name: str) -> bytes:
        """Log output of a part's present process."""
        return self._log(name).read_bytes()[self._said_before[name] :]

    def _log(self, name: str) -> Path:
        return self._guard.directory / f"{name}.log"
