"""Child processes of a deployment on this machine: start, signals, output and HTTP probes.

Each carries the mark of a guard and ends with it (`streams/brokers/watchdog.py`).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import SecretStr

from kvlane.app.operator_error import OperatorError
from kvlane.app.settings import variable_name
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.watchdog import ProcessGuard

TAIL_LINES = 15
READY_LINE = " is ready\n"


class DeploymentFailed(OperatorError):
    """A process does not work; the message has the reason, or its last lines."""


def free_port() -> int:
    """A port of loopback on which nothing listens at this moment."""
    return free_ports(1)[0]


def process_command(kind: str) -> tuple[str, ...]:
    """The module and its arguments that run a process file, as a deployment does."""
    return ("kvlane.app", "run", kind)


class ManagedProcess:
    def __init__(
        self, name: str, process: subprocess.Popen[bytes], output_file: Path, begin: int
    ) -> None:
        """`begin`: the size of the output file before, with the output of earlier processes."""
        self.name = name
        self._process = process
        self._output_file = output_file
        self._begin = begin

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        return self._output_file.read_bytes()[self._begin :].decode(errors="replace")

    @property
    def has_started(self) -> bool:
        return READY_LINE in self.output

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-TAIL_LINES:])

    def check(self) -> None:
        """Raises DeploymentFailed when it has ended."""
        if (status := self.status) is not None:
            raise DeploymentFailed(f"{self.name} ended with status {status}:\n{self.tail}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: it stops running, and its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.terminate()

    def stop(self, timeout_s: float) -> None:
        """SIGTERM and SIGCONT; SIGKILL after the timeout."""
        self.terminate()
        self.resume()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()


def launch(
    guard: ProcessGuard,
    name: str,
    arguments: Sequence[str],
    settings: Mapping[str, object],
    output_file: Path,
    folder: Path | None = None,
) -> ManagedProcess:
    """Start `python -m ARGUMENTS` in a folder, with `settings` by field in its environment."""
    environment = {variable_name(field): _text(value) for field, value in settings.items()}
    with output_file.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            # -X: Python ignores unknown values, and the watchdog finds the mark there
            [sys.executable, "-X", guard.mark, "-m", *arguments],
            env={**os.environ, **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us; the processes end by SIGTERM
        )
    return ManagedProcess(name, process, output_file, begin)


def _text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return json.dumps(value)
    return "" if value is None else str(value)


HTTP_TIMEOUT_S = 2.0
READY_POLL_S = 0.1
"""Time between two looks whether the processes of a deployment are ready."""


class HttpAnswer(NamedTuple):
    """A response: its HTTP status, 0 without an answer, and its body as JSON."""

    status: int
    body: Any


def http_get(url: str) -> HttpAnswer:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S, context=context) as answer:  # noqa: S310 - http
            return HttpAnswer(answer.status, _body(answer.read()))
    except urllib.error.HTTPError as e:
        with e:
            return HttpAnswer(e.code, _body(e.read()))
    except (OSError, http.client.HTTPException):
        return HttpAnswer(0, None)


def _body(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
