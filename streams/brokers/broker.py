"""The interface of a broker that tests and demos use, and the settings of those that kvlane starts.

Settings for a small broker that starts, detects lost members and deletes old data quickly, not for
production. Every value that differs from Kafka's default has its reason next to it.
"""

from __future__ import annotations

import random
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from kvlane.streams.errors import BrokerUnavailable, NoLocalBroker

Kind = Literal["env", "docker", "jvm", "memory"]
BrokerChoice = Literal["auto"] | Kind
"""The kind that a user chooses; "auto": the first that starts."""
ReportLine = Callable[[str], None]
"""Called with one line of progress for the user."""

LOOPBACK = "127.0.0.1"


class KeptData(NamedTuple):
    """Data in `folder` that outlive their broker. `lock`: descriptor of a locked file, inherited by
    watchdogs: free when the broker and all of its processes have ended."""

    folder: Path
    lock: int


class PortTaken(NoLocalBroker):
    correction = "Choose another port, or end the process that listens there (`ss -ltnp` lists it)."


class Broker(ABC):
    """A broker, or several as one cluster, that this process started or was given. `version`:
    Kafka's, "" where unknown. `bootstrap_servers`: host:port, separated by commas."""

    kind: Kind
    version: str
    bootstrap_servers: str
    description: str

    @abstractmethod
    def start(self) -> Self:
        """Start, unless it runs, and wait until it answers. Raises NoLocalBroker."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it and remove its processes, containers and data. Idempotent."""

    @abstractmethod
    def check_running(self) -> None:
        """Raise NoLocalBroker, with the reason, if it is not running."""

    @abstractmethod
    def restart(self) -> None:
        """Restart a dead broker with the same data and ports. Raises NoLocalBroker. Blocks."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


MAX_REMEMBERED_PORTS = 1_000
_given_ports: deque[int] = deque(maxlen=MAX_REMEMBERED_PORTS)


def free_ports(count: int) -> list[int]:
    """Different free loopback ports from 20000 to 31999, below those for outgoing connections; none
    twice within `MAX_REMEMBERED_PORTS`. Raises NoLocalBroker when there are too few."""
    found: list[int] = []
    candidates = random.SystemRandom().sample(range(20_000, 32_000), 2_000)
    for port in candidates:
        if len(found) == count:
            break
        if port in _given_ports:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            found.append(port)
    if len(found) == count:
        _given_ports.extend(found)
        return found
    raise NoLocalBroker(f"no {count} free ports between 20000 and 31999 on {LOOPBACK}")


class ExternalBroker(Broker):
    """External servers. Nothing is started or stopped."""

    kind = "env"

    def __init__(self, bootstrap_servers: str, *, deadline_s: float = 5.0) -> None:
        if not bootstrap_servers:
            raise BrokerUnavailable("no servers are given: set KVLANE_BOOTSTRAP_SERVERS=host:port")
        self.bootstrap_servers = bootstrap_servers
        self.version = ""
        self.description = f"given servers {bootstrap_servers}"
        self._deadline_s = deadline_s

    def start(self) -> Self:
        """Wait until one of the servers takes connections. Raises BrokerUnavailable."""
        deadline = time.monotonic() + self._deadline_s
        while True:
            try:
                self.check_running()
            except BrokerUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return self

    def check_running(self) -> None:
        """See `Broker`. The listeners may require TLS or SASL, so only the connection is tried."""
        reasons = []
        for server in self.bootstrap_servers.split(","):
            host, _, port = server.strip().rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
            except (OSError, ValueError) as error:
                reasons.append(f"{server.strip()}: {error}")
            else:
                return
        raise BrokerUnavailable(
            f"none of the given servers answers: {'; '.join(reasons)}",
            correction="Check KVLANE_BOOTSTRAP_SERVERS, and whether Kafka runs. Without this "
            "variable, `kvlane up` and `kvlane demo` start a broker of their own.",
        )

    def restart(self) -> None:
        self.check_running()

    def stop(self) -> None:
        """Nothing to do: the servers are external."""


class NoBroker(Broker):
    """No broker: the log is to be kept in this process (`kvlane.streams.memory.memory_broker`)."""

    kind = "memory"

    def __init__(self) -> None:
        self.bootstrap_servers = ""
        self.version = ""
        self.description = "in-memory log in this process, gone when it ends"

    def start(self) -> Self:
        return self

    def stop(self) -> None:
        """Nothing to stop."""

    def check_running(self) -> None:
        """Never fails."""

    def restart(self) -> None:
        """Nothing to start."""


SMALL_BROKER: dict[str, str] = {
    # Topics are made by kvlane, with the partitions and retention of its table, or not at all.
    "auto.create.topics.enable": "false",
    # 128 MiB of heap by default, more than half of what the whole broker gets here.
    "log.cleaner.dedupe.buffer.size": "4194304",
    "log.cleaner.io.buffer.size": "65536",
    # 50 partitions each by default, every one with its files.
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "log.index.size.max.bytes": "1048576",
    "log.segment.bytes": "67108864",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "num.recovery.threads.per.data.dir": "1",
    # Compaction and retention run often and from the start (defaults: 15 s, 5 min, 30 s).
    "log.cleaner.backoff.ms": "1000",
    "log.retention.check.interval.ms": "5000",
    "log.initial.task.delay.ms": "500",
    # After kill -9 a broker can come back only when its old session has ended (default 9 s).
    # Below a second, a busy machine with two cores fences brokers that are merely slow.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    # A group waits 3 s for more members by default, and takes 6 s at least to notice a death.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.session.timeout.ms": "3000",
    "group.consumer.session.timeout.ms": "6000",
}


def replication_settings(brokers: int) -> dict[str, str]:
    """Copies on every broker, and one of them may be missing, as in production."""
    copies, in_sync = str(brokers), str(max(1, brokers - 1))
    settings = {
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync,
    }
    if brokers == 1:
        return settings
    return settings | {
        # How long a slow follower holds acknowledgements back (default 30 s).
        "replica.lag.time.max.ms": "3000",
        # Leaders go back to a restarted broker (default: looked at every 300 s).
        "leader.imbalance.check.interval.seconds": "5",
        # A new controller after 4 s instead of 5 when the active one is killed.
        "controller.quorum.fetch.timeout.ms": "1000",
        "controller.quorum.election.timeout.ms": "500",
        "controller.quorum.election.backoff.max.ms": "500",
    }


def to_properties(settings: dict[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())


LOG4J_PROPERTIES = """\
status=warn
appender.file.type=File
appender.file.name=FILE
appender.file.fileName=${sys:kafka.logs.dir}/server.log
appender.file.layout.type=PatternLayout
appender.file.layout.pattern=[%d] %p %m (%c)%n
rootLogger.level=info
rootLogger.appenderRef.file.ref=FILE
"""
"""log4j2 configuration of a broker: everything into one file beside its data."""
