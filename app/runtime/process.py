"""The lifecycle of a process: logging, start, supervised background tasks, stop and failure.

An error in a background task ends the process (crash-only: an orchestrator restarts it, and the log
has all its state).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from kvlane.app.runtime import spans
from kvlane.app.runtime.broker_probe import BrokerProbe
from kvlane.streams.clock import Clock, SystemClock
from kvlane.streams.errors import CorrectableError
from kvlane.streams.ports import Log

if TYPE_CHECKING:
    from faststream import FastStream

    from kvlane.app.settings import Settings
    from kvlane.streams.kafka.kafka_log import KafkaLog
    from kvlane.streams.reading.log_broker import LogBroker

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001
"""Switch interval of the interpreter: the default of 5 ms delays the event loop beside threads."""

COLLECTION_THRESHOLD = 30_000
"""Objects that a process makes beyond those that it frees before the youngest are searched for
garbage. Those of requests in flight come and go by the thousand, without circles."""


class ProcessContext:
    def __init__(
        self, name: str, clock: Clock | None = None, rng: random.Random | None = None
    ) -> None:
        self.name = name
        self.clock: Clock = clock or SystemClock()
        self.rng = rng or random.Random()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[BaseException] | None = None
        self.broker_probe: BrokerProbe | None = None

    def start_broker_probe(self, kafka: Log, timeout_s: float) -> BrokerProbe:
        """The broker probe of this process; the first call starts it."""
        if self.broker_probe is None:
            self.broker_probe = BrokerProbe(kafka, self.clock, timeout_s, self.spawn)
            self.spawn("log probe", self.broker_probe.run())
        return self.broker_probe

    @property
    def broker_answers(self) -> bool:
        return self.broker_probe is None or self.broker_probe.is_answering

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` as a background task; an error in it ends the process."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: BaseException) -> None:
        future = self._failed()
        if not future.done():
            if isinstance(error, CorrectableError):
                log.error("%s fails: %s: %s", self.name, type(error).__name__, error)
                if error.correction:
                    log.error("what to do: %s", error.correction)
            else:
                log.error("%s fails: %r", self.name, error, exc_info=error)
            future.set_result(error)

    async def wait_for_failure(self) -> BaseException:
        return await asyncio.shield(self._failed())

    @property
    def error(self) -> BaseException | None:
        future = self._failure
        return future.result() if future is not None and future.done() else None

    async def cancel_tasks(self) -> None:
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


class ProcessLifecycle(Protocol):
    """A kvlane process. Built with its log, settings and lifetime; holds no other resources."""

    async def start(self) -> None:
        """Return when the process is ready to be useful; background work is spawned."""

    async def stop(self) -> None:
        """End in good order, within the grace of the settings. Called at most once, after start."""


async def run_process(
    ctx: ProcessContext,
    start: Callable[[], Coroutine[Any, Any, None]],
    stop: Callable[[], Coroutine[Any, Any, None]],
    stop_requested: asyncio.Event,
) -> None:
    """Run a process until `stop_requested` is set or a task fails. An error in any task ends it at
    once; `stop_requested` interrupts a start; `stop` is called only after a complete start. No task
    is left when this returns. Raises the error."""
    failing = asyncio.ensure_future(ctx.wait_for_failure())
    halt = (failing, asyncio.ensure_future(stop_requested.wait()))
    log.info("%s starts", ctx.name)
    try:
        starting = ctx.spawn("start", start())
        await asyncio.wait((starting, *halt), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not starting.cancelled() and ctx.error is None:
            log.info("%s is ready", ctx.name)
            await asyncio.wait(halt, return_when=asyncio.FIRST_COMPLETED)
            if ctx.error is None:
                log.info("%s stops", ctx.name)
                stopping = ctx.spawn("stop", stop())
                await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in halt:
            task.cancel()
        await ctx.cancel_tasks()
    if ctx.error is not None:
        raise ctx.error


def tune_interpreter() -> None:
    """Tune the interpreter for short pauses, once a process has started: a garbage collection would
    walk all modules now and then, and block the loop."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTION_THRESHOLD, *gc.get_threshold()[1:])
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def open_log(settings: Settings, name: str) -> KafkaLog:
    """A connection to the topics of the settings' deployment, not started. `name`: in its logs."""
    from kvlane.streams.kafka.kafka_log import KafkaLog

    return KafkaLog(settings.kafka_connection(name), prefix=settings.topic_prefix)


class Subscribing(Protocol):
    """A process that reads and writes through a FastStream broker."""

    @property
    def broker(self) -> LogBroker:
        """The broker, which the process itself runs."""


