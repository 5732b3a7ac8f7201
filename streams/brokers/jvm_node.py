"""One Kafka broker process on this machine, which can be killed, paused and started again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvlane.streams.brokers.broker import LOG4J_PROPERTIES, LOOPBACK, PortTaken, to_properties
from kvlane.streams.brokers.jvm_artifacts import java_command
from kvlane.streams.brokers.port_probe import query_metadata
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
        """SIGSTOP: it hangs, and its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)

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
