"""Workload of prompts with shared prefixes: single arrivals, or bursts of one request per lane.

Owns the requests and their due times; sends nothing. Every call has prefixes of its own, so that no
earlier request has filled a cache for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvlane.streams.clock import Clock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.ids import RequestIds
from kvlane.streams.request import Request, StopConditions
from kvlane.streams.topics import lane_of

TOKEN_RANGE = range(100, 4000)
PREFIXES, PREFIX_TOKENS = 16, 640
SUFFIX_TOKENS = (32, 480)
ANSWER_TOKENS = (8, 40)
SINGLE_ARRIVALS, BURST_ARRIVALS = "one by one", "in bursts"


class TimedRequest(NamedTuple):
    """A request and its due time after the start."""

    after_s: float
    request: Request


class BurstyWorkload:
    """Generator of requests. `rate`: requests/s.

    Equal arrival patterns have equal due times and lengths; only tokens and ids differ.
    """

    def __init__(self, clock: Clock, model: str, lanes: int, rate: float) -> None:
        self._model = model
        self._lanes = lanes
        self._rate = rate
        self._form = random.Random(1)
        self._words = random.Random(2)
        self._ids = RequestIds(clock, random.Random(3))

    def one_burst(self) -> list[TimedRequest]:
        return list(self._burst(0.0, self._beginnings()))

    def requests_for(self, arrivals: str, seconds: float) -> list[TimedRequest]:
        """All requests of this duration, in the order of their due times."""
        self._form.seed(arrivals)
        requests_of = self._in_bursts if arrivals == BURST_ARRIVALS else self._one_by_one
        return list(requests_of(seconds, self._beginnings()))

    def _one_by_one(self, seconds: float, beginnings: Sequence[bytes]) -> Iterator[TimedRequest]:
        at_s = 0.0
        while (at_s := at_s + self._form.expovariate(self._rate)) < seconds:
            yield TimedRequest(at_s, self._request(self._ids.new(), beginnings))

    def _in_bursts(self, seconds: float, beginnings: Sequence[bytes]) -> Iterator[TimedRequest]:
        every_s = self._lanes / self._rate
        for number in range(max(1, int(seconds / every_s))):
            yield from self._burst(number * every_s, beginnings)

    def _burst(self, at_s: float, beginnings: Sequence[bytes]) -> Iterator[TimedRequest]:
        ids: dict[int, str] = {}
        while len(ids) < self._lanes:
            drawn = self._ids.new()
            ids.setdefault(lane_of(drawn, self._lanes), drawn)
        for request_id in ids.values():
            yield TimedRequest(at_s, self._request(request_id, beginnings))

    def _beginnings(self) -> list[bytes]:
        return [self._tokens(PREFIX_TOKENS) for _ in range(PREFIXES)]

    def _request(self, request_id: str, beginnings: Sequence[bytes]) -> Request:
        """One of the prefixes, some of which are more frequent, and a suffix of its own."""
        rng = self._form
        beginning = beginnings[int(len(beginnings) * rng.random() ** 2)]
        stop = StopConditions(max_tokens=rng.randint(*ANSWER_TOKENS), ignore_eos=True)
        tokens = beginning + self._tokens(rng.randint(*SUFFIX_TOKENS))
        return Request(id=request_id, model=self._model, token_ids=tokens, stop=stop)

    def _tokens(self, count: int) -> bytes:
        return pack_tokens(self._words.choices(TOKEN_RANGE, k=count))
