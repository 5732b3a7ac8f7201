"""The broker's bad weather, drawn from a seed: latencies, lost, doubled and late appends, silence.

Owns how often what goes wrong between a client and the broker. `clear` ends it: from then on the
network is quick and nothing is lost.
"""

# ruff: noqa: ARG002 - the weather does not look at who asks

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from streams.memory.broker import Fate, Faults
from streams.memory.faults import Operation


class Climate(NamedTuple):
    """Probabilities of one operation; latencies in seconds."""

    lost: float = 0.02
    unreported: float = 0.02
    twice: float = 0.02
    late: float = 0.015
    overtaken: float = 0.015
    latest_s: float = 3.0
    """How long what was given up may still be on its way."""
    unanswered: float = 0.03
    slow: float = 0.08
    """How often an operation takes long, up to `longest_s`; otherwise it takes milliseconds."""
    longest_s: float = 1.5
    usual_s: float = 0.005
    lag: float = 0.02
    """How often a poll takes long, as `slow`: readers then know less than they could."""


CALM = Climate(
    lost=0.0, unreported=0.0, twice=0.0, late=0.0, overtaken=0.0, latest_s=0.0, unanswered=0.0,
    slow=0.0, usual_s=0.0, lag=0.0,
)  # fmt: skip
DEPARTED = 0.5
"""Of the appends on their way when a process is killed, how many have left it."""


class Weather(Faults):
    """Seeded faults; see the module."""

    def __init__(self, rng: random.Random, climate: Climate) -> None:
        self._random = rng.random
        self.climate = climate
        self.on_answer: Callable[[str, Operation], None] | None = None
        """Called when an operation has had its effect and its client does not know yet."""

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        self.climate = CALM

    def latency_s(self, client: str, operation: Operation) -> float:
        """Mostly milliseconds; polls mostly nothing, they wait long enough."""
        climate = self.climate
        draw = self._random()
        if operation == "poll":
            return self._random() * climate.longest_s if draw < climate.lag else 0.0
        if draw < climate.slow:
            return self._random() * climate.longest_s
        return draw * climate.usual_s

    def answer_s(self, client: str, operation: Operation) -> float:
        """Acknowledgements are late as often as requests."""
        if self.on_answer is not None:
            self.on_answer(client, operation)
        climate = self.climate
        draw = self._random()
        if draw < climate.slow:
            return self._random() * climate.longest_s
        return draw * climate.usual_s

    def fate(self, client: str, topic: str, partition: int) -> Fate:
        """The fate of one append."""
        draw, climate = self._random(), self.climate
        for fate, likely in (
            (Fate.LOST, climate.lost),
            (Fate.UNREPORTED, climate.unreported),
            (Fate.TWICE, climate.twice),
            (Fate.LATE, climate.late),
            (Fate.OVERTAKEN, climate.overtaken),
        ):
            if (draw := draw - likely) < 0:
                return fate
        return Fate.KEPT

    def late_s(self, client: str) -> float:
        """Anything up to the latest."""
        return self._random() * self.climate.latest_s

    def departed(self, client: str) -> bool:
        """As a coin falls."""
        return self._random() < DEPARTED

    def answered(self, client: str, operation: Operation) -> bool:
        """Polls always come back, empty at worst."""
        return operation == "poll" or self._random() >= self.climate.unanswered
