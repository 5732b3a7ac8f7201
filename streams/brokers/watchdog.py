"""A watchdog process that removes processes, containers and files when their owner is gone.

When the owner of a `ProcessGuard` ends in any way, a pipe closes, and the watchdog kills the
processes with the guard's mark on their command line, removes the containers with its label, and
deletes its directory. By marks, since an owner may be killed before it records an id. Started as a
script: it must not import the rest of the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

MARK = "-Dkvlane.guard="
"""Start of the argument that marks a process; a system property, since the processes are JVMs."""
LABEL = "kvlane.guard"
"""Label of containers; its value is the name of the guard's directory."""
NAME = "kvlane-"
_CLEAN_DEADLINE_S = 20.0
_SETTLED_S = 0.25
"""A process may be between fork and exec, where it cannot be found: nothing twice is nothing."""


class ProcessGuard:
    """A directory that disappears after its owner, with all marked processes and containers.

    `directory` is made under `parent` (default: the system's temporary one). `mark`: an argument of
    its processes; `label`: of its containers, with `docker`. The watchdog inherits `inherited`,
    with their locks.
    """

    def __init__(
        self, *, parent: Path | None = None, docker: bool = False, inherited: Sequence[int] = ()
    ) -> None:
        name = f"{NAME}{uuid.uuid4().hex[:12]}"
        self.directory = (parent or Path(tempfile.gettempdir())).absolute() / name
        self.mark = f"{MARK}{self.directory}"
        self.label = {LABEL: name}
        self._docker = docker
        reading, self._pipe = os.pipe()
        try:
            # -P: the directory of this file must not hide modules of the standard library
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
                [
                    sys.executable,
                    "-P",
                    __file__,
                    str(os.getpid()),
                    str(self.directory),
                    "docker" if docker else "",
                ],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=inherited,
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(reading)
        self.directory.mkdir(mode=0o700, parents=True)

    def close(self) -> None:
        """Clean up and wait for the end of it, at most half a minute; idempotent."""
        if self._pipe < 0:
            return
        os.close(self._pipe)
        self._pipe = -1
        try:
            status = self._process.wait(_CLEAN_DEADLINE_S + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status != 0:  # the watchdog was ended from outside
            clean_up(self.directory, docker=self._docker)


def clean_up(directory: Path, *, docker: bool) -> None:
    """Kill the processes and delete the files that belong to the guard of `directory`."""
    deadline = time.monotonic() + _CLEAN_DEADLINE_S
    kill_marked(f"{MARK}{directory}", deadline)
    if docker:
        remove_labelled(directory.name, deadline)
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)


def kill_marked(mark: str, deadline: float) -> None:
    """SIGKILL every process with this argument until none was there for a moment."""
    settled_at = time.monotonic() + _SETTLED_S
    while time.monotonic() < min(settled_at, deadline):
        for process in marked_processes(mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(process) == process:  # with its own child processes
                    os.killpg(process, signal.SIGKILL)
                os.kill(process, signal.SIGKILL)
            settled_at = time.monotonic() + _SETTLED_S
        time.sleep(0.02)


def marked_processes(mark: str) -> list[int]:
    """Ids of the processes with this argument. A dead one that was not waited for has none left."""
    if not Path("/proc/self/cmdline").exists():  # macOS
        listing = subprocess.run(
            ["/bin/ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True, check=False
        )
        lines = (line.split(None, 1) for line in listing.stdout.splitlines())
        return [int(words[0]) for words in lines if len(words) == 2 and mark in words[1].split()]
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                arguments = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                if os.fsencode(mark) in arguments:
                    found.append(int(entry))
    return found


def remove_labelled(name: str, deadline: float) -> None:
    """Remove every container of this guard, until there was none for two seconds."""
    try:
        from testcontainers.core.docker_client import DockerClient

        daemon = DockerClient(timeout=5).client
    except Exception:  # noqa: BLE001 - without a daemon no container runs
        return
    with contextlib.closing(daemon):
        settled_at = time.monotonic() + 2.0
        seen = False
        while time.monotonic() < min(settled_at, deadline):
            with contextlib.suppress(Exception):
                containers = daemon.containers.list(
                    all=True, filters={"label": f"{LABEL}={name}"}, ignore_removed=True
                )
                for container in containers:
                    seen = True
                    container.remove(force=True, v=True)
                if seen and not containers:
                    return
            time.sleep(0.1)


def _watch(owner: int) -> None:
    """Return when the pipe is closed, or when the owner is gone. The second matters where the owner
    forked: its children hold the pipe open."""
    while os.getppid() == owner:
        readable, _, _ = select.select([0], [], [], 0.5)
        if readable and not os.read(0, 1):
            return


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    _watch(int(sys.argv[1]))
    clean_up(Path(sys.argv[2]), docker=bool(sys.argv[3]))
