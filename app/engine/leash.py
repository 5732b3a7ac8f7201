"""No process that an engine starts outlives its worker, however the worker ends.

An engine that starts processes makes a `Leash` first. That is a small process in a session of its
own, which waits for the end of its owner and then kills whatever the owner, or anything that came
of it, has left: what was forked holds the leash's pipe open, and what was executed has its name in
the environment. So nothing has to be told of new processes, and none slips away between its start
and the telling; a process may leave its group, its session and its parent, and is found all the
same.

Found in /proc: on Linux only. Elsewhere nothing is done, and an engine's processes have to notice
by themselves that their worker has gone.

Started as a script: it must not import the rest of the package.
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

NAME = "KVLANE_LEASH"
"""Variable in the environment of everything that the owner executes."""
_LOOK_S = 0.5
"""How soon a death is noticed; sooner, if nobody else holds the pipe."""
_CLEAN_DEADLINE_S = 20.0
_SETTLED_S = 0.25
"""A process may be between fork and exec, where it cannot be found: nothing twice is nothing."""


class Leash:
    """Holds the processes that are started from now on. `let_go` when they have ended in order."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        environment = {k: v for k, v in os.environ.items() if k != NAME}
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
        os.environ[NAME] = name

    def let_go(self) -> None:
        """Kill what is left now. Returns at once; idempotent."""
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, b".")
            os.close(self._pipe)
            self._pipe = -1
            os.environ.pop(NAME, None)


def held(name: str, pipe: int) -> list[int]:
    """The processes on a leash: by its name, or by the number of its pipe. Never this one."""
    sign, link = f"{NAME}={name}".encode(), f"pipe:[{pipe}]"
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
    """Return when the owner lets go, or is gone; what it forked may hold the pipe open for it."""
    while os.getppid() == owner:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if readable:
            return


def _clean(name: str, owner: int) -> None:
    pipe = os.fstat(0).st_ino
    deadline = time.monotonic() + _CLEAN_DEADLINE_S
    settled_at = time.monotonic() + _SETTLED_S
    while time.monotonic() < min(settled_at, deadline):
        for process in held(name, pipe):
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
