"""Who is held in a router, and for which place: what was planned last for each request.

Owns the order among them. Planned are they in the order of arrival: a request knows what all others
have in mind (`others`), so that two do not count on the same gap. Sent are they in another order
(`in_turn`): by strict priority, the highest number first, by what their classes were given
(`classes.py`), and then by one of

    shortest    the shortest prefill first, which makes the mean wait the least; each millisecond of
                waiting makes a request `AGEING` milliseconds shorter, so that none is overtaken for
                ever
    fcfs        who came first goes first
    wspt        as the shortest, but each prefill divided by 1 + priority_jump

A `priority_jump` counts as waiting time, in all of them.

So those who look for a place at one moment are all planned before one of them goes (`line_up`): of
requests that come together the shortest would else wait behind whoever was read first.

Never here: whether a request may go, which is `plan.py`'s to say, and any clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from app.routing.classes import NO_CLAIM, Claim, Classes, Queue, Turn
from app.routing.decisions import Hold, Planned
from app.routing.policies import Place
from app.routing.prompt import Prompt

QueueOrder: TypeAlias = Literal["shortest", "fcfs", "wspt"]

AGEING = 0.05
"""With it a request that has waited for a second goes before one that is 50 ms shorter."""

WOKEN = 16
"""How many requests one piece of news wakes at most: planning them takes a few milliseconds."""

K = TypeVar("K", bound=Hashable)


class Wanted(msgspec.Struct, Generic[K], frozen=True, gc=False):
    """A request that looks for a place. `number`: its place in the order of arrival here.

    `excluded`: workers on which it failed. `queue`: where it waits. Times are the broker's.
    """

    key: K
    number: int
    prompt: Prompt
    seed: int
    since_ms: int
    deadline_ms: float | None = None
    excluded: Collection[str] = ()
    queue: Queue = NO_CLAIM.queue

    @property
    def precedence(self) -> tuple[int, float]:
        """Who has less goes first: a strict priority before all else, then who is older.

        `priority_jump` makes a request older, in seconds.
        """
        hints = self.prompt.request.hints
        return -(hints.strict_priority or 0), self.since_ms - 1000 * (hints.priority_jump or 0)

    @property
    def claim(self) -> Claim:
        """What it takes of its class's share."""
        return Claim(self.queue, self.prompt.tokens)


class Sketch(msgspec.Struct, frozen=True, gc=False):
    """What a request is to do: where it is to go, and how long it is held, if it is."""

    planned: Planned
    hold: Hold | None = None


class LinedUp(msgspec.Struct, Generic[K], frozen=True, gc=False):
    """Who may go, in which order, who is held, and who has another turn for it and looks next."""

    order: Sequence[K]
    held: Mapping[K, Hold]
    woken: Sequence[K]


