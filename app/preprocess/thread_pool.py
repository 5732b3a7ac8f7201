"""Work that would block the event loop: in a bounded pool of threads, or in steps on the loop.

Threads are for work that releases the interpreter lock (tokenising, hashing, files) or is rare and
short (templates); steps for other work, such as parsing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Protocol, TypeVar

from kvlane.app.preprocess.prompt_errors import PreprocessorOverloaded

T = TypeVar("T")


class WorkPool(Protocol):
    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, or its error. Raises PreprocessorOverloaded before it has begun."""


class InlinePool:
    """Runs work synchronously on the loop, for virtual time, which has no threads."""

    async def run(self, work: Callable[[], T]) -> T:
        return work()


class ThreadPool:
    """Runs work on threads; at most `waiting` jobs are queued, more are refused. Cancelling a
    caller does not stop its job, which counts until it is done."""

    def __init__(self, threads: int = 2, waiting: int = 64) -> None:
        self._executor = ThreadPoolExecutor(threads, "preprocess")
        self._places = Semaphore(threads + waiting)

    async def run(self, work: Callable[[], T]) -> T:
        if not self._places.acquire(blocking=False):
            raise PreprocessorOverloaded("too many prompts are being prepared; try again shortly")
        job = self._executor.submit(work)
        job.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Begin nothing more; running calls are not awaited."""
        self._executor.shutdown(wait=False, cancel_futures=True)


Steps = Generator[None, None, T]
"""Work that yields wherever other tasks may run."""


async def run_cooperatively(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


def run_now(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
