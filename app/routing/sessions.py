"""Sessions: which place a session is bound to, told from the decisions in the ledger alone.

A session is bound by its first decision, and moves with any later one that went elsewhere, since
that is where its newest blocks are. Prefill is bound apart from the rest. It ends when it is
closed, when it was idle for its time, or with the life of its worker.

A session's requests lie in different lanes, so of each lane the last word is kept, and the last one
by the time of the broker counts. All routers that have read the same agree, in whatever order they
read. Idle times are looked at when somebody asks; what was idle for longer than `window_ms` is
forgotten, as a router that starts reads no further back.

A binding is a preference (`kept`): a request goes elsewhere when its own worker costs more than the
best one by over `allowance`, which is about what its whole prompt costs to compute.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from app.routing.paces import Pace
from app.routing.policies import Ask, Costs, DynamoWeights, Place
from streams.records import Assigned, Phase

MOST = 100_000
"""Sessions of one lane that are remembered; the one used longest ago is forgotten first."""


class Key(NamedTuple):
    """A session, in the phase prefill or in the others."""

    session: str
    prefill: bool


class Binding(NamedTuple):
    """The last decision of a session in a lane. `at_ms`: of the broker; `until_ms`: idle till then.

    `closed`: the session was over with it.
    """

    place: Place
    at_ms: int
    until_ms: int
    closed: bool = False


class Sessions:
    """The bindings that the lanes tell of."""

    def __init__(self, window_ms: int) -> None:
        """`window_ms`: the longest idle time that counts."""
        self._window_ms = window_ms
        self._lanes: dict[int, OrderedDict[Key, Binding]] = {}
        """In each lane the session used longest ago first."""
        self._by_key: dict[Key, dict[int, Binding]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def bound(self, session: str, phase: Phase, now_ms: int) -> Place | None:
        """Where a session is at home; None for one that has begun nowhere, or is over."""
        told = self._by_key.get(Key(session, phase == "prefill"))
        if told is None:
            return None
        last = max(told.items(), key=lambda each: (each[1].at_ms, each[0]))[1]
        return None if last.closed or now_ms > last.until_ms else last.place

    def apply(self, lane: int, decision: Assigned, at_ms: int) -> None:
        """Take in a decision of a lane, in the order in which the lane has them."""
        use = decision.session
        if use is None:
            return
        key = Key(use.id, decision.phase == "prefill")
        idle_ms = min(use.timeout_s * 1000, self._window_ms)
        place = Place(decision.worker, decision.epoch, decision.rank)
        self._put(lane, key, Binding(place, at_ms, at_ms + idle_ms, use.closes))
        self._expire(lane, at_ms)

    def forget(self, lane: int) -> None:
        """Drop what one lane has told."""
        for key in list(self._lanes.get(lane, ())):
            self._remove(lane, key)

    def told(self, lane: int) -> list[tuple[Key, Binding]]:
        """What one lane has told, for a snapshot, in the order of last use."""
        return list(self._lanes.get(lane, {}).items())

    def restore(self, lane: int, told: Iterable[tuple[Key, Binding]]) -> None:
        """The inverse of `told`, of a lane that was forgotten."""
        for key, binding in told:
            self._put(lane, key, binding)

    def _put(self, lane: int, key: Key, binding: Binding) -> None:
        bindings = self._lanes.setdefault(lane, OrderedDict())
        bindings[key] = binding
        bindings.move_to_end(key)
        self._by_key.setdefault(key, {})[lane] = binding

    def _expire(self, lane: int, now_ms: int) -> None:
        """Forget what a router that starts now would not know of; by the lane's own time."""
        bindings = self._lanes[lane]
        while bindings:
            key, first = next(iter(bindings.items()))
            if first.at_ms + self._window_ms >= now_ms and len(bindings) <= MOST:
                break
            self._remove(lane, key)

    def _remove(self, lane: int, key: Key) -> None:
        del self._lanes[lane][key]
        told = self._by_key[key]
        del told[lane]
        if not told:
            del self._by_key[key]


def allowance(policy: str, ask: Ask, weights: DynamoWeights, pace: Pace) -> float:
    """By how much the cost of a session's own place may exceed the least one, in the policy's unit:
    the whole prompt once, computed anew. Without end for policies whose costs are no amounts.
    """
    match policy:
        case "dynamo":
            return weights.prefill_load_scale * ask.prompt_tokens / ask.block_size
        case "least_loaded":
            return float(ask.prompt_tokens)
        case "predictive":
            return pace.prefill_ms(ask.prompt_tokens)
        case _:
            return math.inf


def kept(own: int, chosen: int, costs: Costs, slack: float) -> int:
    """The option to take when `chosen` is the policy's choice and `own` that of the session."""
    return own if slack == math.inf or costs[own] <= min(costs) + slack else chosen
