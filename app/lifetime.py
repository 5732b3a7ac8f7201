"""The life of a process: its tasks, watched; how it starts, stops and fails.

Every background task of a process is spawned here. One that ends with an error ends the process
(crash-only: an orchestrator starts it again, and the log has everything it needs to know); none
can die unseen. `live` is the order of a life, `serve` makes of a process the FastStream application
that `faststream run` starts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from streams.clock import Clock, SystemClock
from streams.errors import StreamError
from streams.ports import Log

if TYPE_CHECKING:
    from faststream import FastStream

    from app.settings import Settings

log = logging.getLogger(__name__)

SWITCH_S = 0.001
"""How long a thread waits for the interpreter's lock before it asks for it. By default 5 ms: that
long would the loop wait for a thread that prepares prompts, and one that asks the index for one
that changes it."""


class OperatorError(Exception):
    """What a person must put right. The docstring of its class says how."""


class Lifetime:
    """What a process is given to live with: a clock, randomness, and a place for its tasks."""

    def __init__(
        self, name: str, clock: Clock | None = None, rng: random.Random | None = None
    ) -> None:
        self.name = name
        self.clock: Clock = clock or SystemClock()
        self.rng = rng or random.Random()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[BaseException] | None = None

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` in the background; if it raises, the process fails."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: BaseException) -> None:
        """End the process with this error; only the first one counts."""
        future = self._failed()
        if not future.done():
            if isinstance(error, StreamError | OperatorError):  # its class says what to do
                advice = " ".join((type(error).__doc__ or "").split())
                log.error("%s fails: %r: %s", self.name, error, advice)
            else:
                log.error("%s fails: %r", self.name, error, exc_info=error)
            future.set_result(error)

    async def failure(self) -> BaseException:
        """Wait for the error that ends this process."""
        return await asyncio.shield(self._failed())

    @property
    def failed(self) -> BaseException | None:
        """The error that ended this process, if one did."""
        future = self._failure
        return future.result() if future is not None and future.done() else None

    @property
    def tasks(self) -> int:
        """How many background tasks are running."""
        return len(self._tasks)

    async def end(self) -> None:
        """Cancel all tasks and wait until they are gone. Idempotent."""
        me = asyncio.current_task()
        while tasks := [t for t in self._tasks if t is not me]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _failed(self) -> asyncio.Future[BaseException]:
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return self._failure


class Process(Protocol):
    """A kvlane process. Built with its log, settings and lifetime; holds no other resources."""

    async def start(self) -> None:
        """Return when the process is ready to be useful; background work is spawned."""

    async def stop(self) -> None:
        """End in good order, within the grace of the settings. Called at most once, after start."""


async def live(
    life: Lifetime,
    start: Callable[[], Coroutine[Any, Any, None]],
    stop: Callable[[], Coroutine[Any, Any, None]],
    asked: asyncio.Event,
) -> None:
    """The whole life of a process: start, go on until `asked` is set or something fails, stop.

    An error in any task ends it at once, in the middle of the start or the stop too; being asked
    breaks a start off. `stop` is called only for what has started. No task is left when this
    returns. Raises the error.
    """
    failing = asyncio.ensure_future(life.failure())
    halt = (failing, asyncio.ensure_future(asked.wait()))
    log.info("%s starts", life.name)
    try:
        starting = life.spawn("start", start())
        await asyncio.wait((starting, *halt), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not starting.cancelled() and life.failed is None:
            log.info("%s is ready", life.name)
            await asyncio.wait(halt, return_when=asyncio.FIRST_COMPLETED)
            if life.failed is None:
                log.info("%s stops", life.name)
                stopping = life.spawn("stop", stop())
                await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in halt:
            task.cancel()
        await life.end()
    if life.failed is not None:
        raise life.failed


def settle() -> None:
    """When a process has started: let the interpreter keep none of its threads waiting for long.

    A collection would walk all modules now and then: 50 ms without the loop.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def serve(name: str, build: Callable[[Log, Settings, Lifetime], Process]) -> FastStream:
    """The FastStream application of one process, configured from the environment.

    SIGTERM and SIGINT stop the process in good order, or break its start off; an error ends it
    with a code ≠ 0. FastStream runs the process and describes the public topics; whatever the
    process reads and writes goes through its own connection to Kafka.
    """
    from faststream import FastStream

    from app.logs import configure
    from app.settings import Settings
    from streams.asyncapi import public_topics, specification
    from streams.kafka.log import KafkaLog
    from streams.provision import check_partitions, watch

    settings = Settings()
    configure(settings)
    connection = settings.connection(name)

    async def whole_life(asked: asyncio.Event) -> None:
        life = Lifetime(name)
        kafka = KafkaLog(connection, prefix=settings.topic_prefix)
        process = build(kafka, settings, life)

        async def start() -> None:
            await kafka.start()
            await check_partitions(kafka, settings.lanes)
            life.spawn("topics", watch(kafka, life.clock))
            await process.start()
            settle()

        try:
            await live(life, start, process.stop, asked)
        finally:
            await kafka.close()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        asked = asyncio.Event()
        living = asyncio.create_task(whole_life(asked), name=name)
        living.add_done_callback(lambda _: app.exit())
        try:
            yield
        finally:
            asked.set()
            try:
                await living
            except StreamError as e:  # it was logged, and says what to do
                raise SystemExit(1) from e

    app = FastStream(
        public_topics(connection.servers, settings.topic_prefix),
        lifespan=lifespan,
        specification=specification(),
        logger=None,  # it would tell of a start that has only begun
    )
    return app
