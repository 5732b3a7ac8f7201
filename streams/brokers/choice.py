"""What every way of getting a broker has in common.

Owns the `Broker` that callers hold, and the question whether a Kafka listener answers. How a
broker is made is in `localbroker` (the choice), `jvmbroker` and `dockerbroker`.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple, Self

from streams.errors import BrokerUnavailable

Kind = Literal["env", "docker", "jvm", "memory"]
Report = Callable[[str], None]
"""Takes one line for the person who waits."""

LOOPBACK = "127.0.0.1"
_METADATA_V1 = (3, 1)
_NO_TOPICS = 0


class Broker(ABC):
    """A broker, or several as one cluster, that this process started or was told of.

    `description` says in one line what really runs. `version` is Kafka's, "" where unknown.
    `bootstrap_servers` is for clients: host:port, separated by commas.
    """

    kind: Kind
    version: str
    bootstrap_servers: str
    description: str

    @abstractmethod
    def start(self) -> Self:
        """Start, unless it runs, and wait until it answers. Raises BrokerUnavailable."""

    @abstractmethod
    def stop(self) -> None:
        """End it and remove everything it left: processes, containers, data. Idempotent."""

    @abstractmethod
    def check(self) -> None:
        """Raise BrokerUnavailable, with the reason, when it is not running any more."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Listeners(NamedTuple):
    """What one broker says of its cluster: brokers that it knows alive, and a controller's id."""

    brokers: int
    controller: int


def ask(host: str, port: int, timeout_s: float = 2.0) -> Listeners | None:
    """Ask a plaintext listener who is there (Metadata, version 1); None when it does not answer.

    By the protocol and not by a line in a log file: a broker that answers this serves clients.
    """
    request = struct.pack(">hhih6si", *_METADATA_V1, 1, 6, b"kvlane", _NO_TOPICS)
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as answer:
                (size,) = struct.unpack(">i", answer.read(4))
                return _read_metadata(answer.read(size))
    except (OSError, struct.error):
        return None


def _read_metadata(body: bytes) -> Listeners:
    """Of: correlation id, array of (node, host, port, rack), controller, topics."""
    _, brokers = struct.unpack_from(">ii", body)
    at = 8
    for _ in range(brokers):
        at += 4
        at += 2 + _length(body, at)
        at += 4
        at += 2 + _length(body, at)
    (controller,) = struct.unpack_from(">i", body, at)
    return Listeners(brokers, controller)


def _length(body: bytes, at: int) -> int:
    (length,) = struct.unpack_from(">h", body, at)
    return max(0, int(length))


def free_ports(count: int) -> list[int]:
    """Different loopback ports that nothing listens on, from 20000 to 31999.

    Below the range that systems hand out for outgoing connections, so that no connection takes
    the port of a broker while it restarts. Raises BrokerUnavailable when there are too few.
    """
    found: list[int] = []
    candidates = random.sample(range(20_000, 32_000), 2_000)
    for port in candidates:
        if len(found) == count:
            return found
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            found.append(port)
    raise BrokerUnavailable(f"no {count} free ports between 20000 and 31999 on {LOOPBACK}")


class GivenBroker(Broker):
    """Servers that somebody else runs. Nothing is started, and nothing is stopped."""

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
                self.check()
            except BrokerUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return self

    def check(self) -> None:
        """See `Broker`. The listeners may want TLS or SASL, so only the connection is tried."""
        reasons = []
        for server in self.bootstrap_servers.split(","):
            host, _, port = server.strip().rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
            except (OSError, ValueError) as error:
                reasons.append(f"{server.strip()}: {error}")
            else:
                return
        raise BrokerUnavailable("none of the given servers answers: " + "; ".join(reasons))

    def stop(self) -> None:
        """Nothing to do: the servers belong to somebody else."""


class MemoryBroker(Broker):
    """No broker: the log is to be kept in this process (`streams.memory.broker`)."""

    kind = "memory"

    def __init__(self) -> None:
        self.bootstrap_servers = ""
        self.version = ""
        self.description = "in-memory log in this process, gone when it ends"

    def start(self) -> Self:
        """Nothing to start."""
        return self

    def stop(self) -> None:
        """Nothing to stop."""

    def check(self) -> None:
        """Never fails."""