class Line(msgspec.Struct, Generic[K], frozen=True, gc=False):
    """Requests in the order of their arrival, and what is planned for them; `places` in it."""

    planned: list[Planned | None]
    places: dict[K, int]


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A held request. `number`: its place in the order of arrival.

    `strict`: who has less goes first, whatever else; of one class, then, who has the lower `turn`,
    which is never touched again, since all grow older alike.
    """

    number: int
    planned: Planned
    strict: int
    turn: float
    claim: Claim


Survey = Callable[[Sequence[Wanted[K]]], Iterator[Sketch | None]]
"""What each of some requests is to do, in the order in which they are given; None for who finds no
place. What one has in mind is noted before the next is asked for."""


class Held(Generic[K]):
    """The held requests of one router, by keys of its choice."""

    def __init__(self, order: QueueOrder = "shortest", classes: Classes | None = None) -> None:
        self._queue_order = order
        self._classes = classes or Classes()
        self._entries: dict[K, Entry] = {}
        self._by_place: dict[Place, dict[K, Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def line_up(self, looking: Iterable[Wanted[K]], survey: Survey[K] | None) -> LinedUp[K]:
        """Plan those who look at one moment, in the order of their arrival; none of them goes yet.

        They go in the order that comes of it, each where it is best then: one that went before may
        have taken the place. `survey` says what each is to do by what is known now; None with
        policies that hold nobody: then they go by their precedence.
        """
        looking = sorted(looking, key=lambda wanted: wanted.number)
        if len(looking) == 1:
            return LinedUp([looking[0].key], {}, [])
        woken: dict[K, None] = {}
        held: dict[K, Hold] = {}
        if survey is not None:
            for wanted, sketch in zip(looking, survey(looking), strict=True):
                planned = None if sketch is None else sketch.planned
                woken |= dict.fromkeys(self.intend(wanted, planned))
                if sketch is not None and sketch.hold is not None:
                    held[wanted.key] = sketch.hold
        for wanted in looking:
            woken.pop(wanted.key, None)
        free, entries = [wanted for wanted in looking if wanted.key not in held], self._entries
        order = list(self._in_turn([each.key for each in free if each.key in entries]))
        others = [_turn_of(wanted) for wanted in free if wanted.key not in entries]
        order += self._classes.in_turn(others)
        return LinedUp(order, held, list(woken))

    def line(self, joining: Mapping[K, int]) -> Line[K]:
        """All who are held, and those who join them, with their numbers, by arrival."""
        entries = self._entries
        numbers = {key: entry.number for key, entry in entries.items()} | dict(joining)
        keys = sorted(numbers, key=numbers.__getitem__)
        return Line(
            [entries[key].planned if key in entries else None for key in keys],
            {key: at for at, key in enumerate(keys) if key in joining},
        )

    def intend(self, wanted: Wanted[K], planned: Planned | None) -> Sequence[K]:
        """Note for which place a request is held, if any; who has another turn for it now.

        These have to look again: who is first now, and who was.
        """
        key = wanted.key
        before = self._entries.get(key)
        if planned == (before and before.planned):
            return ()
        places = [each.place for each in (before and before.planned, planned) if each]
        firsts = {place: self.first(place) for place in places}
        if planned is None:
            self.drop(key)
        else:
            strict, since_ms = wanted.precedence
            jump_s = (wanted.since_ms - since_ms) / 1000
            self.hold(key, wanted.number, since_ms, planned, strict, jump_s, wanted.claim)
        woken: list[K] = []
        for place, first in firsts.items():
            if (now_first := self.first(place)) != first:
                woken += [each for each in (now_first, first) if each not in (None, key)]
        return woken

    def looks_ms(self, key: K, hold: Hold) -> int | None:
        """When a held request looks again by itself; None: only at news, and now and then.

        Of those planned for one place the next in turn does when that is predicted free. The others
        follow one by one as it goes.
        """
        if hold.planned is not None and self.first(hold.planned.place) != key:
            return hold.planned.until_ms
        return hold.wake_at_ms

    def woken(self, worker: str) -> Sequence[K]:
        """Who looks again after news of a worker, in turn: those planned for it; all, if few."""
        few = len(self._entries) <= WOKEN
        places = None if few else [place for place in self._by_place if place.worker == worker]
        return list(islice(self._in_turn(self._planned_for(places)), WOKEN))

    def hold(
        self, key: K, number: int, since_ms: float, planned: Planned, strict: int = 0,
        jump_s: float = 0.0, claim: Claim = NO_CLAIM,
    ) -> None:  # fmt: skip
        """Plan a request for a place, whatever was planned before.

        `since_ms`: how old it counts as, with the jump; `strict` and `claim` as in `Entry`.
        """
        self.drop(key)
        turn = planned.prefill_ms + AGEING * since_ms
        if self._queue_order == "fcfs":
            turn = since_ms
        elif self._queue_order == "wspt":
            turn += planned.prefill_ms / (1 + max(jump_s, 0.0)) - planned.prefill_ms
        entry = self._entries[key] = Entry(number, planned, strict, turn, claim)
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

    def others(self, key: K) -> list[Planned]:
        """What is planned for all but this one, in the order of their arrival."""
        entries = [entry for each, entry in self._entries.items() if each != key]
        return [entry.planned for entry in sorted(entries, key=attrgetter("number"))]

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
        if there is None:
            return None
        return next(iter(there)) if len(there) == 1 else min(there, key=self._order)

    def in_turn(self, places: Iterable[Place] | None = None) -> list[K]:
        """Who is planned for these places, or for any, in the order in which they go."""
        return list(self._in_turn(self._planned_for(places)))

    def _planned_for(self, places: Iterable[Place] | None) -> Iterable[K]:
        if places is None:
            return self._entries
        return (key for place in places for key in self._by_place.get(place, ()))

    def _in_turn(self, keys: Iterable[K]) -> Iterator[K]:
        entries = ((key, self._entries[key]) for key in keys)
        return self._classes.in_turn(
            Turn(key, entry.claim, entry.strict, (entry.turn, entry.number))
            for key, entry in entries
        )

    def _order(self, key: K) -> tuple[int, float, float, int]:
        entry = self._entries[key]
        return entry.strict, self._classes.given(entry.claim.queue), entry.turn, entry.number


def _turn_of(wanted: Wanted[K]) -> Turn[K]:
    strict, since_ms = wanted.precedence
    return Turn(wanted.key, wanted.claim, strict, (since_ms, wanted.number))
