"""The router of a simulated fleet: who waits, when each looks for a place, and what `plan` says.

A request looks when it comes. One that is held looks again when the time comes that `plan` gave
with that, when news come of workers, and at least once in `LOOK_MS`. Those who look at one moment
are planned together before one of them goes (`app/routing/held.py`). All as in a real router, where
nothing takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from app.routing.decisions import Chosen, Hold, Planned, Refuse, Tuning
from app.routing.held import Held, Sketch, Survey, Wanted
from app.routing.plan import plan
from app.routing.prompt import Prompt
from app.routing.survey import Surveyor, survey
from app.simulation.knowledge import Knowledge
from app.simulation.worker import NEVER

LOOK_MS = 1000.0


class SimulationFailed(Exception):
    """A policy left requests behind, or refused one; no figures come of that."""


@dataclass(slots=True)
class Router:
    """See the module. Requests are known by their numbers."""

    knowledge: Knowledge
    tuning: Tuning
    waiting: dict[int, Wanted[int]] = field(default_factory=dict)
    """In the order of arrival."""
    _due: dict[int, None] = field(default_factory=dict)
    """Who looks now."""
    _held: Held[int] = field(default_factory=Held)
    _alarms: list[tuple[float, int]] = field(default_factory=list)
    """A heap of times and who looks then; only the entry in `_alarm_ms` counts."""
    _alarm_ms: dict[int, float] = field(default_factory=dict)
    _sent: int = 0

    @property
    def wake_ms(self) -> float:
        """When somebody looks next without any news; NEVER if nobody does."""
        while self._alarms:
            at_ms, number = self._alarms[0]
            if self._alarm_ms.get(number) == at_ms:
                return at_ms
            heappop(self._alarms)
        return NEVER

    def arrive(self, prompt: Prompt, number: int, seed: int, now_ms: float) -> None:
        """A request comes."""
        self.waiting[number] = Wanted(number, number, prompt, seed, int(now_ms))
        self._due[number] = None

    def hear(self, workers: Iterable[str]) -> None:
        """Requests got their first or last tokens on these workers."""
        due = self._due
        for worker in workers:
            due |= dict.fromkeys(self._held.woken(worker))
        if len(self._held) < len(self.waiting):  # some are planned for no place
            due |= dict.fromkeys([n for n in self.waiting if self._held.place(n) is None])

    def look(self, now_ms: float) -> Iterator[tuple[int, Chosen]]:
        """Plan all who look now; the caller tells of each decision before it asks for the next.

        Raises SimulationFailed for a refusal.
        """
        while self.wake_ms <= now_ms:
            self._due[self._alarms[0][1]] = None
            del self._alarm_ms[self._alarms[0][1]]
        while self._due:
            due, self._due = self._due, {}
            looking = [self.waiting[number] for number in due if number in self.waiting]
            lined_up = self._held.line_up(looking, self._survey(now_ms))
            self._due |= dict.fromkeys(lined_up.woken)
            for number, hold in lined_up.held.items():
                self._set_alarm(number, hold, now_ms)
            for number in lined_up.order:
                planned = self._plan(self.waiting[number], now_ms)
                if isinstance(planned, Hold):
                    self._hold(number, planned, now_ms)
                else:
                    self._intend(number, None)
                    del self.waiting[number]
                    self._alarm_ms.pop(number, None)
                    self._sent += 1
                    yield number, planned

    def _survey(self, now_ms: float) -> Survey[int] | None:
        if not self.tuning.holds:
            return None

        def surveyed(looking: Sequence[Wanted[int]]) -> Iterator[Sketch | None]:
            by = Surveyor(self.knowledge.view(now_ms, ()), self.tuning)
            return survey(looking, self._held, by, lambda one: self._plan(one, now_ms))

        return surveyed

    def _plan(self, wanted: Wanted[int], now_ms: float) -> Chosen | Hold:
        others = self._held.others(wanted.key)
        planned = plan(
            wanted.prompt, self.knowledge.view(now_ms, others), self.tuning,
            seed=wanted.seed, turn=self._sent, since_ms=wanted.since_ms,
        )  # fmt: skip
        if isinstance(planned, Refuse):
            raise SimulationFailed(
                f"request {wanted.prompt.request.id} is refused: {planned.message}"
            )
        return planned

    def _hold(self, number: int, hold: Hold, now_ms: float) -> None:
        """Let a request wait."""
        self._intend(number, hold.planned)
        self._set_alarm(number, hold, now_ms)

    def _set_alarm(self, number: int, hold: Hold, now_ms: float) -> None:
        """Note when a request that waits looks again; never at once."""
        at_ms = self._held.looks_ms(number, hold)
        soon, late = int(now_ms) + 1.0, now_ms + LOOK_MS
        self._alarm_ms[number] = alarm = late if at_ms is None else min(max(at_ms, soon), late)
        heappush(self._alarms, (alarm, number))

    def _intend(self, number: int, planned: Planned | None) -> None:
        """Note for which place a request is held, if any; who has another turn then looks."""
        self._due |= dict.fromkeys(self._held.intend(self.waiting[number], planned))
