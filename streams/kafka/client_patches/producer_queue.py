"""The interface and entries of the queue in front of a producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiokafka import TopicPartition

from kvlane.streams.ports import Appended, Entry

MAX_BATCH_BYTES = 1024 * 1024
"""Bound of a batch of several records."""

_BATCH_BYTES = 61  # header of a batch
_ENTRY_BYTES = 26  # attributes, length, offset, time, lengths of key and value, number of headers
_HEADER_BYTES = 10  # lengths of name and value

TranslateError = Callable[[BaseException, TopicPartition], Exception]
"""Makes the error that the caller of an append gets."""


def size_bytes(entries: Sequence[Entry]) -> int:
    """An upper bound on the bytes of a batch with these entries."""
    size = _BATCH_BYTES + _ENTRY_BYTES * len(entries)
    for key, value, headers in entries:
        if key is not None:
            size += len(key)
        if value is not None:
            size += len(value)
        else:
            assert key is not None, "an entry without key and value"
        for name, content in headers:
            size += _HEADER_BYTES + len(name) + (0 if content is None else len(content))
    return size


class PendingAppend:
    """Entries that are appended together, their size in bytes, and their deadline."""

    __slots__ = ("deadline", "entries", "future", "size")

    def __init__(
        self, entries: Sequence[Entry], size: int, deadline: float, future: asyncio.Future[Appended]
    ) -> None:
        self.entries = entries
        self.size = size
        self.deadline = deadline
        self.future = future


class ProducerQueue(Protocol):
    """Appends that are not acknowledged yet, in order in each partition."""

    size: int
    """Bytes of all appends."""
    heard_at: float
    """When an append was acknowledged last, or since when the producer is connected."""

    def attach(self, producer: Any) -> None:
        """Let this producer, which is not started yet, send the appends."""

    def on_connected(self) -> None:
        """The producer is started."""

    def add(self, tp: TopicPartition, append: PendingAppend) -> None:
        """Queue an append behind all others of its partition."""

    def give_up(self, now: float) -> bool:
        """Fail the appends whose deadline has passed; whether there were any."""

    def fail_all(self, error: BaseException) -> None:
        """Fail all appends; the queue is not used after that."""

    async def flush(self) -> None:
        """Wait until every append is acknowledged or has failed."""
