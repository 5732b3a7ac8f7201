"""Base of the engines over a running server: connection, health, adapters and open streams.

A restarted server has an empty cache: found by the start time in its metrics, else assumed when it
could not be reached. A cancel closes the connection of its stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from kvlane.app.engine.attached.discovery import ServerDiscovery
from kvlane.app.engine.attached.new_forms import FormKey, NewForms
from kvlane.app.engine.attached.request_body import ServerDialect
from kvlane.app.engine.attached.server_client import MAX_STREAM_BYTES, EventStream, ServerClient
from kvlane.app.engine.attached.server_metrics import ServerMetrics, read_metrics
from kvlane.app.engine.interface import (
    Engine,
    EngineDead,
    EngineError,
    EngineOutput,
    GenerateContext,
)
from kvlane.streams.clock import Clock
from kvlane.streams.records import EngineStats

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 5.0


class ServerHealth:
    """Polls one server. `on_restart` is called after each restart."""

    def __init__(self, server: ServerClient, clock: Clock, on_restart: Callable[[], None]) -> None:
        self.metrics = ServerMetrics()
        """The metrics last read."""
        self._server = server
        self._clock = clock
        self._on_restart = on_restart
        self._was_gone = False
        self._has_metrics = True

    async def check(self) -> None:
        path = "/metrics" if self._has_metrics else "/v1/models"
        try:
            body = await self._server.get(path, CHECK_TIMEOUT_S)
            metrics = read_metrics(body.decode(errors="replace")) if self._has_metrics else None
        except EngineError as e:
            if getattr(e, "status", None) in (404, 405, 501) and self._has_metrics:
                self._has_metrics = False
                log.info(
                    "%s has no metrics: heartbeats have no engine statistics", self._server.url
                )
            elif not self._was_gone:
                self._was_gone = True
                log.warning("%s: the health check failed: %s", self._server.url, e)
            return
        except ValueError as e:
            self._has_metrics = False
            log.warning("%s: its metrics cannot be parsed: %s", self._server.url, e)
            return
        self._compare(self.metrics.started_at, metrics or ServerMetrics())

    async def run(self) -> None:
        while True:
            await self._clock.sleep(CHECK_INTERVAL_S)
            await self.check()

    def _compare(self, started_before: float | None, now: ServerMetrics) -> None:
        was_gone, self._was_gone = self._was_gone, False
        self.metrics = now
        if started_before is not None and now.started_at is not None:
            is_other = started_before != now.started_at
        else:
            is_other = was_gone
        if is_other:
            log.warning("%s has restarted: its cache is empty", self._server.url)
            self._on_restart()


ADAPTERS_POLL_S = 10.0
"""Interval between two queries of the server's adapters, which operators load while it runs."""


class ServerAddress(NamedTuple):
    """Address of the server and its limits. `model`: its name there; "" for the only one.

    `read_timeout_s`: longest time without data during an answer; `start_timeout_s`: of the wait for
    the server at the start; `max_response_bytes`: bound on an answer with its JSON.
    """

    url: str
    events_endpoint: str = ""
    replay_endpoint: str = ""
    model: str = ""
    api_key: str = ""
    read_timeout_s: float = 120.0
    start_timeout_s: float = 600.0
    max_response_bytes: int = MAX_STREAM_BYTES


class ServerReader(Protocol):
    """Converts one answer of a server to outputs."""

    def read_outputs(
        self, stream: EventStream, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs, the final one last. Raises ServerFailed for an answer without an
        end."""

    def cancelled_output(self) -> EngineOutput:
        """The final output of a cancelled request."""


class ServerEngine(Engine):
    def __init__(self, clock: Clock, address: ServerAddress) -> None:
        self._clock = clock
        self._where = address
        self._server: ServerClient | None = None
        self._health: ServerHealth | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: dict[GenerateContext, EventStream] = {}
        self._new_forms = NewForms(clock)
        self._dead: EngineDead | None = None
        self._versions: Mapping[str, str] = {}
        self._dialect = ServerDialect(address.model)

    def stats(self) -> EngineStats | None:
        """As `Engine.stats`, at most a few seconds old."""
        metrics = self._health.metrics if self._health is not None else None
        return (
            metrics.engine_stats() if metrics is not None and metrics.running is not None else None
        )

    def versions(self) -> Mapping[str, str]:
        return self._versions

    def adapters(self) -> tuple[str, ...] | None:
        """As `Engine.adapters`, at most `ADAPTERS_POLL_S` old."""
        return tuple(sorted(self._dialect.adapters))

    @property
    def output_timeout_s(self) -> float:
        return self._where.read_timeout_s

    async def cleanup(self) -> None:
        """As `Engine.cleanup`. The server keeps running."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams.values()):
            stream.close()
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def abort(self, context: GenerateContext) -> None:
        """As `Engine.abort`: closes the connection, at which the server stops generating."""
        if (stream := self._streams.get(context)) is not None:
            stream.close()
        self._new_forms.wake()

    async def _connect(self, worker_id: str) -> ServerDiscovery:
        """Wait for the server. Raises EngineError."""
        where = self._where
        log.info("worker %s waits for the server at %s", worker_id, where.url)
        self._server = ServerClient(
            where.url, where.read_timeout_s, where.api_key, where.max_response_bytes
        )
        introduction = ServerDiscovery(self._server, self._clock)
        await introduction.wait_ready(where.start_timeout_s)
        return introduction

    async def _start_monitoring(self) -> ServerHealth:
        """Check the server once, and start the tasks that keep checking it."""
        assert self._server is not None
        health = self._health = ServerHealth(self._server, self._clock, self._on_restart)
        await health.check()
        self._spawn(health.run())
        self._spawn(self._follow_adapters(ServerDiscovery(self._server, self._clock)))
        return health

    async def _follow_adapters(self, introduction: ServerDiscovery) -> None:
        while True:
            await self._clock.sleep(ADAPTERS_POLL_S)
            try:
                adapters = await introduction.adapters(self._dialect.model)
            except EngineError as e:
                log.debug("%s: listing its adapters failed: %s", self._where.url, e)
                continue
            if adapters != self._dialect.adapters:
                log.info("%s: its adapters are now %s", self._where.url, sorted(adapters))
                self._dialect = self._dialect._replace(adapters=adapters)

    def _on_restart(self) -> None:
        """Called after a restart of the server."""

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"beside {self._where.url}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task that monitors %s failed", self._where.url, exc_info=error)
            self._dead = EngineDead(f"a task that monitors {self._where.url} failed: {error!r}")

    async def _answer(
        self,
        path: str,
        body: object,
        event_bytes: int,
        reading: ServerReader,
        context: GenerateContext,
        form: FormKey | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Send a request, read its answer. Raises ServerFailed, InvalidRequest and EngineDead."""
        if self._dead is not None:
            raise self._dead
        assert self._server is not None
        stream = self._server.open_stream(path, body, event_bytes, context.traceparent)
        self._streams[context] = stream
        outputs = _read(stream, reading, context)
        try:
            async with aclosing(outputs):
                if form is not None:
                    first = await self._new_forms.first(outputs, form, context)
                    if first is not None:
                        yield first
                async for output in outputs:
                    yield output
        except EngineError:
            if not context.is_stopped:
                raise
            yield reading.cancelled_output()
        finally:
            del self._streams[context]


async def _read(
    stream: EventStream, reading: ServerReader, context: GenerateContext
) -> AsyncGenerator[EngineOutput, None]:
    async with stream, aclosing(reading.read_outputs(stream, context)) as outputs:
        async for output in outputs:
            yield output
