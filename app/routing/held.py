"""Who is held in a router, and for which place: what was planned last for each request.

Owns the order among them. Planned are they in the order of arrival: a request knows what those
before it have in mind (`ahead_ms`), so that two do not count on the same gap. Sent are they the
shortest prefill first (`in_turn`), which makes the mean wait the least; each millisecond of waiting
makes a request `AGEING` milliseconds shorter in this order, so that none is overtaken for ever.

Never here: whether a request may go, which is `plan.py`'s to say, and any clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from app.routing.plan import Planned
from app.routing.policies import Place

AGEING = 0.05
"""With it a request that has waited for a second goes before one that is 50 ms shorter."""

WOKEN = 16
"""How many requests one piece of news wakes at most: planning them takes a few milliseconds."""

K = TypeVar("K", bound=Hashable)


class Entry(NamedTuple):
    """A held request. `number`: its place in the order of arrival."""

    number: int
    since_ms: float
    planned: Planned

    @property
    def turn(self) -> float:
        """Who has less goes first. Ages without being touched: all grow older alike."""
        return self.planned.prefill_ms + AGEING * self.since_ms


class Held(Generic[K]):
    """The held requests of one router, by keys of its choice."""

    def __init__(self) -> None:
        self._entries: dict[K, Entry] = {}
        self._by_place: dict[Place, dict[K, Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def intend(self, key: K, number: int, since_ms: float, planned: Planned | None) -> Sequence[K]:
        """Note for which place a request is held, if any; who has another turn for it now.

        These have to look again: who is first now, and who was.
        """
        before = self._entries.get(key)
        if before is None and planned is None:
            return ()
        places = [each.place for each in (before and before.planned, planned) if each]
        firsts = {place: self.first(place) for place in places}
        if planned is None:
            self.drop(key)
        else:
            self.hold(key, number, since_ms, planned)
        woken: list[K] = []
        for place, first in firsts.items():
            if (now_first := self.first(place)) != first:
                woken += [each for each in (now_first, first) if each not in (None, key)]
        return woken

    def woken(self, worker: str) -> Sequence[K]:
        """Who looks again after news of a worker, in turn: those planned for it; all, if few."""
        few = len(self._entries) <= WOKEN
        places = None if few else [place for place in self._by_place if place.worker == worker]
        return self.in_turn(places)[:WOKEN]

    def hold(self, key: K, number: int, since_ms: float, planned: Planned) -> None:
        """Plan a request for a place, whatever was planned before."""
        self.drop(key)
        entry = self._entries[key] = Entry(number, since_ms, planned)
        self._by_place.setdefault(planned.place, {})[key] = entry

    def drop(self, key: K) -> None:
        """Forget a request, if it is known."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        there = self._by_place[entry.planned.place]
        del there[key]
        if not there:
            del self._by_place[entry.planned.place]

    def ahead_ms(self, number: int) -> Mapping[Place, list[float]]:
        """By place, the prefill of each request that is planned for it and came before this one."""
        ahead: dict[Place, list[float]] = {}
        for place, there in self._by_place.items():
            earlier = [e.planned.prefill_ms for e in there.values() if e.number < number]
            if earlier:
                ahead[place] = earlier
        return ahead

    def place(self, key: K) -> Place | None:
        """For which place a request is planned."""
        entry = self._entries.get(key)
        return None if entry is None else entry.planned.place

    def places(self) -> Iterator[Place]:
        """All for which somebody is planned."""
        yield from self._by_place

    def first(self, place: Place) -> K | None:
        """Who goes to a place next."""
        there = self._by_place.get(place)
        return None if there is None else min(there, key=lambda key: _order(there[key]))

    def in_turn(self, places: Iterable[Place] | None = None) -> list[K]:
        """Who is planned for these places, or for any, in the order in which they go."""
        entries = self._entries
        if places is not None:
            entries = {k: e for at in places for k, e in self._by_place.get(at, {}).items()}
        return sorted(entries, key=lambda key: _order(entries[key]))


def _order(entry: Entry) -> tuple[float, int]:
    return entry.turn, entry.number
