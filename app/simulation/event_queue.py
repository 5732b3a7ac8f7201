"""The events to come of a simulated run, in order of time: ends of steps, and delayed actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvlane.app.simulation.simulated_worker import NEVER, SimulatedWorker


@dataclass(slots=True)
class EventQueue:
    """Ends of steps by worker, and actions by time; actions of one time keep their order."""

    workers: list[SimulatedWorker]
    _ends: list[tuple[float, int]] = field(default_factory=list)
    """Heap of ends of steps with the worker's number; an entry that differs from the worker's
    `ends_at_ms` is stale."""
    _actions: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    """Heap of delayed actions: time, sequence number, action."""
    _action_count: int = 0

    @property
    def next_end_ms(self) -> float:
        """Time of the first end of a step, which may be stale."""
        return self._ends[0][0] if self._ends else NEVER

    @property
    def next_action_ms(self) -> float:
        return self._actions[0][0] if self._actions else NEVER

    def add_end(self, worker: SimulatedWorker) -> None:
        heappush(self._ends, (worker.ends_at_ms, worker.epoch))

    def pop_end(self) -> SimulatedWorker | None:
        """Remove the first end; returns its worker, or None for a stale one."""
        at_ms, number = heappop(self._ends)
        worker = self.workers[number]
        return worker if worker.ends_at_ms == at_ms else None

    def delay(self, now_ms: float, delay_ms: float, action: Callable[[], None]) -> None:
        """Run an action now, or after a delay."""
        if delay_ms <= 0:
            action()
        else:
            self._action_count += 1
            heappush(self._actions, (now_ms + delay_ms, self._action_count, action))

    def run_actions(self, now_ms: float) -> bool:
        """Run all delayed actions up to now, with those that they add; returns whether any ran."""
        has_run = False
        while self._actions and self._actions[0][0] <= now_ms:
            has_run = True
            heappop(self._actions)[2]()
        return has_run
