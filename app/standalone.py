"""Everything in one process: workers, router, preprocessor, indexer and gateway, one connection.

For one machine, for trying things out, and for tests. The parts know nothing of each other; they
meet on the topics, exactly as separate processes do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app import worker
from app.gateway import Gateway
from app.indexer import Indexer
from app.lifetime import Lifetime, Process, serve
from app.preprocessor import Preprocessor
from app.router import Router
from app.settings import Settings
from streams.ports import Log

if TYPE_CHECKING:
    from faststream import FastStream


class Standalone:
    """A `Process` made of processes; `workers` says how many workers it runs."""

    def __init__(self, log: Log, settings: Settings, life: Lifetime, workers: int = 1) -> None:
        self.indexer = Indexer(log, settings, life)
        self.gateway = Gateway(log, settings, life)
        self._parts: list[Process] = [
            *(_worker(log, settings, life, n) for n in range(1, workers + 1)),
            Router(log, settings, life),
            Preprocessor(log, settings, life),
            self.indexer,
            self.gateway,
        ]
        self._started: list[Process] = []

    async def start(self) -> None:
        """Start the parts in the order in which they need each other."""
        for part in self._parts:
            await part.start()
            self._started.append(part)

    async def stop(self) -> None:
        """Stop in reverse: no new requests, no new decisions, then the workers drain."""
        while self._started:
            await self._started.pop().stop()


def _worker(log: Log, settings: Settings, life: Lifetime, number: int) -> Process:
    own = {"worker_id": f"{settings.worker_id}-{number}"}
    return worker.build(log, settings.model_copy(update=own), life)


def __getattr__(name: str) -> FastStream | Any:
    if name == "app":
        return serve("standalone", Standalone)
    raise AttributeError(name)
