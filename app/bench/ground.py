"""What benchmarks over Kafka stand on: a broker, topics of their own, processes, their CPU time.

The broker is the one that is given, or a JVM with its whole compiler: one that starts quickly is
half as fast, and would make everything beside it look good. Topics have a prefix of their own.
Whatever is started ends with the process that started it (`streams/brokers/watchdog.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from app.settings import Settings, variable
from streams import provision
from streams.brokers.local import Broker, obtain
from streams.brokers.watchdog import Guard
from streams.clock import Clock, SystemClock
from streams.kafka.log import KafkaLog
from streams.outbox import Outbox
from streams.records import EngineConfig, WorkerCard
from streams.topics import ASSIGNMENTS, REGISTRY, partition_of

READY_S = 60.0
"""What a process gets to be ready: imports, on a machine with one idle core, take five seconds."""
STOP_S = 10.0
TAIL_LINES = 15

Said = Callable[[str], None]


class BenchFailed(Exception):
    """A part of a benchmark ended by itself, or was never ready; the message has its last lines."""


class Child:
    """A process that is measured."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], output: Path) -> None:
        self.name = name
        self._process = process
        self._output = output

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """The CPU time it has used, all threads, in seconds; Linux counts it in 10 ms.

        nan where /proc does not tell.
        """
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text("ascii")
        except OSError:
            return float("nan")
        fields = stat.rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def rss_bytes(self) -> int:
        """The memory it has in use now; 0 where /proc does not tell, or when it has ended."""
        try:
            pages = Path(f"/proc/{self._process.pid}/statm").read_text("ascii").split()
        except OSError:
            return 0
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0

    @property
    def output(self) -> str:
        """Everything that it wrote."""
        return self._output.read_text("utf-8", errors="replace")

    def check(self) -> None:
        """Raises BenchFailed when it has ended."""
        if (status := self._process.poll()) is not None:
            tail = "\n".join(self.output.splitlines()[-TAIL_LINES:])
            raise BenchFailed(f"{self.name} ended with status {status}:\n{tail}")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: it does nothing any more, and its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self._process.terminate()

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        self._process.terminate()
        self.resume()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Ground:
    """A broker, a connection to it, and the processes of one benchmark."""

    def __init__(
        self, settings: Settings, guard: Guard, log: KafkaLog, clock: Clock, broker: Broker
    ) -> None:
        self.settings = settings
        self.log = log
        self.broker = broker
        self.clock = clock
        self.outbox = Outbox(log, clock)
        self._guard = guard
        self._children: list[Child] = []

    @property
    def logs(self) -> Path:
        """Where the children write, until all is over."""
        return self._guard.directory

    def launch(self, name: str, *arguments: str, **changes: object) -> Child:
        """Start `python -m ARGUMENTS`; `changes` to the settings hold for it alone."""
        values = {
            "bootstrap_servers": self.settings.bootstrap_servers,
            "topic_prefix": self.settings.topic_prefix,
            "lanes": self.settings.lanes,
            "replication": self.settings.replication,
            "min_insync": self.settings.min_insync,
            **changes,
        }
        environment = {variable(key): str(value) for key, value in values.items()}
        output = self._guard.directory / f"{name}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-X", self._guard.mark, "-m", *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(child := Child(name, process, output))
        return child

    async def until(self, condition: Callable[[], bool], child: Child) -> None:
        """Wait for a child to come so far. Raises BenchFailed."""
        deadline = self.clock.now() + READY_S
        while not condition():
            child.check()
            if self.clock.now() > deadline:
                raise BenchFailed(f"{child.name} was not ready within {READY_S:g} s")
            await self.clock.sleep(0.1)

    async def register(self, name: str, config: EngineConfig) -> WorkerCard:
        """Put the card of a worker into the registry, as workers do it: twice."""
        slots = await self.log.partitions(ASSIGNMENTS)
        card = WorkerCard(
            id=name, slot=partition_of(name.encode(), slots), model=config.model, config=config
        )
        first = await self.outbox.persist(REGISTRY, f"worker/{name}", card)
        card = WorkerCard(
            id=name, slot=card.slot, model=config.model, config=config, epoch=first.offset
        )
        await self.outbox.persist(REGISTRY, f"worker/{name}", card)
        return card

    def end(self, child: Child) -> None:
        """End one of the children."""
        self._children.remove(child)
        child.stop()

    def gone(self, child: Child) -> None:
        """One of the children has ended, as it should."""
        self._children.remove(child)

    def stop(self) -> None:
        """End all children at once."""
        for child in self._children:
            child.terminate()
        while self._children:
            self._children.pop().stop()


@asynccontextmanager
async def ground(settings: Settings, said: Said, *, brokers: int = 0) -> AsyncIterator[Ground]:
    """Set it all up; nothing but the topics of a broker that was given is left afterwards.

    With `brokers` there are so many of our own, to be hurt, with a copy of everything on each. They
    start again and again: the whole compiler would take two cores to itself.
    Raises BrokerUnavailable where no broker can be had.
    """
    clock = SystemClock()
    given = "" if brokers else settings.bootstrap_servers
    broker = await asyncio.to_thread(
        lambda: obtain("env" if given else "jvm", bootstrap_servers=given, brokers=brokers or 1,
                       full_jit=not brokers, report=said)
    )  # fmt: skip
    if brokers:
        copies = {"replication": brokers, "min_insync": max(1, brokers - 1)}
        settings = settings.model_copy(update=copies)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(broker.stop)
        guard = Guard()
        cleanup.callback(guard.close)
        said(f"broker: {broker.description}")
        settings = settings.model_copy(
            update={
                "bootstrap_servers": broker.bootstrap_servers,
                "topic_prefix": f"{settings.topic_prefix}bench-{uuid.uuid4().hex[:8]}.",
            }
        )
        log = KafkaLog(settings.connection("bench"), prefix=settings.topic_prefix)
        await log.start()
        on = Ground(settings, guard, log, clock, broker)
        try:
            await topics(log, settings)
            yield on
        finally:
            on.stop()
            await log.close()


async def topics(log: KafkaLog, settings: Settings) -> None:
    """Make the topics of a deployment."""
    await provision.create(
        log,
        lanes=settings.lanes,
        replication=settings.replication,
        min_insync=settings.min_insync,
    )
