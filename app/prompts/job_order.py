"""Order of the batch requests that are read together.

The job with the fewest tokens so far goes next, for a quantum of requests. Within a job requests
are sorted by their prompts, so that common prefixes follow each other and meet in a cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

QUANTUM_REQUESTS = 16
"""Requests of a job that follow each other: enough that most of them find the prefix cached."""
MAX_JOBS = 1000
"""Jobs whose tokens are remembered, the latest ones."""


class BatchItem(NamedTuple):
    """A request in a window. `prefix`: the beginning of its prompt, in any form that sorts."""

    job: str
    prefix: Any
    tokens: int


class JobOrder:
    """The order of one preprocessor, with the tokens that each job had."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}

    def arranged(self, items: Sequence[BatchItem]) -> list[int]:
        jobs: dict[str, deque[int]] = {}
        for i in sorted(range(len(items)), key=lambda i: items[i].prefix):
            jobs.setdefault(items[i].job, deque()).append(i)
        least = min((self._served[job] for job in jobs if job in self._served), default=0)
        for job in jobs:  # a job that comes, or returns, has no claim on unused turns
            self._served[job] = max(self._served.pop(job, 0), least)
        order: list[int] = []
        while jobs:
            job = min(jobs, key=self._served.__getitem__)
            for _ in range(min(QUANTUM_REQUESTS, len(jobs[job]))):
                i = jobs[job].popleft()
                self._served[job] += max(items[i].tokens, 1)
                order.append(i)
            if not jobs[job]:
                del jobs[job]
        for job in list(self._served)[: max(0, len(self._served) - MAX_JOBS)]:
            del self._served[job]
        return order
