"""Real Kafka brokers without Docker: one JVM each, on loopback, each broker and controller. The
first start on a machine fetches the jars and prepares quick starts (`java`)."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from kvlane.streams.brokers.broker import (
    LOG4J_PROPERTIES,
    LOOPBACK,
    SMALL_BROKER,
    Broker,
    KeptData,
    PortTaken,
    ReportLine,
    free_ports,
    replication_settings,
    to_properties,
)
from kvlane.streams.brokers.jvm_artifacts import (
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
from kvlane.streams.brokers.port_probe import query_metadata
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.errors import NoLocalBroker

START_DEADLINE_S = 90.0
"""A warm start takes 1 to 5 s; a busy machine has taken 17 for a cluster."""
_TAIL_BYTES = 3000


class LinkPorts(NamedTuple):
    """A listener of a broker, and the port that it advertises, on which a proxy has to listen."""

    broker: int
    proxy: int


class JvmNode:
    """One broker process, with the id `number`, from 1. It keeps data and ports. All calls
    block."""

    def __init__(
        self, number: int, directory: Path, port: int, settings: dict[str, str], jvm: Sequence[str],
        links: Sequence[LinkPorts] = (),
    ) -> None:  # fmt: skip
        self.number = number
        self.links = links
        self.port = port
        self.bootstrap_servers = f"{LOOPBACK}:{port}"
        self._directory = directory
        self._settings = settings
        self._jvm = jvm
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        """The process exists; it may be paused."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id. Raises NoLocalBroker when it was never started."""
        if self._process is None:
            raise NoLocalBroker(f"broker {self.number} was not started")
        return self._process.pid

    def spawn(self) -> None:
        """Start the process without waiting for it. It must not be alive."""
        assert not self.is_alive
        logs = self._directory / "logs"
        for directory in (logs, self._directory / "tmp"):
            directory.mkdir(parents=True, exist_ok=True)
        logging = self._directory / "log4j2.properties"
        logging.write_text(LOG4J_PROPERTIES)
        config = self._directory / "server.properties"
        config.write_text(to_properties(self._settings))
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
        """Wait until it serves clients and reports that many brokers. Raises NoLocalBroker."""
        deadline = time.monotonic() + deadline_s
        while True:
            answer = query_metadata(LOOPBACK, self.port)
            self.check_running()
            if answer and len(answer.brokers) >= brokers and answer.controller_id >= 0:
                return
            if time.monotonic() > deadline:
                raise NoLocalBroker(
                    f"broker {self.number} is not ready after {deadline_s:.0f} "
                    f"s:\n{self.log_tail()}"
                )
            time.sleep(0.02)

    def start(self, deadline_s: float = START_DEADLINE_S) -> None:
        self.spawn()
        self.wait_ready(deadline_s=deadline_s)

    def check_running(self) -> None:
        """Raise NoLocalBroker, with the end of the log, when the process has ended."""
        if self._process is None or self._process.poll() is None:
            return
        tail = self.log_tail()
        if "Address already in use" in tail:
            raise PortTaken(
                f"port {self.port} or the controller's is taken; choose another one, or end the "
                f"process that listens there (ss -ltnp):\n{tail}"
            )
        raise NoLocalBroker(
            f"broker {self.number} ended with status {self._process.returncode}:\n{tail}"
        )

    def kill(self) -> None:
        """SIGKILL, as a machine that loses its power; wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def stop(self, deadline_s: float = 30.0) -> int:
        """SIGTERM, then SIGKILL at the deadline; the exit status. A cluster needs its quorum for
        it."""
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
        """SIGSTOP: it hangs, and its connections stay open. Returns once all its threads stand."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT, after `pause`; harmless otherwise."""
        if self.is_alive:
            os.kill(self.pid, signal.SIGCONT)

    def fill_disk(self) -> None:
        """Let no file of it grow, as on a full disk, until it is started again. Linux only."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0, hard))

    def wait_ended(self, deadline_s: float = 30.0) -> None:
        assert self._process is not None
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise NoLocalBroker(f"broker {self.number} has not ended") from None

    def log_tail(self) -> str:
        written = []
        for name in ("output.log", "server.log"):
            log = self._directory / "logs" / name
            if log.exists():
                written.append(log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace"))
        return "\n".join(written).strip()


NO_CHANGES: Mapping[str, str] = {}
STOP_DEADLINE_S = 10.0
"""After an orderly end the next start reads no log again; it takes a second or two."""


class JvmBroker(Broker):
    """`brokers` brokers as one cluster, with a copy of everything on each; `nodes`: their
    processes.

    `port`: of the first, 0: any. `full_jit`: the JVM's whole compiler, for measurements. `changes`:
    to the settings of all nodes. `links`: number of further listeners of each, for proxies.
    """

    kind = "jvm"

    def __init__(
        self,
        *,
        brokers: int = 1,
        port: int = 0,
        full_jit: bool = False,
        changes: Mapping[str, str] = NO_CHANGES,
        kept: KeptData | None = None,
        links: int = 0,
        report: ReportLine,
    ) -> None:
        self.version = KAFKA_VERSION
        self.bootstrap_servers = ""
        self.nodes: tuple[JvmNode, ...] = ()
        self.directory: Path | None = None
        many = f"{brokers} brokers in local JVMs" if brokers > 1 else "one broker in a local JVM"
        self.description = f"Kafka {KAFKA_VERSION}, {many} on loopback"
        self._brokers = brokers
        self._port = port
        self._jvm = FULL_JIT if full_jit else QUICK_START
        self._changes = changes
        self._kept = kept
        self._links = links
        self._report = report
        self._guard: ProcessGuard | None = None

    def start(self) -> Self:
        """See `Broker`. The first time on a machine, fetches the jars and prepares quick starts."""
        if self._guard is not None:
            return self
        prepared = prepare(self._report)
        for last_try in (False, False, True):
            try:
                self._start(prepared)
            except PortTaken:
                self.stop()
                if last_try or self._port:
                    raise
            except OSError as error:
                self.stop()
                raise NoLocalBroker(f"cannot start a broker: {error}") from error
            except BaseException:
                self.stop()
                raise
            else:
                break
        return self

    def _start(self, prepared: Path) -> None:
        kept = self._kept
        self._guard = (
            ProcessGuard(parent=kept.folder, inherited=[kept.lock])
            if kept is not None
            else ProcessGuard()
        )
        self.directory = self._guard.directory
        data = self.directory if kept is None else kept.folder
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
            own = data / "kafka" / f"node{number}"
            if not own.exists():
                _copy_formatted(prepared / "formatted", own, number, cluster_id)
            settings = node_settings(number, own, port, controller_ports)
            settings |= self._changes
            links = [LinkPorts(*free_ports(2)) for _ in range(self._links)]
            add_links(settings, links)
            nodes.append(JvmNode(number, directory, port, settings, jvm, links))
        self.nodes = tuple(nodes)
        for node in self.nodes:
            node.spawn()
        for node in self.nodes:
            node.wait_ready(self._brokers)
        self.bootstrap_servers = ",".join(node.bootstrap_servers for node in self.nodes)

    def node(self, number: int) -> JvmNode:
        return self.nodes[number - 1]

    def check_running(self) -> None:
        """See `Broker`. A node that was killed on purpose counts as ended."""
        if not self.nodes:
            raise NoLocalBroker("the broker was not started")
        for node in self.nodes:
            node.check_running()

    def restart(self) -> None:
        """See `Broker`. A node that was killed on purpose is started, too."""
        for node in self.nodes:
            if not node.is_alive:
                node.start()

    def stop(self) -> None:
        """See `Broker`. In order only one node with kept data: several wait for a quorum that is
        gone."""
        try:
            if self._kept is not None and len(self.nodes) == 1:
                self.nodes[0].stop(STOP_DEADLINE_S)
            for node in self.nodes:
                node.kill()
        finally:
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
        **SMALL_BROKER,
        **replication_settings(len(controller_ports)),
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


def add_links(settings: dict[str, str], links: Sequence[LinkPorts]) -> None:
    """Add a listener for each link, whose clients are sent to the port of its proxy."""
    for number, link in enumerate(links):
        name = f"LINK{number}"
        settings["listeners"] += f",{name}://{LOOPBACK}:{link.broker}"
        settings["advertised.listeners"] += f",{name}://{LOOPBACK}:{link.proxy}"
        settings["listener.security.protocol.map"] += f",{name}:PLAINTEXT"


def prepare(report: ReportLine) -> Path:
    """The directory with the files for quick starts, made when absent. Raises NoLocalBroker."""
    key = hashlib.sha256(f"{java()} {java().stat().st_mtime_ns}".encode()).hexdigest()[:8]
    fetched = jars(report)
    return build_once(
        cache_directory() / f"{fetched.name}-start-{key}",
        lambda guard: _prepare(guard, report),
        report,
    )


def _prepare(guard: ProcessGuard, report: ReportLine) -> Path:
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
    node = JvmNode(1, trial, port, settings | {"log.dirs": str(trial / "data")}, jvm)
    node.start()
    node.stop()  # in order: the archive is written at the end
    return prepared


def _format(guard: ProcessGuard, settings: dict[str, str]) -> None:
    config = guard.directory / "format.properties"
    config.write_text(to_properties(settings))
    command = java_command(
        "kafka.tools.StorageTool",
        ["format", "--cluster-id", _random_id(), "--config", str(config)],
        [*QUICK_START, guard.mark],
    )
    done = subprocess.run(  # noqa: S603 - the user's own Java
        command, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False
    )
    if done.returncode:
        raise NoLocalBroker(f"Kafka could not format its data:\n{done.stdout}{done.stderr}")


def _copy_formatted(formatted: Path, data: Path, number: int, cluster_id: str) -> None:
    """Copy a formatted data directory, with a new id of the cluster: no broker joins another
    quorum."""
    copy = data.with_name(f"{data.name}.new")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(formatted, copy)
    own = {"node.id": str(number), "directory.id": _random_id(), "cluster.id": cluster_id}
    meta = copy / "meta.properties"
    text = meta.read_text()
    for name, value in own.items():
        text = re.sub(rf"(?m)^{re.escape(name)}=.*$", f"{name}={value}", text)
    meta.write_text(text)
    copy.rename(data)


def _random_id() -> str:
    """A Kafka uuid. It must not start with "-", which its tools take for an option."""
    return "k" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:21] + "A"
