"""Input file of one batch job: its requests, and the check of all lines before the first runs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from kvlane.app.batches.batch_requests import JobRequest, requests_of
from kvlane.app.batches.file_store import FileStore
from kvlane.streams.record_types.batch_records import BatchEndpoint, BatchError, FileCard

MAX_ERRORS = 100
"""Errors of an input that are listed."""


class CheckedInput(NamedTuple):
    lines: int
    errors: tuple[BatchError, ...]


class JobInput:
    def __init__(
        self, store: FileStore, card: FileCard, endpoint: BatchEndpoint, max_lines: int
    ) -> None:
        self._store = store
        self._card = card
        self._endpoint: BatchEndpoint = endpoint
        self._max_lines = max_lines

    async def requests(
        self, is_wanted: Callable[[int], bool] = lambda _: True
    ) -> AsyncGenerator[JobRequest | BatchError, None]:
        """The requests, or the errors of their lines. `is_wanted`: by index; others are not read.
        Close it (`aclosing`) when leaving it early. Raises FileDamaged, BrokerUnavailable."""
        async with (
            aclosing(self._store.read(self._card)) as pieces,
            aclosing(requests_of(pieces, self._endpoint, is_wanted)) as requests,
        ):
            async for request in requests:
                yield request

    async def check(self, interrupt: Callable[[], None]) -> CheckedInput:
        """Check all lines, up to 100 errors. `interrupt`: called at each, may raise."""
        errors: list[BatchError] = []
        known: set[bytes] = set()
        lines = 0
        async with aclosing(self.requests()) as requests:
            async for request in requests:
                interrupt()
                lines += 1
                if lines > self._max_lines:
                    message = f"a batch may have {self._max_lines} requests"
                    errors.append(BatchError(code="too_many_requests", message=message))
                elif isinstance(request, BatchError):
                    errors.append(request)
                elif not _add(known, request.custom_id):
                    message = "custom_id: another line has the same one"
                    errors.append(
                        BatchError(
                            code="duplicate_custom_id",
                            message=message,
                            line=request.line,
                            param="custom_id",
                        )
                    )
                if len(errors) >= MAX_ERRORS or lines > self._max_lines:
                    break
        if not lines:
            errors.append(BatchError(code="empty_file", message="the input file has no lines"))
        return CheckedInput(lines, tuple(errors))


def _add(known: set[bytes], custom_id: str) -> bool:
    """Add an id, by a digest of 8 bytes; false if it is known."""
    digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest()
    if digest in known:
        return False
    known.add(digest)
    return True
