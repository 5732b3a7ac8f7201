"""Requests that share their beginnings, one by one or in bursts: one on each lane at once.

Owns what is asked and when it is due; asks nothing. Every call has beginnings of its own, so that
what came before has filled no cache for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streams.clock import Clock
from streams.codecs import pack_tokens
from streams.ids import RequestIds
from streams.records import Request, StopConditions
from streams.topics import lane_of

ALPHABET = range(100, 4000)
BEGINNINGS, BEGINNING_TOKENS = 16, 640
OWN_TOKENS = (32, 480)
ANSWER_TOKENS = (8, 40)
ONE_BY_ONE, IN_BURSTS = "one by one", "in bursts"


class Asked(NamedTuple):
    """A request that is to be made, so long after the first one may be."""

    after_s: float
    request: Request


class Requests:
    """Makes them up. `rate`: requests a second.

    Whenever they come in the same way, they come at the same times and are as long: what differs
    are their tokens and ids.
    """

    def __init__(self, clock: Clock, model: str, lanes: int, rate: float) -> None:
        self._model = model
        self._lanes = lanes
        self._rate = rate
        self._form = random.Random(1)
        self._words = random.Random(2)
        self._ids = RequestIds(clock, random.Random(3))

    def burst(self) -> list[Asked]:
        """A single one."""
        return list(self._burst(0.0, self._beginnings()))

    def coming(self, arrivals: str, seconds: float) -> list[Asked]:
        """All that come in so long, in the order in which they are due."""
        self._form.seed(arrivals)
        asked = self._in_bursts if arrivals == IN_BURSTS else self._one_by_one
        return list(asked(seconds, self._beginnings()))

    def _one_by_one(self, seconds: float, beginnings: Sequence[bytes]) -> Iterator[Asked]:
        at_s = 0.0
        while (at_s := at_s + self._form.expovariate(self._rate)) < seconds:
            yield Asked(at_s, self._request(self._ids.new(), beginnings))

    def _in_bursts(self, seconds: float, beginnings: Sequence[bytes]) -> Iterator[Asked]:
        every_s = self._lanes / self._rate
        for number in range(max(1, int(seconds / every_s))):
            yield from self._burst(number * every_s, beginnings)

    def _burst(self, at_s: float, beginnings: Sequence[bytes]) -> Iterator[Asked]:
        ids: dict[int, str] = {}
        while len(ids) < self._lanes:
            drawn = self._ids.new()
            ids.setdefault(lane_of(drawn, self._lanes), drawn)
        for request_id in ids.values():
            yield Asked(at_s, self._request(request_id, beginnings))

    def _beginnings(self) -> list[bytes]:
        return [self._tokens(BEGINNING_TOKENS) for _ in range(BEGINNINGS)]

    def _request(self, request_id: str, beginnings: Sequence[bytes]) -> Request:
        """One of the beginnings, some of which come more often, and something of its own."""
        rng = self._form
        beginning = beginnings[int(len(beginnings) * rng.random() ** 2)]
        stop = StopConditions(max_tokens=rng.randint(*ANSWER_TOKENS), ignore_eos=True)
        tokens = beginning + self._tokens(rng.randint(*OWN_TOKENS))
        return Request(id=request_id, model=self._model, token_ids=tokens, stop=stop)

    def _tokens(self, count: int) -> bytes:
        return pack_tokens(self._words.choices(ALPHABET, k=count))
