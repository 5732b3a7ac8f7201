"""What every engine beside a running server has in common, whatever it asks the server for.

Owns the connection, how the server is, and the answers under way; a cancel is passed on by closing
their connection. Knows nothing of what is asked and answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from app.engine.attached.dialect import Speech
from app.engine.attached.health import Health
from app.engine.attached.introduction import Introduction
from app.engine.attached.server import STREAM_BYTES, Server, Stream
from app.engine.contract import Engine, EngineDead, EngineError, EngineOutput, GenerateContext
from streams.clock import Clock
from streams.records import EngineFigures

log = logging.getLogger(__name__)

ADAPTERS_S = 10.0
"""Between two looks at which adapters the server has: operators load them while it runs."""


class Attachment(NamedTuple):
    """Where the server is. `model`: its name there; "" for the only one.

    `silence_s`: for how long it may say nothing while it has something to answer; `start_s`: for
    how long it may be away when the worker starts. `answer_bytes`: of an answer, with all that it
    says around each token.
    """

    url: str
    events: str = ""
    replay: str = ""
    model: str = ""
    api_key: str = ""
    silence_s: float = 120.0
    start_s: float = 600.0
    answer_bytes: int = STREAM_BYTES


class Reading(Protocol):
    """One answer of a server, on its way to outputs."""

    def read(self, stream: Stream, context: GenerateContext) -> AsyncGenerator[EngineOutput, None]:
        """The outputs, the terminal one last. Raises ServerFailed for an answer without an end."""

    def cancelled(self) -> EngineOutput:
        """The end of an answer that nobody wants any more."""


class Beside(Engine):
    """See the module. Subclasses give `start` and `generate`."""

    def __init__(self, clock: Clock, where: Attachment) -> None:
        self._clock = clock
        self._where = where
        self._server: Server | None = None
        self._health: Health | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: dict[GenerateContext, Stream] = {}
        self._dead: EngineDead | None = None
        self._versions: Mapping[str, str] = {}
        self._speech = Speech(where.model)

    def figures(self) -> EngineFigures | None:
        """As `Engine.figures`, not older than a few seconds."""
        metrics = self._health.metrics if self._health is not None else None
        return metrics.figures() if metrics is not None and metrics.running is not None else None

    def versions(self) -> Mapping[str, str]:
        """As `Engine.versions`: of the server, if it tells."""
        return self._versions

    def adapters(self) -> tuple[str, ...] | None:
        """As `Engine.adapters`, not older than `ADAPTERS_S`."""
        return tuple(sorted(self._speech.adapters))

    @property
    def silence_s(self) -> float:
        """As `Engine.silence_s`."""
        return self._where.silence_s

    async def cleanup(self) -> None:
        """As `Engine.cleanup`. The server goes on."""
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
        """As `Engine.abort`: the server sees the connection closed and stops generating."""
        if (stream := self._streams.get(context)) is not None:
            stream.close()

    async def _meet(self, worker_id: str) -> Introduction:
        """Wait for the server. Raises EngineError."""
        where = self._where
        log.info("worker %s is being attached to %s", worker_id, where.url)
        self._server = Server(where.url, where.silence_s, where.api_key, where.answer_bytes)
        introduction = Introduction(self._server, self._clock)
        await introduction.wait(where.start_s)
        return introduction

    async def _look_after(self) -> Health:
        """Look at how the server is, now and from now on."""
        assert self._server is not None
        health = self._health = Health(self._server, self._clock, self._began_anew)
        await health.look()
        self._spawn(health.keep_looking())
        self._spawn(self._follow_adapters(Introduction(self._server, self._clock)))
        return health

    async def _follow_adapters(self, introduction: Introduction) -> None:
        while True:
            await self._clock.sleep(ADAPTERS_S)
            try:
                adapters = await introduction.adapters(self._speech.model)
            except EngineError as e:
                log.debug("%s lists no adapters at the moment: %s", self._where.url, e)
                continue
            if adapters != self._speech.adapters:
                log.info("%s has these adapters now: %s", self._where.url, sorted(adapters))
                self._speech = self._speech._replace(adapters=adapters)

    def _began_anew(self) -> None:
        """Another life of the server."""

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"beside {self._where.url}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what looks after %s failed", self._where.url, exc_info=error)
            self._dead = EngineDead(f"what looks after {self._where.url} failed: {error!r}")

    async def _answer(
        self, path: str, body: object, event_bytes: int, reading: Reading, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Ask, and read the answer. Raises ServerFailed and Rejected, besides EngineDead."""
        if self._dead is not None:
            raise self._dead
        assert self._server is not None
        stream = self._server.stream(path, body, event_bytes)
        self._streams[context] = stream
        try:
            async with stream, aclosing(reading.read(stream, context)) as outputs:
                async for output in outputs:
                    yield output
        except EngineError:
            if not context.stopped:
                raise
            yield reading.cancelled()
        finally:
            del self._streams[context]
