"""Network faults between clients and the broker: latency, lost, duplicated and delayed appends.

Owns the probabilities of each fault; draws come from the seed. `clear` ends it: from then on the
network is fast and loses nothing.
"""

# ruff: noqa: ARG002 - faults do not depend on the client

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvlane.streams.memory.memory_broker import AppendFate, BrokerFaults, Operation


class FaultProfile(NamedTuple):
    """Probabilities of one operation; latencies in seconds."""

    lost: float = 0.02
    unreported: float = 0.02
    duplicated: float = 0.02
    delayed: float = 0.015
    reordered: float = 0.015
    max_delay_s: float = 3.0
    """Latest arrival of an append whose client no longer waits."""
    unanswered: float = 0.03
    slow: float = 0.08
    """Probability of a slow operation, up to `max_latency_s`; otherwise it takes milliseconds."""
    max_latency_s: float = 1.5
    usual_latency_s: float = 0.005
    slow_poll: float = 0.02
    """Probability of a slow poll, as `slow`: the reader then lags behind."""


NO_FAULTS = FaultProfile(
    lost=0.0, unreported=0.0, duplicated=0.0, delayed=0.0, reordered=0.0, max_delay_s=0.0,
    unanswered=0.0,
    slow=0.0, usual_latency_s=0.0, slow_poll=0.0,
)  # fmt: skip
DEPARTED_SHARE = 0.5
"""Share of the pending appends that still reach the broker when their process is killed."""


_REPEATED = (AppendFate.TWICE, AppendFate.LATE, AppendFate.OVERTAKEN)


class NetworkFaults(BrokerFaults):
    """Network faults drawn from a seed."""

    def __init__(self, rng: random.Random, climate: FaultProfile) -> None:
        self._random = rng.random
        self.profile = climate
        self.on_answer: Callable[[str, Operation], None] | None = None
        """Called when an operation has taken effect, before its client gets the answer."""

        self.cut_links: set[tuple[str, int]] = set()
        """Clients, each with a broker that it does not reach: nothing is appended there. Its reads
        go on, as from a follower."""
        self.dead_topics: frozenset[str] = frozenset()
        """Topics whose brokers are gone for ever: nothing is appended there."""
        self.repeated: Counter[str] = Counter()
        """By topic, the records that a client may have repeated without a fault of its own."""
        self.leader_of: Callable[[str, int], int] = lambda *_: 0
        """The number of the broker that leads a partition of a topic."""

    def clear(self) -> None:
        self.profile = NO_FAULTS

    def latency_s(self, client: str, operation: Operation) -> float:
        """Mostly milliseconds; mostly 0 for polls, which wait anyway."""
        climate = self.profile
        draw = self._random()
        if operation == "poll":
            return self._random() * climate.max_latency_s if draw < climate.slow_poll else 0.0
        if draw < climate.slow:
            return self._random() * climate.max_latency_s
        return draw * climate.usual_latency_s

    def gather_s(self, wanted_s: float) -> float:
        """As a broker, which waits for more records as long as it may."""
        return wanted_s

    def answer_s(self, client: str, operation: Operation) -> float:
        """The same distribution as for requests."""
        if self.on_answer is not None:
            self.on_answer(client, operation)
        climate = self.profile
        draw = self._random()
        if draw < climate.slow:
            return self._random() * climate.max_latency_s
        return draw * climate.usual_latency_s

    def fate(self, client: str, topic: str, partition: int, entries: int) -> AppendFate:
        if topic in self.dead_topics or (
            self.cut_links and (client, self.leader_of(topic, partition)) in self.cut_links
        ):
            return AppendFate.LOST
        draw, climate = self._random(), self.profile
        for fate, likely in (
            (AppendFate.LOST, climate.lost),
            (AppendFate.UNREPORTED, climate.unreported),
            (AppendFate.TWICE, climate.duplicated),
            (AppendFate.LATE, climate.delayed),
            (AppendFate.OVERTAKEN, climate.reordered),
        ):
            if (draw := draw - likely) < 0:
                self.repeated[topic] += entries * (fate in _REPEATED)
                return fate
        return AppendFate.KEPT

    def late_s(self, client: str) -> float:
        """Uniform up to `max_delay_s`."""
        return self._random() * self.profile.max_delay_s

    def departed(self, client: str) -> bool:
        return self._random() < DEPARTED_SHARE

    def answered(self, client: str, operation: Operation) -> bool:
        """Whether the operation is answered. Polls always are, at worst empty."""
        return operation == "poll" or self._random() >= self.profile.unanswered
