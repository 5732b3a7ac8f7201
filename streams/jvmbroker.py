"""Real Kafka brokers without Docker: one JVM each, on loopback, with data that disappears.

Every node is broker and controller at once, so that a cluster of three outlives the loss of any
one. Nodes can be killed, paused, resumed and started again for fault tests. The first start on a
machine fetches the jars and prepares quick starts (`javaruntime`); later ones take a second or two.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from streams.broker import LOOPBACK, Broker, Report, ask, free_ports
from streams.brokersettings import LOGGING, SMALL, properties, replication
from streams.errors import BrokerUnavailable
from streams.javaruntime import (
    FULL_JIT,
    KAFKA_VERSION,
    QUICK_START,
    build_once,
    cache_directory,
    check_java_version,
    jars,
    java,
    java_command,
)
from streams.watchdog import Guard

START_DEADLINE_S = 90.0
"""A warm start takes 1 to 5 s; a busy machine has taken 17 for a cluster."""
_TAIL_BYTES = 3000


class _PortTaken(BrokerUnavailable):
    """Somebody bound the port between our look and the broker's start."""


class Node:
    """One broker process. `start` after `kill` or `stop` uses the same data and ports again.

    `number` is the broker's id in the cluster, from 1. All calls block; from an event loop, use
    `asyncio.to_thread`.
    """

    def __init__(
        self, number: int, directory: Path, port: int, settings: dict[str, str], jvm: Sequence[str]
    ) -> None:
        self.number = number
        self.port = port
        self.bootstrap_servers = f"{LOOPBACK}:{port}"
        self._directory = directory
        self._settings = settings
        self._jvm = jvm
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """The process exists; it may be paused."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id. Raises BrokerUnavailable when it was never started."""
        if self._process is None:
            raise BrokerUnavailable(f"broker {self.number} was not started")
        return self._process.pid

    def spawn(self) -> None:
        """Start the process without waiting for it. It must not be alive."""
        assert not self.alive
        logs = self._directory / "logs"
        for directory in (logs, self._directory / "tmp"):
            directory.mkdir(parents=True, exist_ok=True)
        logging = self._directory / "log4j2.properties"
        logging.write_text(LOGGING)
        config = self._directory / "server.properties"
        config.write_text(properties(self._settings))
        jvm = (
            *self._jvm,
            f"-Dkafka.logs.dir={logs}",
            f"-Dlog4j2.configurationFile={logging}",
            f"-Djava.io.tmpdir={self._directory / 'tmp'}",  # unpacked native libraries
        )
        with (logs / "output.log").open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own Java
                java_command("kafka.Kafka", [str(config)], jvm),
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the owner
            )

    def wait_ready(self, brokers: int = 1, deadline_s: float = START_DEADLINE_S) -> None:
        """Wait until it serves clients and knows of that many brokers. Raises BrokerUnavailable."""
        deadline = time.monotonic() + deadline_s
        while True:
            answer = ask(LOOPBACK, self.port)
            self.check()
            if answer and answer.brokers >= brokers and answer.controller >= 0:
                return
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"broker {self.number} is not ready after {deadline_s:.0f} s:\n{self.tail()}"
                )
            time.sleep(0.02)

    def start(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Start the process and wait until it serves clients. Raises BrokerUnavailable."""
        self.spawn()
        self.wait_ready(deadline_s=deadline_s)

    def check(self) -> None:
        """Raise BrokerUnavailable, with the end of the log, when the process has ended."""
        if self._process is None or self._process.poll() is None:
            return
        tail = self.tail()
        if "Address already in use" in tail:
            raise _PortTaken(
                f"port {self.port} or the controller's is taken; choose another one, or end what "
                f"listens there (ss -ltnp):\n{tail}"
            )
        raise BrokerUnavailable(
            f"broker {self.number} ended with status {self._process.returncode}:\n{tail}"
        )

    def kill(self) -> None:
        """SIGKILL, as a machine that loses its power; wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def stop(self, deadline_s: float = 30.0) -> int:
        """SIGTERM, then SIGKILL at the deadline; the exit status.

        Not for all nodes of a cluster at once: an orderly end waits for a quorum that is gone.
        """
        if self._process is None:
            return 0
        self._process.terminate()
        self.resume()
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: it hangs, and its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT, after `pause`; harmless otherwise."""
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def tail(self) -> str:
        """The end of what the broker wrote, for people."""
        written = []
        for name in ("output.log", "server.log"):
            log = self._directory / "logs" / name
            if log.exists():
                written.append(log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace"))
        return "\n".join(written).strip()


class JvmBroker(Broker):
    """One broker, or `brokers` of them as one cluster with a copy of everything on each.

    `nodes` are the running processes, in the order of their ids. `port` is the port of the first
    one, 0 for any. `full_jit` gives the JVM its whole compiler and more heap, for measurements;
    without it, it starts sooner and is half as quick.
    """

    kind = "jvm"

    def __init__(
        self, *, brokers: int = 1, port: int = 0, full_jit: bool = False, report: Report
    ) -> None:
        self.version = KAFKA_VERSION
        self.bootstrap_servers = ""
        self.nodes: tuple[Node, ...] = ()
        self.directory: Path | None = None
        many = f"{brokers} brokers in local JVMs" if brokers > 1 else "one broker in a local JVM"
        self.description = f"Kafka {KAFKA_VERSION}, {many} on loopback"
        self._brokers = brokers
        self._port = port
        self._jvm = FULL_JIT if full_jit else QUICK_START
        self._report = report
        self._guard: Guard | None = None

    def start(self) -> Self:
        """See `Broker`. The first time on a machine, fetches the jars and prepares quick starts."""
        if self._guard is not None:
            return self
        prepared = prepare(self._report)
        for last_try in (False, False, True):
            try:
                self._start(prepared)
            except _PortTaken:
                self.stop()
                if last_try or self._port:
                    raise
            except BaseException:
                self.stop()
                raise
            else:
                break
        return self

    def _start(self, prepared: Path) -> None:
        self._guard = Guard()
        self.directory = self._guard.directory
        ports = free_ports(2 * self._brokers)
        client_ports, controller_ports = ports[: self._brokers], ports[self._brokers :]
        if self._port:
            client_ports[0] = self._port
        archive = prepared / "classes.jsa"
        jvm = [*self._jvm, self._guard.mark]
        if archive.exists():
            jvm.append(f"-XX:SharedArchiveFile={archive}")
        cluster_id = _random_id()
        nodes = []
        for number, port in enumerate(client_ports, start=1):
            directory = self.directory / f"node{number}"
            _copy_formatted(prepared / "formatted", directory / "data", number, cluster_id)
            settings = node_settings(number, directory / "data", port, controller_ports)
            nodes.append(Node(number, directory, port, settings, jvm))
        self.nodes = tuple(nodes)
        for node in self.nodes:
            node.spawn()
        for node in self.nodes:
            node.wait_ready(self._brokers)
        self.bootstrap_servers = ",".join(node.bootstrap_servers for node in self.nodes)

    def node(self, number: int) -> Node:
        """The broker with this id, from 1."""
        return self.nodes[number - 1]

    def check(self) -> None:
        """See `Broker`. A node that was killed on purpose counts as ended."""
        if not self.nodes:
            raise BrokerUnavailable("the broker was not started")
        for node in self.nodes:
            node.check()

    def stop(self) -> None:
        """See `Broker`. The data goes too, so there is nothing to end in order: they are killed."""
        for node in self.nodes:
            node.kill()
        if self._guard is not None:
            self._guard.close()
        self._guard = None
        self.nodes = ()
        self.bootstrap_servers = ""
        self.directory = None


def node_settings(
    number: int, data: Path, port: int, controller_ports: Sequence[int]
) -> dict[str, str]:
    """The server.properties of one node of a cluster with that many controllers."""
    client = f"PLAINTEXT://{LOOPBACK}:{port}"
    voters = (f"{n}@{LOOPBACK}:{p}" for n, p in enumerate(controller_ports, start=1))
    return {
        **SMALL,
        **replication(len(controller_ports)),
        "process.roles": "broker,controller",
        "node.id": str(number),
        "log.dirs": str(data),
        "listeners": f"{client},CONTROLLER://{LOOPBACK}:{controller_ports[number - 1]}",
        "advertised.listeners": client,
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "controller.quorum.voters": ",".join(voters),
    }


def prepare(report: Report) -> Path:
    """The directory with what makes starts quick, made when absent. Raises BrokerUnavailable.

    Formatting a data directory and loading the broker's classes cost a JVM two to three seconds at
    every start; both come out the same, so they are kept.
    """
    key = hashlib.sha256(f"{java()} {java().stat().st_mtime_ns}".encode()).hexdigest()[:8]
    fetched = jars(report)
    return build_once(
        cache_directory() / f"{fetched.name}-start-{key}",
        lambda guard: _prepare(guard, report),
        report,
    )


def _prepare(guard: Guard, report: Report) -> Path:
    check_java_version()
    report("preparing quick starts of the broker: 5 to 15 s, only this once")
    prepared = guard.directory / "prepared"
    formatted = prepared / "formatted"
    port, controller_port = free_ports(2)
    jvm = [*QUICK_START, guard.mark]
    if (java().parents[1] / "lib" / "server" / "classes.jsa").exists():
        jvm.append(f"-XX:ArchiveClassesAtExit={prepared / 'classes.jsa'}")
    else:
        report(f"{java()} has no class data archive to build on: starts take 3 s instead of 1")
    settings = node_settings(1, formatted, port, [controller_port])
    _format(guard, settings)
    trial = guard.directory / "trial"
    shutil.copytree(formatted, trial / "data")
    node = Node(1, trial, port, settings | {"log.dirs": str(trial / "data")}, jvm)
    node.start()
    node.stop()  # in order: the archive is written at the end
    return prepared


def _format(guard: Guard, settings: dict[str, str]) -> None:
    config = guard.directory / "format.properties"
    config.write_text(properties(settings))
    command = java_command(
        "kafka.tools.StorageTool",
        ["format", "--cluster-id", _random_id(), "--config", str(config)],
        [*QUICK_START, guard.mark],
    )
    done = subprocess.run(  # noqa: S603 - the user's own Java
        command, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False
    )
    if done.returncode:
        raise BrokerUnavailable(f"Kafka could not format its data:\n{done.stdout}{done.stderr}")


def _copy_formatted(formatted: Path, data: Path, number: int, cluster_id: str) -> None:
    """With the voters given by configuration, only these three lines belong to one node.

    The cluster's id is new for every broker: one that gets a port that another one had before can
    then never take part in the other's quorum.
    """
    shutil.copytree(formatted, data)
    own = {"node.id": str(number), "directory.id": _random_id(), "cluster.id": cluster_id}
    meta = data / "meta.properties"
    text = meta.read_text()
    for name, value in own.items():
        text = re.sub(rf"(?m)^{re.escape(name)}=.*$", f"{name}={value}", text)
    meta.write_text(text)


def _random_id() -> str:
    """A Kafka uuid. It must not start with "-", which its tools take for an option."""
    return "k" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:21] + "A"
