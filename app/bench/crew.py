"""Processes that each do some of a benchmark's work."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process


def crew(jobs: int) -> ProcessPoolExecutor:
    """So many processes, which end with this one, however that ends.

    Fresh interpreters: nothing of this one's state reaches what they do, and its threads are not
    there to be missed.
    """
    return ProcessPoolExecutor(jobs, get_context("spawn"), _end_with_parent)


def _end_with_parent() -> None:
    """Do not wait for ever for one that was killed."""
    parent = parent_process()
    assert parent is not None, "a pool has started this process"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
