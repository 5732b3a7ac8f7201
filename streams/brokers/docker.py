"""One Kafka broker in a container: the official image, or that of deploy/kafka/build-image.sh. Its
`watchdog` removes it: the reaper of testcontainers would be one more image to pull."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from pathlib import Path
from typing import Any, Self

from kvlane.streams.brokers.broker import (
    LOOPBACK,
    SMALL_BROKER,
    Broker,
    KeptData,
    ReportLine,
    free_ports,
    replication_settings,
)
from kvlane.streams.brokers.jvm_artifacts import KAFKA_VERSION
from kvlane.streams.brokers.port_probe import query_metadata
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.errors import NoLocalBroker

OFFICIAL_IMAGE = f"apache/kafka:{KAFKA_VERSION}"
LOCAL_IMAGE = f"kvlane/kafka:{KAFKA_VERSION}"
_START_DEADLINE_S = 45.0
"""A start takes 2 to 3 s, and has taken 13 on a busy machine."""
_DAEMON_DEADLINE_S = 2
_REGISTRY_DEADLINE_S = 5
_PULL_DEADLINE_S = 600.0
_PORT = 9092
_DATA = "/var/lib/kafka/data"
_ADVERTISED = "/tmp/kvlane-advertised"  # noqa: S108 - inside the container
_OWN = "OWN://127.0.0.1:9094"
"""The broker's own address, since the one for clients is outside of the container."""
_SETTINGS = {
    **SMALL_BROKER,
    **replication_settings(1),
    "process.roles": "broker,controller",
    "node.id": "1",
    "listeners": f"PLAINTEXT://0.0.0.0:{_PORT},CONTROLLER://127.0.0.1:9093,{_OWN}",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,OWN:PLAINTEXT",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "OWN",
    "controller.quorum.voters": "1@127.0.0.1:9093",
}
# The address for clients is known only when the container has its port: it waits for a file.
_COMMAND = (
    f"until [ -f {_ADVERTISED} ]; do sleep 0.05; done; "
    f"export KAFKA_ADVERTISED_LISTENERS=$(cat {_ADVERTISED}); exec /etc/kafka/docker/run"
)


class DockerBroker(Broker):
    """One broker in a container, on a port of this machine, 0 for any. Its data disappear with it,
    or are `kept` in a volume with a name made of the folder's."""

    kind = "docker"

    def __init__(
        self,
        *,
        port: int = 0,
        full_jit: bool = False,
        kept: KeptData | None = None,
        report: ReportLine,
    ) -> None:
        self.version = KAFKA_VERSION
        self.bootstrap_servers = ""
        self.image = ""
        self.description = "Kafka in a Docker container"
        self._report = report
        self._port = port
        self._kept = kept
        self._heap = "-Xms256m -Xmx512m" if full_jit else "-Xms64m -Xmx256m"
        self._jvm = "-XX:+UseSerialGC" + ("" if full_jit else " -XX:TieredStopAtLevel=1")
        self._guard: ProcessGuard | None = None
        self._container: Any = None

    def start(self) -> Self:
        """See `Broker`. Raises within two seconds when no daemon answers."""
        if self._guard is not None:
            return self
        self.image = find_image(self._report)
        try:
            self._start()
        except BaseException as error:
            self.stop()
            if isinstance(error, NoLocalBroker) or not isinstance(error, Exception):
                raise
            raise NoLocalBroker(f"Docker could not run {self.image}: {error}") from error
        self.description = f"Kafka {self.version} in a Docker container of {self.image}"
        return self

    def _start(self) -> None:
        from testcontainers.core.config import ConnectionMode, testcontainers_config
        from testcontainers.core.container import DockerContainer

        testcontainers_config.ryuk_disabled = True
        kept = self._kept
        self._guard = (
            ProcessGuard(parent=kept.folder, docker=True, inherited=[kept.lock])
            if kept is not None
            else ProcessGuard(docker=True)
        )
        container = DockerContainer(self.image, entrypoint=["bash", "-c"], labels=self._guard.label)
        container.with_command([_COMMAND])
        for name, value in _SETTINGS.items():
            container.with_env("KAFKA_" + name.upper().replace(".", "_"), value)
        container.with_env("CLUSTER_ID", "4L6g3nShT-eMCtK--X86sw")
        container.with_env("KAFKA_HEAP_OPTS", self._heap)
        container.with_env("KAFKA_JVM_PERFORMANCE_OPTS", self._jvm)
        container.with_exposed_ports(_PORT)
        port = self._port
        if kept is not None:
            container.with_env("KAFKA_LOG_DIRS", _DATA)
            container.with_volume_mapping(volume(kept.folder), _DATA, "rw")
            port = port or free_ports(1)[0]  # a container that is started again keeps a fixed one
        daemon: Any = container.get_docker_client()
        direct = daemon.get_connection_mode() is ConnectionMode.docker_host
        if direct and daemon.host() in ("localhost", LOOPBACK):
            ports: dict[str, Any] = container.ports
            ports[str(_PORT)] = (LOOPBACK, port) if port else (LOOPBACK,)  # not for the network
        elif port:
            container.with_bind_ports(_PORT, port)
        container.start()
        self._container = container
        host, port = container.get_container_host_ip(), int(container.get_exposed_port(_PORT))
        self.bootstrap_servers = f"{host}:{port}"
        advertised = f"PLAINTEXT://{self.bootstrap_servers},{_OWN}\n".encode()
        container.copy_into_container(advertised, _ADVERTISED)
        self._wait_ready(host, port)

    def _wait_ready(self, host: str, port: int) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        while query_metadata(host, port) is None:
            self.check_running()
            if time.monotonic() > deadline:
                raise NoLocalBroker(
                    f"the broker in {self.image} is not ready after {_START_DEADLINE_S:.0f} s:\n"
                    f"{self._tail()}"
                )
            time.sleep(0.1)

    def check_running(self) -> None:
        if self._container is None:
            raise NoLocalBroker("the broker was not started")
        container = self._container.get_wrapped_container()
        try:
            container.reload()
        except Exception as error:
            raise NoLocalBroker(f"the container of {self.image} is gone: {error}") from error
        if container.status != "running":
            raise NoLocalBroker(
                f"the container of {self.image} is {container.status}:\n{self._tail()}"
            )

    def restart(self) -> None:
        try:
            self.check_running()
        except NoLocalBroker:
            try:
                self._container.get_wrapped_container().start()
            except Exception as error:
                raise NoLocalBroker(f"Docker cannot start it again: {error}") from error
        host, _, port = self.bootstrap_servers.rpartition(":")
        self._wait_ready(host, int(port))

    def stop(self) -> None:
        if self._container is not None and self._kept is not None:
            with contextlib.suppress(Exception):  # an orderly end; the guard removes the rest
                self._container.get_wrapped_container().stop(timeout=10)
        if self._container is not None:
            with contextlib.suppress(Exception):  # the guard removes the rest
                self._container.get_docker_client().client.close()
        if self._guard is not None:
            self._guard.close()
        self._container = None
        self._guard = None
        self.bootstrap_servers = ""

    def _tail(self) -> str:
        output, errors = self._container.get_logs()
        return bytes(output + errors)[-3000:].decode(errors="replace")


