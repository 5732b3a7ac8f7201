"""Fault injection for the in-memory broker, which consults `BrokerFaults` around each operation.

This class injects none; the whole-system simulation derives a seeded one. `operation`: the name of
the `Log`, `Reader` or `Member` method; `client`: the client id of its `MemoryLog`.
"""

# ruff: noqa: ARG002 - without faults the arguments do not matter

from __future__ import annotations

from enum import Enum
from typing import Literal

Operation = Literal["append", "offsets", "poll", "commit", "heartbeat", "leave"]


class AppendFate(Enum):
    KEPT = "kept"
    LOST = "lost"
    """Nothing is appended, AppendFailed is raised."""
    UNREPORTED = "unreported"
    """Appended, but AppendFailed is raised: the acknowledgement was lost."""
    TWICE = "twice"
    """Appended again before the acknowledgement: the producer's retry of an unanswered request."""
    LATE = "late"
    """AppendFailed is raised; it is appended up to `BrokerFaults.late_s` later. The producer keeps
    its queue: its later appends to this partition come after it."""
    OVERTAKEN = "overtaken"
    """As LATE, but the producer was replaced: appends of its successor come first."""


class BrokerFaults:
    """No faults and no latency. All times in seconds."""

    def latency_s(self, client: str, operation: Operation) -> float:
        """Delay of a request before it takes effect."""
        return 0.0

    def answer_s(self, client: str, operation: Operation) -> float:
        """Delay of the response after that."""
        return 0.0

    def gather_s(self, wanted_s: float) -> float:
        """Time that records wait for others, for a reader that asked for `wanted_s`."""
        return 0.0

    def late_s(self, client: str) -> float:
        """Time that an abandoned append remains in transit."""
        return 0.0

    def departed(self, client: str) -> bool:
        """Whether an append had left its process when the process was killed."""
        return False

    def fate(self, client: str, topic: str, partition: int, entries: int) -> AppendFate:
        """Asked when an append of so many entries reaches the broker."""
        return AppendFate.KEPT

    def answered(self, client: str, operation: Operation) -> bool:
        """False: the request has no effect, and the client times out."""
        return True
