"""An answer as one client of a simulation has received it, over HTTP or Kafka."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol


class ReceivedAnswer:
    """One answer as its client has it so far."""

    def __init__(self, request_id: str = "", position: int = 0, text: str = "") -> None:
        self.id = request_id
        self.position = position
        self.text = text
        self.outcome = ""
        """The finish reason, the code of the error, or "left"; "" while it is open."""
        self.marks: list[tuple[int, str]] = []
        """Positions that the client has got, each with the text up to it."""

    def take(self, text: str, position: int | None, finish_reason: str | None) -> None:
        """Take an event."""
        self.text += text
        if position is not None:
            self.position = position
            self.marks.append((position, self.text))
        if finish_reason is not None:
            self.outcome = finish_reason

    def rewind(self, rng: random.Random) -> None:
        """Go back to a position that the client has got; without one, to the beginning. A reader
        from the beginning waits for an answer of which all records were deleted."""
        self.position, self.text = rng.choice(self.marks or [(0, "")])


class AnswerReader(Protocol):
    """A client that reads answers."""

    @property
    def name(self) -> str:
        """The name in the history."""

    @property
    def answers(self) -> Sequence[ReceivedAnswer]:
        """Its answers so far."""

    @property
    def is_over(self) -> bool:
        """True once all its answers have ended."""

    @property
    def unexpected_errors(self) -> Sequence[str]:
        """Errors that it should never get."""
