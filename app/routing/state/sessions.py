"""Session affinity: the place of each session, from the decisions in the ledger alone.

A session is bound by its first decision, and moves with any later one that went elsewhere, where
its newest blocks are. Prefill is bound apart from the rest. The binding ends when the session is
closed or idle for its time-out, or with the epoch of its worker. It is a preference, see
`Policy.session_tolerance`. A session's requests are in different lanes, so the last decision of
each lane is kept, and the last one by broker time counts. Sessions idle for longer than `window_ms`
are dropped, because a starting router replays no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.streams.records import Assigned, Phase

MAX_SESSIONS_PER_LANE = 100_000
"""Bound on the sessions of one lane; the least recently used one is dropped first."""


class SessionKey(NamedTuple):
    """A session, in the phase prefill or in the others."""

    session: str
    prefill: bool


class Affinity(NamedTuple):
    """The last decision of a session in a lane. `at_ms`: of the broker; `until_ms`: idle till then.
    `closed`: the session was over with it."""

    worker_rank: WorkerRank
    at_ms: int
    until_ms: int
    closed: bool = False


class SessionAffinities:
    def __init__(self, window_ms: int) -> None:
        """`window_ms`: the longest idle time that counts."""
        self._window_ms = window_ms
        self._lanes: dict[int, OrderedDict[SessionKey, Affinity]] = {}
        """In each lane the session used longest ago first."""
        self._by_key: dict[SessionKey, dict[int, Affinity]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def preferred_rank(self, session: str, phase: Phase, now_ms: int) -> WorkerRank | None:
        """The place of a session; None for one that has not begun, or is over."""
        bindings = self._by_key.get(SessionKey(session, phase == "prefill"))
        if bindings is None:
            return None
        last = max(bindings.items(), key=lambda each: (each[1].at_ms, each[0]))[1]
        return None if last.closed or now_ms > last.until_ms else last.worker_rank

    def apply(self, lane: int, decision: Assigned, at_ms: int) -> None:
        use = decision.session
        if use is None:
            return
        key = SessionKey(use.id, decision.phase == "prefill")
        idle_ms = min(use.timeout_s * 1000, self._window_ms)
        place = WorkerRank(decision.worker, decision.epoch, decision.rank)
        self._put(lane, key, Affinity(place, at_ms, at_ms + idle_ms, use.closes))
        self._expire(lane, at_ms)

    def forget(self, lane: int) -> None:
        for key in list(self._lanes.get(lane, ())):
            self._remove(lane, key)

    def snapshot_rows(self, lane: int) -> list[tuple[SessionKey, Affinity]]:
        """The bindings of one lane for a snapshot, in the order of last use."""
        return list(self._lanes.get(lane, {}).items())

    def restore(self, lane: int, rows: Iterable[tuple[SessionKey, Affinity]]) -> None:
        for key, binding in rows:
            self._put(lane, key, binding)

    def _put(self, lane: int, key: SessionKey, binding: Affinity) -> None:
        bindings = self._lanes.setdefault(lane, OrderedDict())
        bindings[key] = binding
        bindings.move_to_end(key)
        self._by_key.setdefault(key, {})[lane] = binding

    def _expire(self, lane: int, now_ms: int) -> None:
        """Drop bindings that a starting router would not know of; by the lane's own time."""
        bindings = self._lanes[lane]
        while bindings:
            key, first = next(iter(bindings.items()))
            if first.at_ms + self._window_ms >= now_ms and len(bindings) <= MAX_SESSIONS_PER_LANE:
                break
            self._remove(lane, key)

    def _remove(self, lane: int, key: SessionKey) -> None:
        del self._lanes[lane][key]
        bindings = self._by_key[key]
        del bindings[lane]
        if not bindings:
            del self._by_key[key]
