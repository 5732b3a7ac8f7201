"""Pool of worker processes for parallel simulation runs."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process


def process_pool(processes: int) -> ProcessPoolExecutor:
    """A pool whose processes end with this one, however this one ends.

    Fresh interpreters: no state of this process is inherited, and no threads are lost by a fork.
    """
    return ProcessPoolExecutor(processes, get_context("spawn"), _end_with_parent)


def _end_with_parent() -> None:
    """Exit when the parent process has been killed."""
    parent = parent_process()
    assert parent is not None, "a pool has started this process"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