def volume(folder: Path) -> str:
    return f"kvlane-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def find_image(report: ReportLine) -> str:
    """The image to run: one that is here, or the official one, pulled. Raises NoLocalBroker."""
    daemon = _daemon(_DAEMON_DEADLINE_S)
    with contextlib.closing(daemon):
        for image in (OFFICIAL_IMAGE, LOCAL_IMAGE):
            if daemon.images.list(name=image):
                return image
    try:
        with contextlib.closing(_daemon(_REGISTRY_DEADLINE_S)) as daemon:
            daemon.images.get_registry_data(OFFICIAL_IMAGE)
    except Exception as error:
        raise NoLocalBroker(
            f"Docker has neither {OFFICIAL_IMAGE} nor {LOCAL_IMAGE}, and no "
            f"registry answers within {_REGISTRY_DEADLINE_S} s. "
            "deploy/kafka/build-image.sh builds the latter here."
        ) from error
    report(f"pulling {OFFICIAL_IMAGE}: about 200 MB, usually 10 to 60 s, only this once")
    _pull(OFFICIAL_IMAGE)
    return OFFICIAL_IMAGE


def _daemon(deadline_s: int) -> Any:
    """A client of the Docker daemon that has just answered. Raises NoLocalBroker."""
    try:
        from testcontainers.core.docker_client import DockerClient, get_docker_host
    except ImportError as error:
        raise NoLocalBroker("Docker needs Python's testcontainers package") from error
    host = get_docker_host() or "unix:///var/run/docker.sock"
    try:
        # The client leaves a socket open when it cannot connect, so look before.
        if host.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(deadline_s)
                probe.connect(host.removeprefix("unix://"))
        daemon = DockerClient(timeout=deadline_s).client
        daemon.ping()
    except Exception as error:
        raise NoLocalBroker(f"no Docker daemon answers at {host}: {error}") from error
    return daemon


def _pull(image: str) -> None:
    """Pull in a thread of its own, which is left behind at the deadline: the call has none."""
    failures: list[Exception] = []

    def pull() -> None:
        try:
            with contextlib.closing(_daemon(int(_PULL_DEADLINE_S))) as daemon:
                daemon.images.pull(image)
        except Exception as error:  # noqa: BLE001 - handed to the caller below
            failures.append(error)

    thread = threading.Thread(target=pull, name="pull", daemon=True)
    thread.start()
    thread.join(_PULL_DEADLINE_S)
    if thread.is_alive():
        raise NoLocalBroker(f"pulling {image} took more than {_PULL_DEADLINE_S:.0f} s")
    if failures:
        raise NoLocalBroker(f"could not pull {image}: {failures[0]}") from failures[0]
