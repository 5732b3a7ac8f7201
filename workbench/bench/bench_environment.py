"""Environment of a benchmark over Kafka: a broker, topics with their own prefix, child processes.

The broker is the given one, or a JVM with all JIT tiers: a JVM configured to start quickly is half
as fast, and everything compared with it would look good. Child processes end with the process
that started them (`streams/brokers/watchdog.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvlane.app.local.deployment import DeploymentPart
from kvlane.app.local.processes import ManagedProcess, free_port, launch, process_command
from kvlane.app.operator_error import OperatorError
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker, BrokerChoice, JvmBroker, obtain_broker
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.clock import Clock, SystemClock, retry_while_unavailable
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import EngineConfig, WorkerCard
from kvlane.streams.topics import ASSIGNMENTS, REGISTRY, partition_of
from workbench.bench.process_group import ProcessGroup

READY_TIMEOUT_S = 60.0
"""Start timeout of a process; imports take five seconds on a machine with one idle core."""
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1

PrintLine = Callable[[str], None]


class BenchFailed(OperatorError):
    """A benchmark cannot be finished: the message has the reason."""


class MeasuredGateway(NamedTuple):
    """A gateway process and its port."""

    process: ManagedProcess
    port: int


class BenchEnvironment:
    """A broker, a connection to it, and the child processes of one benchmark."""

    def __init__(
        self, settings: Settings, guard: ProcessGuard, log: KafkaLog, clock: Clock, broker: Broker
    ) -> None:
        self.settings = settings
        self.log = log
        self.broker = broker
        self.clock = clock
        self.publisher = RecordPublisher(log, clock)
        self._guard = guard
        self._children: list[ManagedProcess] = []
        self._deployments: list[ProcessGroup] = []

    @property
    def output_folder(self) -> Path:
        """The folder of the output files; it is deleted at the end."""
        return self._guard.directory

    def launch(self, name: str, *arguments: str, **changes: object) -> ManagedProcess:
        """Start `python -m ARGUMENTS`, with `changes` to the settings for this process only."""
        output = self.output_folder / f"{name}.log"
        child = launch(self._guard, name, arguments, self._common_settings() | changes, output)
        self._children.append(child)
        return child

    def deployment(
        self, parts: Iterable[DeploymentPart], changes: Mapping[str, object]
    ) -> ProcessGroup:
        """Processes of a deployment that are not started yet; the environment ends them."""
        settings = {**self._common_settings(), **changes}
        made = ProcessGroup(parts, settings, self._guard, self.clock)
        self._deployments.append(made)
        return made

    def _common_settings(self) -> dict[str, object]:
        names = (
            "bootstrap_servers", "topic_prefix", "lanes", "replication_factor",
            "min_insync_replicas",
        )  # fmt: skip
        common = {name: getattr(self.settings, name) for name in names}
        return {**common, "log_level": "INFO"}  # of the line that reports readiness

    async def start_gateway(
        self, model: str, context_length: int, **changes: object
    ) -> MeasuredGateway:
        """A gateway that listens and a worker card of the model, without a router."""
        port = free_port()
        process = self.launch("gateway", *process_command("gateway"), http_port=port, **changes)
        config = EngineConfig(model=model, context_length=context_length)
        await self.register_worker("bench-1", config)
        await self.wait_ready(process)
        return MeasuredGateway(process, port)

    async def start_feeder(self, *pace: object) -> ManagedProcess:
        """A worker without an engine that is ready: `workbench/bench/streaming/token_feeder.py`."""
        feeder = self.launch("feeder", "workbench.bench.streaming.token_feeder", *map(str, pace))
        await self.wait_until(lambda: "ready" in feeder.output, feeder)
        return feeder

    async def wait_ready(
        self, process: ManagedProcess, timeout_s: float = READY_TIMEOUT_S, poll_s: float = POLL_S
    ) -> None:
        """Wait until a process has started. Raises BenchFailed, DeploymentFailed."""
        await self.wait_until(lambda: process.has_started, process, timeout_s, poll_s)

    async def wait_until(
        self,
        condition: Callable[[], bool],
        process: ManagedProcess,
        timeout_s: float = READY_TIMEOUT_S,
        poll_s: float = POLL_S,
    ) -> None:
        """Wait for a condition that a process brings about.

        Raises BenchFailed, DeploymentFailed.
        """
        deadline = self.clock.now() + timeout_s
        while not condition():
            process.check()
            if self.clock.now() > deadline:
                raise BenchFailed(f"{process.name} was not ready within {timeout_s:g} s")
            await self.clock.sleep(poll_s)

    async def register_worker(
        self, name: str, config: EngineConfig, busy_prefill_tokens: int | None = None
    ) -> WorkerCard:
        """Register a worker as workers do: the card is written twice, first without an epoch."""
        slots = await self.log.partitions(ASSIGNMENTS)
        card = WorkerCard(
            id=name, slot=partition_of(name.encode(), slots), model=config.model, config=config,
            busy_prefill_tokens=busy_prefill_tokens,
        )  # fmt: skip
        first = await self.publisher.publish(REGISTRY, f"worker/{name}", card)
        card = msgspec.structs.replace(card, epoch=first.offset)
        await self.publisher.publish(REGISTRY, f"worker/{name}", card)
        return card

    def stop_process(self, process: ManagedProcess) -> None:
        self._children.remove(process)
        process.stop(STOP_TIMEOUT_S)

    async def stop_all(self) -> None:
        for deployment in self._deployments:
            await deployment.stop(within_s=STOP_TIMEOUT_S)
        for child in self._children:
            child.terminate()
        while self._children:
            self._children.pop().stop(STOP_TIMEOUT_S)


@asynccontextmanager
async def bench_environment(
    settings: Settings, log_line: PrintLine, *, brokers: int = 0, links: int = 0
) -> AsyncIterator[BenchEnvironment]:
    """Set up a broker, topics and a connection; only topics on a given broker remain afterwards.

    With `brokers`, a cluster of that size is started for fault injection, with a replica of every
    partition on each broker. Its brokers restart often, and all JIT tiers would take two cores.
    `links`: processes whose connections to the cluster pass through proxies (`broker_links.py`).
    Raises BrokerUnavailable when no broker can be started.
    """
    clock = SystemClock()
    # Else each process compiles all kernels when it starts, and is not ready in time.
    await asyncio.to_thread(
        subprocess.run,
        (sys.executable, "-m", "kvlane.indexer.precompile"),
        check=True,
        stdout=subprocess.PIPE,
    )
    given = "" if brokers else settings.bootstrap_servers
    if brokers:
        cluster = JvmBroker(brokers=brokers, links=links, report=log_line)
        broker: Broker = await asyncio.to_thread(cluster.start)
    else:
        choice: BrokerChoice = "env" if given else "jvm"
        broker = await asyncio.to_thread(
            obtain_broker, choice, bootstrap_servers=given, full_jit=True, report=log_line
        )
    if brokers:
        copies = {"replication_factor": brokers, "min_insync_replicas": max(1, brokers - 1)}
        settings = settings.model_copy(update=copies)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(broker.stop)
        guard = ProcessGuard()
        cleanup.callback(guard.close)
        log_line(f"broker: {broker.description}")
        settings = settings.model_copy(
            update={
                "bootstrap_servers": broker.bootstrap_servers,
                "topic_prefix": f"{settings.topic_prefix}bench-{uuid.uuid4().hex[:8]}.",
            }
        )
        log = open_log(settings, "bench")
        await log.start()
        on = BenchEnvironment(settings, guard, log, clock, broker)
        try:
            await retry_while_unavailable(  # the replicas of a new cluster may join late
                clock,
                lambda: create_topics(log, **settings.topic_options()),
                until=clock.now() + READY_TIMEOUT_S,
            )
            yield on
        finally:
            await on.stop_all()
            await log.close()
