"""What may go wrong with the in-memory broker, decided from outside.

The broker asks a `Faults` before and after each operation. The class here is fair weather; the
whole-system simulation derives a seeded one. `operation` is the name of the `Log`, `Reader` or
`Member` method; `client` the client id given to `MemoryBroker.connect`.
"""

# ruff: noqa: ARG002 - the fair-weather answers do not depend on who asks

from __future__ import annotations

from enum import Enum
from typing import Literal

Operation = Literal["append", "offsets", "poll", "commit", "heartbeat", "leave"]


class Fate(Enum):
    """What becomes of one append."""

    KEPT = "kept"
    LOST = "lost"
    """Nothing is appended, AppendFailed is raised."""
    UNREPORTED = "unreported"
    """Appended, but AppendFailed is raised: the acknowledgement was lost."""
    TWICE = "twice"
    """Appended again before the acknowledgement: the producer's retry of an unanswered request."""
    LATE = "late"
    """AppendFailed is raised, and it lands up to `Faults.late_s` later. The producer keeps its
    queue: what it appends to this partition meanwhile lands behind it."""
    OVERTAKEN = "overtaken"
    """As LATE, but the producer was replaced: what its successor appends meanwhile lands first."""


class Faults:
    """No faults and no latency. All times in seconds."""

    def latency_s(self, client: str, operation: Operation) -> float:
        """How long the request travels before it takes effect."""
        return 0.0

    def answer_s(self, client: str, operation: Operation) -> float:
        """How long the answer travels after that."""
        return 0.0

    def late_s(self, client: str) -> float:
        """How long what was given up is still on its way."""
        return 0.0

    def departed(self, client: str) -> bool:
        """Whether an append had left its process when that one was killed."""
        return False

    def fate(self, client: str, topic: str, partition: int) -> Fate:
        """Asked when an append reaches the broker."""
        return Fate.KEPT

    def answered(self, client: str, operation: Operation) -> bool:
        """False: the request has no effect, the client's time-out strikes."""
        return True
