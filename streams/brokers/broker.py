"""The interface of a broker that tests and demos use, however it was started.

Brokers are started by `jvm` and `docker`; `broker_factory` chooses between them.
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
    """Data that outlive their broker, in `folder`.

    `lock`: descriptor of a locked file that watchdogs inherit, so that it is free when the broker
    and all of its processes have ended.
    """

    folder: Path
    lock: int


class PortTaken(NoLocalBroker):
    """The port of a broker is in use."""

    correction = "Choose another port, or end the process that listens there (`ss -ltnp` lists it)."


class Broker(ABC):
    """A broker, or several as one cluster, that this process started or was given.

    `description` names the running broker in one line. `version` is Kafka's, "" where unknown.
    `bootstrap_servers` is for clients: host:port, separated by commas.
    """

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
        """Restart a dead broker with the same data and ports. Raises NoLocalBroker. Blocks until it
        answers. A given broker is only probed."""

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
    """Different free loopback ports from 20000 to 31999; none twice within `MAX_REMEMBERED_PORTS`.

    Systems hand out higher ports for outgoing connections, which could take the port of a broker
    while it restarts. Raises NoLocalBroker when there are too few.
    """
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
