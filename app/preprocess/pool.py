"""Where work goes that would hold up the event loop: a bounded number of threads.

Meant for work that releases the interpreter lock (tokenising, hashing, files) or is rare and
short (templates). Starts no thread before it is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Protocol, TypeVar

from app.preprocess.errors import Overloaded

T = TypeVar("T")


class Pool(Protocol):
    """Somewhere to run blocking work."""

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, or its error. Raises Overloaded before it has begun."""


class Inline:
    """Runs work at once, on the loop: virtual time knows no threads."""

    async def run(self, work: Callable[[], T]) -> T:
        """As `Pool.run`; never overloaded."""
        return work()


class Threads:
    """Runs work on threads; at most `waiting` pieces wait for one, more are refused.

    A caller that is cancelled leaves its thread working: the place counts as taken until the work
    is done.
    """

    def __init__(self, threads: int = 2, waiting: int = 64) -> None:
        self._executor = ThreadPoolExecutor(threads, "preprocess")
        self._places = Semaphore(threads + waiting)

    async def run(self, work: Callable[[], T]) -> T:
        """As `Pool.run`."""
        if not self._places.acquire(blocking=False):
            raise Overloaded("too many prompts are being prepared; try again shortly")
        job = self._executor.submit(work)
        job.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Begin nothing more; does not wait for what is running."""
        self._executor.shutdown(wait=False, cancel_futures=True)
