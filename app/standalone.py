"""A whole deployment in one process, for trials and tests.

The parts share one connection and communicate through the topics, as separate processes do.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvlane.app import worker
from kvlane.app.collector import Collector
from kvlane.app.gateway import Gateway
from kvlane.app.indexer import Indexer
from kvlane.app.local.deployment import ProcessFactory
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext, ProcessLifecycle, process_app
from kvlane.app.settings import Settings
from kvlane.streams.ports import Log

PROCESS_FACTORIES: dict[str, ProcessFactory] = {
    "worker": worker.build,
    "router": Router,
    "indexer": Indexer,
    "preprocessor": Preprocessor,
    "collector": Collector,
    "gateway": Gateway,
}


class StandaloneProcess:
    """A `ProcessLifecycle` that runs one of each process, and the given workers or so many."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        ctx: ProcessContext,
        workers: Iterable[ProcessLifecycle] | int = 1,
    ) -> None:
        if isinstance(workers, int):
            workers = [_worker(log, settings, ctx, n) for n in range(1, workers + 1)]
        self.indexer = Indexer(log, settings, ctx)
        self.gateway = Gateway(log, settings, ctx)
        self.preprocessor = Preprocessor(log, _without_port(settings), ctx)
        self._parts: list[ProcessLifecycle] = [
            *workers,
            Router(log, settings, ctx),
            self.preprocessor,
            Collector(log, _without_port(settings), ctx),
            self.indexer,
            self.gateway,
        ]
        self._started: list[ProcessLifecycle] = []

    async def start(self) -> None:
        for part in self._parts:
            await part.start()
            self._started.append(part)

    async def stop(self) -> None:
        """Stop in reverse order: no new requests, no new decisions, then the workers drain."""
        while self._started:
            await self._started.pop().stop()


def _without_port(settings: Settings) -> Settings:
    """The settings with any free status port: `KVLANE_STATUS_PORT` is the router's."""
    port = settings.status_port and 0
    return settings.model_copy(update={"status_port": port})


def _worker(log: Log, settings: Settings, ctx: ProcessContext, number: int) -> ProcessLifecycle:
    own = {"worker_id": f"{settings.worker_id}-{number}"}
    return worker.build(log, _without_port(settings).model_copy(update=own), ctx)


__getattr__ = process_app("standalone", StandaloneProcess)
