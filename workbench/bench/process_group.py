"""The processes of a deployment under fault injection.

An ended process is restarted at once, as an orchestrator does; one that ends by itself is recorded.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import NamedTuple

from kvlane.app.local.deployment import ProcessDeployment
from workbench.bench.process_usage import resident_bytes

STOP_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05

PROCESS_KINDS = ("gateway", "router", "worker", "indexer", "preprocessor", "collector")


class ProcessCrash(NamedTuple):
    """A process that ended by itself. `was_ready`: after it had started."""

    name: str
    status: int
    was_ready: bool
    tail: str


class ProcessGroup(ProcessDeployment):
    """Processes with a record of their crashes. `restart_crashed` must be running."""

    @cached_property
    def crashes(self) -> list[ProcessCrash]:
        """Of processes that ended by themselves, or not in order."""
        return []

    def names_of_kind(self, kind: str) -> list[str]:
        """The names of all processes of a kind, in order."""
        return [part.name for part in self.parts.values() if part.kind == kind]

    async def restart_one(self, name: str) -> None:
        """SIGTERM; after its end start it again, and wait until it is ready."""
        child = self.processes[name]
        if status := (await self.stop(name, within_s=STOP_TIMEOUT_S))[name]:
            self.crashes.append(ProcessCrash(name, status, was_ready=True, tail=child.tail))
        await self.start(name)
        await self.wait_ready(name)

    async def restart_crashed(self) -> None:
        """Restart processes that end by themselves, until cancelled."""
        while True:
            children = dict(self.processes)
            for name, status in self.take_exited().items():
                child = children[name]
                self.crashes.append(ProcessCrash(name, status, child.has_started, child.tail))
                self.launch(name)
            await asyncio.sleep(POLL_INTERVAL_S)

    def rss_bytes(self) -> dict[str, int]:
        """The resident memory of each process."""
        return {name: resident_bytes(child) for name, child in self.processes.items()}