def faststream_app(
    name: str,
    build: Callable[[Log, Settings, ProcessContext], ProcessLifecycle],
    *,
    subscribes: bool = False,
) -> FastStream:
    """The FastStream application of one process, configured from the environment.

    SIGTERM and SIGINT stop the process gracefully, or interrupt its start; an error is logged and
    ends it with code 1. A process that `subscribes` is built at once, and the application is that
    of its broker. Any other has a broker that declares the topics of answers only.
    """
    from faststream import FastStream

    from kvlane.streams.asyncapi import answers_broker, specification
    from kvlane.streams.kafka.provision import check_partitions, watch_topics

    settings = _settings_of_environment(name)
    ctx = ProcessContext(name)
    kafka = open_log(settings, name)
    built = build(kafka, settings, ctx) if subscribes else None
    broker = (
        answers_broker(kafka, settings.topic_prefix, kafka.connection.servers)
        if built is None
        else cast("Subscribing", built).broker
    )

    async def run_to_end(stop_requested: asyncio.Event) -> None:
        async def start() -> None:
            await kafka.start()
            await check_partitions(kafka, settings.lanes, settings.partitions)
            ctx.spawn("topics", watch_topics(kafka, ctx.clock))
            ctx.start_broker_probe(kafka, settings.request_timeout_ms / 1000)
            await process.start()
            tune_interpreter()

        try:
            with spans.exported(settings, name):
                process = built or build(kafka, settings, ctx)
                await run_process(ctx, start, process.stop, stop_requested)
        except Exception as e:
            ctx.fail(e)  # logs the lines that are still queued
            raise
        finally:
            await kafka.close()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        stop_requested = asyncio.Event()
        running = asyncio.create_task(run_to_end(stop_requested), name=name)
        running.add_done_callback(lambda _: app.exit())
        try:
            yield
        finally:
            stop_requested.set()
            try:
                await running
            except Exception as e:  # it was logged
                raise SystemExit(1) from e

    app = FastStream(
        broker,
        lifespan=lifespan,
        specification=specification(),
        logger=None,  # it would report a start that is not complete
    )
    return app


def process_app(
    name: str,
    build: Callable[[Log, Settings, ProcessContext], ProcessLifecycle],
    *,
    subscribes: bool = False,
) -> Callable[[str], FastStream]:
    """The `__getattr__` of a process module: its `app` is made when it is read."""

    def attribute(wanted: str) -> FastStream:
        if wanted == "app":
            return faststream_app(name, build, subscribes=subscribes)
        raise AttributeError(wanted)

    return attribute


def _settings_of_environment(name: str) -> Settings:
    """The settings of a process, with its logging configured by them. Raises SystemExit."""
    from kvlane.app.settings import Settings, SettingsError, unknown_variables

    try:
        settings = Settings()
        settings.require_bootstrap_servers()
    except SettingsError as e:  # there is no log yet
        sys.stderr.write(f"{name} cannot start: {e}\n`kvlane settings` shows all settings.\n")
        raise SystemExit(1) from None
    configure_logging(settings)
    for unknown in unknown_variables(os.environ):
        log.warning("not a setting, ignored: %s", unknown)
    return settings


_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


KAFKA_CLIENT_LOGGER = "aiokafka"
REPEAT_INTERVAL_S = 10.0
REPEAT_BURST = 3
MAX_LINE_KINDS = 1000


class RepeatFilter(logging.Filter):
    """Rate limit of warnings and errors: REPEAT_BURST of a kind, then one every REPEAT_INTERVAL_S,
    with the number of lines left out. A kind is a logger and a message before its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], _RepeatState] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key, now = (record.name, str(record.msg)), record.created
        kind = self._kinds.pop(key, None)
        if kind is None or not now - REPEAT_INTERVAL_S < kind.seen_at <= now:
            kind = _RepeatState(now)
        self._kinds[key] = kind
        if len(self._kinds) > MAX_LINE_KINDS:
            del self._kinds[next(iter(self._kinds))]
        kind.seen_at = now
        if kind.written >= REPEAT_BURST and now < kind.written_at + REPEAT_INTERVAL_S:
            kind.left_out += 1
            return False
        if kind.left_out:
            record.msg = f"{record.msg} (and {kind.left_out} more like this)"
        kind.written, kind.written_at, kind.left_out = kind.written + 1, now, 0
        return True


class _RepeatState:
    __slots__ = ("left_out", "seen_at", "written", "written_at")

    def __init__(self, now: float) -> None:
        self.seen_at = self.written_at = now
        self.written = self.left_out = 0


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(settings: Settings) -> None:
    """Log to stderr, as text or as one JSON object a line; of the Kafka client only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_json else logging.Formatter(_TEXT))
    handler.addFilter(RepeatFilter())
    level = logging.getLevelNamesMapping()[settings.log_level]
    for name in ("kvlane", KAFKA_CLIENT_LOGGER):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(max(level, logging.WARNING) if name == KAFKA_CLIENT_LOGGER else level)
        logger.propagate = False
