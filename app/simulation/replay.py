"""A trace against a fleet: one loop over events, in the order of their times.

    arrival ──► waiting ──plan──► a worker's engine ──► first token ──► last token
                   ▲                                        │              │
                   └──────────── looked at again ◄──────────┴──────────────┘

Decisions are `app/routing/plan.py`'s and steps `app/engine/step.py`'s, so a figure from here speaks
of what is shipped. No Kafka, no event loop, no clock: a decision is taken and arrives in no time.

At one moment: steps end first, one worker after the other; what is sent to a worker then, or by
arrivals of the same moment together, counts in the step that it begins next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from app.engine.batch import Sequence as Modelled
from app.engine.batch import Shape, Step
from app.routing.plan import Chosen, Tuning
from app.simulation.knowledge import HEARTBEAT_MS, Knowledge
from app.simulation.router import Router, SimulationFailed
from app.simulation.traffic import Arrival, Traced
from app.simulation.worker import NEVER, Worker
from app.trace import BadTrace

PATIENCE_MS = 60_000.0
"""Beyond it, a request that is held while all workers are idle is held for ever."""


@dataclass(slots=True, eq=False)
class Life:
    """What became of a request; times in ms since the beginning, NEVER before they are known.

    `cached_tokens`: of its prompt, when it was admitted first.
    """

    request: Traced
    arrived_ms: float
    worker: str = ""
    sent_ms: float = NEVER
    first_token_ms: float = NEVER
    last_token_ms: float = NEVER
    cached_tokens: int = 0

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.prompt.request.id


@dataclass(slots=True)
class Replay:
    """One run of a trace. `progress` hears how many more requests have come."""

    workers: list[Worker]
    router: Router
    knowledge: Knowledge
    arrivals: Sequence[Arrival]
    rng: Random
    progress: Callable[[int], None] = lambda _: None
    lives: list[Life] = field(default_factory=list)
    _beat_ms: float = 0.0
    _moved_ms: float = 0.0
    """When a request came, or a step ended, last."""
    _ends: list[tuple[float, int]] = field(default_factory=list)
    """A heap of ends of steps with the worker's number; an entry that its worker does not agree
    with any more says nothing."""

    def run(self) -> list[Life]:
        """Play all of it; the lives in the order of arrival. Raises as `prepared` says."""
        while True:
            came = len(self.lives)
            arrival = self.arrivals[came].at_ms if came < len(self.arrivals) else NEVER
            end = self._ends[0][0] if self._ends else NEVER
            news = min(arrival, self.router.wake_ms)
            if end == news == NEVER:
                return self.lives
            if end == arrival == NEVER and news > self._moved_ms + PATIENCE_MS:
                held = len(self.router.waiting)
                raise SimulationFailed(f"{held} requests are held for ever, though nobody works")
            if self._beat_ms <= min(end, news):
                self._beat()
            elif end <= news:
                self._end_step()
            else:
                self._arrive(news)
                self._look(news)

    # --- events ----------------------------------------------------------------------------------

    def _beat(self) -> None:
        for worker in self.workers:
            self.knowledge.beat(worker, self._beat_ms)
        self._beat_ms += HEARTBEAT_MS

    def _arrive(self, now_ms: float) -> None:
        """Take in all requests that come now."""
        came = number = len(self.lives)
        while number < len(self.arrivals) and self.arrivals[number].at_ms <= now_ms:
            self._moved_ms, request = self.arrivals[number]
            self.lives.append(Life(request, self._moved_ms))
            self.router.arrive(request.prompt, number, self.rng.getrandbits(32), now_ms)
            number += 1
        self.progress(number - came)

    def _end_step(self) -> None:
        now_ms, number = heappop(self._ends)
        worker = self.workers[number]
        if worker.ends_at_ms != now_ms:
            return
        self._moved_ms = now_ms
        done = worker.end()
        if done is not None:
            self.knowledge.cache_changed(worker, done, now_ms)
            if self._note(worker, done, now_ms) and self.router.waiting:
                self.router.hear(worker.name)
                self._look(now_ms)
        self._begin(worker, now_ms)

    def _note(self, worker: Worker, done: Step, now_ms: float) -> bool:
        """Note first and last tokens; whether there are any."""
        news = False
        for sequence, _, is_last in done.chunks:
            life = _life_of(sequence)
            if is_last and life.first_token_ms == NEVER:
                news = True
                life.first_token_ms, life.cached_tokens = now_ms, sequence.cached_tokens
                took_ms = now_ms - life.sent_ms
                self.knowledge.prefilled(life.id, worker, life.cached_tokens, took_ms, now_ms)
        for sequence in done.finished:
            life = _life_of(sequence)
            news = True
            life.last_token_ms = now_ms
            self.knowledge.finished(life.id, worker, life.request.output_tokens, now_ms)
        return news

    def _look(self, now_ms: float) -> None:
        """Let the router decide what it can, and idle workers begin."""
        idle: dict[int, Worker] = {}
        for number, decision in self.router.look(now_ms):
            worker = self._send(self.lives[number], decision, now_ms)
            if worker.ends_at_ms == NEVER:
                idle[worker.epoch] = worker
        for worker in idle.values():
            self._begin(worker, now_ms)

    # --- what they lead to -----------------------------------------------------------------------

    def _send(self, life: Life, decision: Chosen, now_ms: float) -> Worker:
        worker = self.workers[decision.place.epoch]
        life.worker, life.sent_ms = worker.name, now_ms
        request = life.request
        sequence = Modelled(life, request.prompt.tokens, request.output_tokens, request.chunks)
        before = worker.ends_at_ms
        try:
            worker.admit(sequence, now_ms)
        except ValueError as e:
            raise BadTrace(f"request {life.id} fits no worker: {e}") from e
        self.knowledge.decided(life.id, decision, now_ms)
        if worker.ends_at_ms != before:  # it was in quiet steps, and now is in the present one
            heappush(self._ends, (worker.ends_at_ms, worker.epoch))
        return worker

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
) -> Replay:
    """A trace before so many equal workers, empty at first.

    What comes of it is a function of the arguments. `run` raises BadTrace for a request that no
    cache can hold, and SimulationFailed.
    """
    digits = len(str(workers - 1))
    fleet = [Worker(f"worker-{number:0{digits}}", number, shape) for number in range(workers)]
    keys = {
        chunk: key
        for arrival in arrivals
        for chunk, key in zip(arrival.request.chunks, arrival.request.keys, strict=True)
    }
    knowledge = Knowledge(fleet, shape, keys)
    router = Router(knowledge, tuning)
    return Replay(fleet, router, knowledge, arrivals, Random(seed), progress)


def _life_of(sequence: Modelled) -> Life:
    life = sequence.key
    assert isinstance(life, Life)
    return life
