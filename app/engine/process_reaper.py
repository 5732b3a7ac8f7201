"""Process reaper: no process of an engine outlives its worker, however the worker ends.

An engine that starts processes creates a `ProcessReaper` first: a small process in its own session,
which waits for the end of its owner and then kills all remaining descendants. Forked ones hold the
pipe of the leash open, executed ones have its name in their environment, so none needs
registration, whatever its group, session or parent.

Uses /proc, on Linux only. Runs as a script, so it must not import the rest of the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

REAPER_ID_VARIABLE = "KVLANE_LEASH"
"""Environment variable of all processes that the owner executes."""
_LOOK_S = 0.5
"""Detection time of the owner's end; shorter if no other process holds the pipe."""
_CLEAN_DEADLINE_S = 20.0
_SETTLED_S = 0.25
"""Time without any process found: a single search misses one between fork and exec."""


class ProcessReaper:
    """Covers the processes that are started from now on. Call `release` after an orderly end."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        environment = {k: v for k, v in os.environ.items() if k != REAPER_ID_VARIABLE}
        reading, self._pipe = os.pipe()
        try:
            if Path("/proc/self/fd").exists():
                subprocess.Popen(  # noqa: S603 - our own interpreter and file
                    [sys.executable, "-I", "-S", __file__, str(os.getpid()), name],
                    stdin=reading,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
        finally:
            os.close(reading)
        os.environ[REAPER_ID_VARIABLE] = name

    def release(self) -> None:
        """Kill the remaining processes. Does not wait; idempotent."""
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, b".")
            os.close(self._pipe)
            self._pipe = -1
            os.environ.pop(REAPER_ID_VARIABLE, None)


def owned_processes(name: str, pipe: int) -> list[int]:
    """The processes of a leash, by its name or by the inode of its pipe, without this process."""
    sign, link = f"{REAPER_ID_VARIABLE}={name}".encode(), f"pipe:[{pipe}]"
    others = (e for e in os.listdir("/proc") if e.isdecimal() and int(e) != os.getpid())
    return [int(entry) for entry in others if _is_held(entry, sign, link)]


def _is_held(process: str, sign: bytes, link: str) -> bool:
    with contextlib.suppress(OSError):
        if sign in Path("/proc", process, "environ").read_bytes().split(b"\0"):
            return True
        for entry in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process}/fd/{entry}") == link:
                    return True
    return False


def _wait(owner: int) -> None:
    """Return when the owner has released the leash or ended; its forks may hold the pipe open."""
    while os.getppid() == owner:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if readable:
            return


def _clean(name: str, owner: int) -> None:
    pipe = os.fstat(0).st_ino
    deadline = time.monotonic() + _CLEAN_DEADLINE_S
    settled_at = time.monotonic() + _SETTLED_S
    while time.monotonic() < min(settled_at, deadline):
        for process in owned_processes(name, pipe):
            if process == owner:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
            settled_at = time.monotonic() + _SETTLED_S
        time.sleep(0.02)


def _main(owner: str, name: str) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    _wait(int(owner))
    _clean(name, int(owner))


if __name__ == "__main__":
    _main(*sys.argv[1:])
