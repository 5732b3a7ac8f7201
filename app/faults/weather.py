"""The broker's bad weather, drawn from a seed: latencies, lost and doubled appends, no answers.

Owns how often what goes wrong between a client and the broker. `clear` ends it: from then on the
network is quick and nothing is lost.
"""

# ruff: noqa: ARG002 - the weather does not look at who asks

from __future__ import annotations

import random
from typing import NamedTuple

from streams.memory.broker import Fate, Faults
from streams.memory.faults import Operation


class Climate(NamedTuple):
    """Probabilities of one operation; latencies in seconds."""

    lost: float = 0.02
    unreported: float = 0.02
    twice: float = 0.02
    unanswered: float = 0.03
    slow: float = 0.08
    """How often an operation takes long, up to `longest_s`; otherwise it takes milliseconds."""
    longest_s: float = 1.5
    usual_s: float = 0.005
    lag: float = 0.02
    """How often a poll takes long, as `slow`: readers then know less than they could."""


CALM = Climate(lost=0.0, unreported=0.0, twice=0.0, unanswered=0.0, slow=0.0, usual_s=0.0, lag=0.0)


class Weather(Faults):
    """Seeded faults; see the module."""

    def __init__(self, rng: random.Random, climate: Climate) -> None:
        self._random = rng.random
        self.climate = climate

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
        climate = self.climate
        draw = self._random()
        if draw < climate.slow:
            return self._random() * climate.longest_s
        return draw * climate.usual_s

    def fate(self, client: str, topic: str, partition: int) -> Fate:
        """The fate of one append."""
        climate = self.climate
        draw = self._random()
        if draw < climate.lost:
            return Fate.LOST
        if draw < climate.lost + climate.unreported:
            return Fate.UNREPORTED
        if draw < climate.lost + climate.unreported + climate.twice:
            return Fate.TWICE
        return Fate.KEPT

    def answered(self, client: str, operation: Operation) -> bool:
        """Polls always come back, empty at worst."""
        return operation == "poll" or self._random() >= self.climate.unanswered
