"""The life of a process: its tasks, watched; how it starts, stops and fails.

Every background task of a process is spawned here. One that ends with an error ends the process
(crash-only: an orchestrator starts it again, and the log has everything it needs to know); none
can die unseen. `serve` turns a process into the FastStream application that `faststream run`
starts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from streams.clock import Clock, SystemClock
from streams.ports import Log

if TYPE_CHECKING:
    from faststream import FastStream
    from faststream.kafka import KafkaBroker

    from app.settings import Settings

log = logging.getLogger(__name__)


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


P = TypeVar("P", bound=Process)


def serve(
    name: str,
    build: Callable[[Log, Settings, Lifetime], P],
    subscribe: Callable[[P, KafkaBroker], None] | None = None,
) -> FastStream:
    """The FastStream application of one process, configured from the environment.

    Kafka is reached with the settings' connection; SIGTERM and SIGINT stop the process in good
    order; a failed task stops it with an error, so that `faststream run` exits with a code ≠ 0.
    A process with FastStream subscribers adds them to the broker in `subscribe`, before it starts.
    """
    from faststream import FastStream
    from faststream.kafka import KafkaBroker

    from app.logs import configure
    from app.settings import Settings
    from streams.kafka.log import KafkaLog

    settings = Settings()
    configure(settings)
    connection = settings.connection(name)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        life = Lifetime(name)
        kafka = KafkaLog(connection, prefix=settings.topic_prefix)
        process = build(kafka, settings, life)
        if subscribe is not None:
            subscribe(process, broker)
        try:
            await kafka.start()
            await process.start()
            gc.collect()
            gc.freeze()  # else a collection walks all modules now and then: 50 ms without the loop
            watch = asyncio.create_task(_exit_on_failure(life, app), name=f"{name}/watch")
            try:
                yield
            finally:
                watch.cancel()
                if life.failed is None:
                    await process.stop()
        finally:
            await life.end()
            await kafka.close()
        if life.failed is not None:
            raise life.failed

    options: dict[str, Any] = connection.faststream_options()
    broker = KafkaBroker(
        **options,
        allow_auto_create_topics=False,  # it would make them with one partition
        apply_types=False,
        log_level=logging.DEBUG,  # the default writes two lines a record
    )
    app = FastStream(broker, lifespan=lifespan)
    return app


async def _exit_on_failure(life: Lifetime, app: FastStream) -> None:
    await life.failure()
    app.exit()
