"""A deployment of real processes on a real broker, for tests that stop and kill them.

Each part runs as `faststream run app.KIND:app`, as in a checkout. A part that ends without a signal
of the test is an error of the test, and none is left, however the test ends.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from kvlane.app.local.deployment import DeploymentPart, ProcessDeployment
from kvlane.streams.brokers.watchdog import ProcessGuard, marked_processes
from kvlane.streams.clock import SystemClock


def kernel_folder(code: Path) -> Path:
    """The folder with the compiled kernels of another version."""
    return code / "kernels"


def _command(kind: str) -> Sequence[str]:
    return ("faststream", "run", f"app.{kind}:app")


class Deployment(ProcessDeployment):
    """Processes with common settings and some of their own. `close` it."""

    def __init__(self, parts: Sequence[DeploymentPart], settings: Mapping[str, object]) -> None:
        self._processes_guard = ProcessGuard()
        super().__init__(parts, settings, self._processes_guard, SystemClock(), command=_command)

    def launch_version(self, name: str, code: Path) -> None:
        """Start a part with the code of another version, before installed packages on the path."""
        self.launch(name, changes={"kernel_cache_dir": kernel_folder(code)}, folder=code)

    async def kill(self, *names: str) -> None:
        self.check()
        killed = [self.processes[name] for name in names]
        await super().kill(*names)
        assert all(process.status == -signal.SIGKILL for process in killed)

    async def terminate(self, names: Collection[str], within_s: float) -> None:
        """SIGTERM all of them at once: each has to end with code 0 in time."""
        self.check()
        ending = [self.processes[name] for name in names]
        await self.stop(*names, within_s=within_s)
        for process in ending:
            assert process.status == 0, f"{process.name}: {process.status}\n{process.tail}"

    def close(self) -> None:
        """SIGKILL for what still runs; no process is left."""
        for process in self.processes.values():
            process.kill()
        self._processes_guard.close()
        assert not marked_processes(self._processes_guard.mark)
