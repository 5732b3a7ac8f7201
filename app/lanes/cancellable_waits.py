"""Waits of a lane's jobs that a Cancel may end: for workers, heartbeats and old records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RequestCancelled(Exception):
    """A Cancel of the request is here: whatever is waited for is not wanted any more."""


class CancellableWaits:
    """The requests of one lane whose job waits for what may never come.

    Cancelling the job's task ends such a wait, also for a Cancel. `is_cancelled` tells whether a
    Cancel of a request is here already.
    """

    def __init__(self, is_cancelled: Callable[[str], bool]) -> None:
        self.waiting_ids: set[str] = set()
        self._is_cancelled = is_cancelled

    @contextmanager
    def begin(self, request_id: str) -> Iterator[None]:
        """Around every wait for workers and look-up: nothing is half done, and a Cancel ends it.

        Raises RequestCancelled if a Cancel is here already; then no wait begins.
        """
        if self._is_cancelled(request_id):
            raise RequestCancelled(request_id)
        self.waiting_ids.add(request_id)
        try:
            yield
        finally:
            self.waiting_ids.discard(request_id)
