"""Detection of the parent's death in an engine core, which then ends, however its worker ended.

The leash (`app/engine/process_reaper.py`) finds forked cores; a spawned one sets its process title,
which overwrites its environment, where the leash searches. Runs in vLLM's processes, so it imports
nothing that they lack.
"""

from __future__ import annotations

import os
import signal
import threading

PARENT_PID_VARIABLE = "KVLANE_VLLM_PARENT"
"""Environment variable with the process id that engine cores must not outlive."""
CHECK_INTERVAL_S = 1.0


def end_with_parent() -> None:
    """Start the watch if this process is a child of the one in the environment."""
    named = os.environ.get(PARENT_PID_VARIABLE, "")
    if named.isdecimal() and os.getppid() == int(named):
        watch = threading.Thread(target=_watch, args=[int(named)], name="parent", daemon=True)
        watch.start()


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(CHECK_INTERVAL_S)
    if os.getpgrp() == parent:  # ends all other processes of the worker too
        os.killpg(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
