"""Materialized views: state computed from the records of some partitions, and from nothing else: a
view never reads the log, never waits, and takes no time from a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord


class FollowedView(Protocol):
    """A view that begins with the log, or with its newest records."""

    @property
    def name(self) -> str:
        """Its name in the log, and that of its snapshots."""

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        """Apply the next records of a partition; `position` is the offset after them.
        `log_records` are in offset order; there are none if only the position moves."""

    def position(self, source: Partition) -> int | None:
        """The next offset of a partition; None before the first `apply` or `restore`."""

    def forget(self, source: Partition) -> None:
        """Drop the state and the position of this partition."""


@runtime_checkable
class MaterializedView(FollowedView, Protocol):
    """A pure state machine: its state depends only on the records below its positions."""

    def snapshot(self, source: Partition) -> bytes:
        """The serialized state of this partition."""

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        """The inverse of `snapshot`. Raises ValueError for data it cannot use."""

    def state_hash(self, source: Partition) -> str:
        """Equal for equal state, however it was reached."""
