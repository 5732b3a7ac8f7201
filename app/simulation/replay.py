"""A trace against a fleet: one loop over events, in the order of their times.

    arrival ──► waiting ──plan──► a worker's engine ──► first token ──► last token
                   ▲                                        │              │
                   └──────────── looked at again ◄──────────┴──────────────┘

Decisions are `app/routing/plan.py`'s and steps `app/engine/step.py`'s, so a figure from here speaks
of what is shipped. No Kafka, no event loop, no clock: nothing takes time but what `Conditions` say.

At one moment: steps end first, one worker after the other; then routers read and look, one after
the other; what is sent to a worker then, or by arrivals of the same moment together, counts in the
step that it begins next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple
from zlib import crc32

from app.engine.batch import Sequence as Modelled
from app.engine.batch import Shape, Step
from app.routing.decisions import Chosen, Tuning
from app.routing.turns import later_ms
from app.simulation.conditions import ORDINARY, Conditions
from app.simulation.knowledge import (
    HEARTBEAT_MS,
    Books,
    Folds,
    Knowledge,
    Told,
    assigned,
    finished,
    prefilled,
)
from app.simulation.router import Router, SimulationFailed
from app.simulation.traffic import Arrival, Traced
from app.simulation.worker import NEVER, Worker
from app.trace import BadTrace

PATIENCE_MS = 60_000.0
"""Beyond it, a request that is held while all workers are idle is held for ever."""


@dataclass(slots=True, eq=False)
class Life:
    """What became of a request; times in ms since the beginning, NEVER before they are known.

    `router`: the number of the one that it came to. `cached_tokens`: of its prompt, when it was
    admitted first.
    """

    request: Traced
    arrived_ms: float
    router: int = 0
    worker: str = ""
    sent_ms: float = NEVER
    first_token_ms: float = NEVER
    last_token_ms: float = NEVER
    cached_tokens: int = 0

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.prompt.request.id


class Seat(NamedTuple):
    """A router, and what it knows."""

    router: Router
    knowledge: Knowledge


@dataclass(slots=True)
class Replay:
    """One run of a trace. `progress` hears how many more requests have come."""

    workers: list[Worker]
    seats: list[Seat]
    folds: Folds
    conditions: Conditions
    arrivals: Sequence[Arrival]
    rng: Random
    progress: Callable[[int], None] = lambda _: None
    lives: list[Life] = field(default_factory=list)
    _telling_ms: float = field(init=False)
    """From what happens on a worker until routers read of it."""
    _wake_ms: float = NEVER
    """When a router looks next without any news."""
    _beat_ms: float = 0.0
    _moved_ms: float = 0.0
    """When a request came, or a step ended, last."""
    _ends: list[tuple[float, int]] = field(default_factory=list)
    """A heap of ends of steps with the worker's number; an entry that its worker does not agree
    with any more says nothing."""
    _under_way: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    """A heap of what happens later, when, and its place among what happens then."""
    _put_off: int = 0
    _heard: dict[str, None] = field(default_factory=dict)
    """Workers of which routers have read something that they have not looked at yet."""
    _idle: dict[int, Worker] = field(default_factory=dict)
    """Workers that begin a step as soon as everybody has been sent who is sent now."""

    def __post_init__(self) -> None:
        self._telling_ms = self.conditions.notice_ms + self.conditions.lag_ms

    def run(self) -> list[Life]:
        """Play all of it; the lives in the order of arrival. Raises as `prepared` says."""
        while True:
            came = len(self.lives)
            arrival = self.arrivals[came].at_ms if came < len(self.arrivals) else NEVER
            end = self._ends[0][0] if self._ends else NEVER
            later = self._under_way[0][0] if self._under_way else NEVER
            wake = self._wake_ms
            news = min(arrival, later, wake)
            if end == news == NEVER:
                return self.lives
            if end == arrival == later == NEVER and wake > self._moved_ms + PATIENCE_MS:
                held = sum(len(seat.router.waiting) for seat in self.seats)
                raise SimulationFailed(f"{held} requests are held for ever, though nobody works")
            if self._beat_ms <= min(end, news):
                self._beat(is_read=arrival < self._beat_ms + HEARTBEAT_MS)
            elif end <= news:
                self._end_step()
            else:
                self._arrive(news)
                self._catch_up(news)
                self._look(news)

    # --- events ----------------------------------------------------------------------------------

    def _beat(self, *, is_read: bool) -> None:
        """Let all workers send a heartbeat, if a router may look at it before the next one."""
        if is_read or any(seat.router.waiting for seat in self.seats):
            for worker in self.workers:
                self.folds.beat(worker, self._beat_ms)
        self._beat_ms += HEARTBEAT_MS

    def _arrive(self, now_ms: float) -> None:
        """Take in all requests that come now."""
        came = number = len(self.lives)
        while number < len(self.arrivals) and self.arrivals[number].at_ms <= now_ms:
            self._moved_ms, request = self.arrivals[number]
            life = Life(request, self._moved_ms)
            life.router = crc32(life.id.encode()) % len(self.seats)
            self.lives.append(life)
            router = self.seats[life.router].router
            router.arrive(request.prompt, number, self.rng.getrandbits(32), now_ms)
            number += 1
        self.progress(number - came)

    def _catch_up(self, now_ms: float) -> None:
        """Let everything happen that was put off until now."""
        while self._under_way and self._under_way[0][0] <= now_ms:
            self._moved_ms = now_ms
            heappop(self._under_way)[2]()

    def _end_step(self) -> None:
        now_ms, number = heappop(self._ends)
        worker = self.workers[number]
        if worker.ends_at_ms != now_ms:
            return
        self._moved_ms = now_ms
        done = worker.end()
        if done is not None:
            if done.removed or done.stored:
                if self._telling_ms:
                    changed = partial(self.folds.cache_changed, worker, done)
                    self._put(now_ms, self._telling_ms, changed)
                else:
                    self.folds.cache_changed(worker, done)
            if done.chunks or done.finished:
                self._note(worker, done, now_ms)
            if self._heard:
                self._look(now_ms)
        self._begin(worker, now_ms)

    def _note(self, worker: Worker, done: Step, now_ms: float) -> None:
        """Note first and last tokens."""
        for sequence, _, is_last in done.chunks:
            life = _life_of(sequence)
            if is_last and life.first_token_ms == NEVER:
                life.first_token_ms, life.cached_tokens = now_ms, sequence.cached_tokens
                took_ms = now_ms - life.sent_ms - self.conditions.hop_ms
                self._tell(life, prefilled(life.id, worker, life.cached_tokens, took_ms), now_ms)
        for sequence in done.finished:
            life = _life_of(sequence)
            life.last_token_ms = now_ms
            self._tell(life, finished(life.id, worker, life.request.output_tokens), now_ms)

    def _look(self, now_ms: float) -> None:
        """Let the routers decide what they can, and idle workers begin."""
        for seat in self.seats:
            if seat.router.waiting:
                seat.router.hear(self._heard)
                for number, decision in seat.router.look(now_ms):
                    self._send(self.lives[number], decision, now_ms)
        self._wake_ms = min([seat.router.wake_ms for seat in self.seats])
        self._heard.clear()
        for worker in self._idle.values():
            self._begin(worker, now_ms)
        self._idle.clear()

    # --- what they lead to -----------------------------------------------------------------------

    def _send(self, life: Life, decision: Chosen, now_ms: float) -> None:
        """A decision counts at once where it was taken, and elsewhere once it is read."""
        worker = self.workers[decision.place.epoch]
        life.worker, life.sent_ms = worker.name, now_ms
        self._put(now_ms, self.conditions.hop_ms, partial(self._admit, life, worker))
        knowledge = self.seats[life.router].knowledge
        record = assigned(life.id, decision)
        if not self.conditions.lag_ms:
            knowledge.books.told(record, now_ms)
            return
        knowledge.own.add(decision.place, decision.burden)

        def read() -> None:
            knowledge.own.remove(decision.place, decision.burden)
            knowledge.books.told(record, now_ms)

        self._put(now_ms, self.conditions.lag_ms, read)

    def _admit(self, life: Life, worker: Worker) -> None:
        now_ms = life.sent_ms + self.conditions.hop_ms
        request = life.request
        sequence = Modelled(life, request.prompt.tokens, request.output_tokens, request.chunks)
        before = worker.ends_at_ms
        try:
            worker.admit(sequence, now_ms)
        except ValueError as e:
            raise BadTrace(f"request {life.id} fits no worker: {e}") from e
        if before == NEVER:
            self._idle[worker.epoch] = worker
        elif worker.ends_at_ms != before:  # it was in quiet steps, and now is in the present one
            heappush(self._ends, (worker.ends_at_ms, worker.epoch))

    def _tell(self, life: Life, record: Told, now_ms: float) -> None:
        """A worker writes something; who reads it looks."""
        books = self.seats[life.router].knowledge.books

        def read() -> None:
            books.told(record, now_ms)
            self._heard[record.worker] = None

        self._put(now_ms, self._telling_ms, read)

    def _put(self, now_ms: float, delay_ms: float, happen: Callable[[], None]) -> None:
        """Let something happen: now, or so much later."""
        if delay_ms <= 0:
            happen()
        else:
            self._put_off += 1
            heappush(self._under_way, (now_ms + delay_ms, self._put_off, happen))

    def _begin(self, worker: Worker, now_ms: float) -> None:
        """Let a worker that is not in a step begin one, if it has work."""
        if worker.ends_at_ms != NEVER:
            return
        worker.begin(now_ms)
        if worker.ends_at_ms != NEVER:
            heappush(self._ends, (worker.ends_at_ms, worker.epoch))


def prepared(
    arrivals: Sequence[Arrival],
    workers: int,
    shape: Shape,
    tuning: Tuning,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
    conditions: Conditions = ORDINARY,
) -> Replay:
    """A trace before so many equal workers, empty at first.

    What comes of it is a function of the arguments. `run` raises BadTrace for a request that no
    cache can hold, and SimulationFailed.
    """
    fleet = [Worker(name, number, shape) for number, name in enumerate(names_of(workers))]
    keys = {
        chunk: key
        for arrival in arrivals
        for chunk, key in zip(arrival.request.chunks, arrival.request.keys, strict=True)
    }
    folds = Folds(fleet, shape, keys, tells_curves=conditions.tells_curves)
    books = Books(conditions.lag_ms)
    seats = []
    routers = [f"router-{number}" for number in range(conditions.routers)]
    for router in routers:
        later = later_ms(router, routers, names_of(workers), conditions.lag_ms)
        if conditions.shares_ledger:
            knowledge = Knowledge(folds, books, later)
        else:
            knowledge = Knowledge(folds, Books())
        seats.append(Seat(Router(knowledge, tuning), knowledge))
    return Replay(fleet, seats, folds, conditions, arrivals, Random(seed), progress)


def names_of(workers: int) -> list[str]:
    """The names of so many workers; their order is that of their numbers."""
    digits = len(str(workers - 1))
    return [f"worker-{number:0{digits}}" for number in range(workers)]


def _life_of(sequence: Modelled) -> Life:
    life = sequence.key
    assert isinstance(life, Life)
    return life
