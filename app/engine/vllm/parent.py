"""An engine core that ends when its worker does, however that one ended.

vLLM's cores outlive a parent that is killed, with their memory and their ports. The leash
(`app/engine/leash.py`) finds those that were forked. One that was spawned gives itself a title,
which is written over its environment, where the leash would look. Used in vLLM's processes; imports
nothing but what they have.
"""

from __future__ import annotations

import os
import signal
import threading

PARENT = "KVLANE_VLLM_PARENT"
"""Environment variable: the process that the cores it starts must not outlive."""
WATCH_S = 1.0


def end_with_parent() -> None:
    """Watch from now on, if this process was started by the one that the environment names."""
    named = os.environ.get(PARENT, "")
    if named.isdecimal() and os.getppid() == int(named):
        watch = threading.Thread(target=_watch, args=[int(named)], name="parent", daemon=True)
        watch.start()


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(WATCH_S)
    if os.getpgrp() == parent:  # whatever else it has started goes with it
        os.killpg(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
