"""Timers of a lane by request id, in the time of one clock: when to reconcile a request again."""

from __future__ import annotations

from heapq import heappop, heappush

TIMER_RESOLUTION_MS = 64
"""Timers are rounded up to whole steps. Those of ten minutes are 10 000 steps at most, however many
requests they are for."""


class RequestTimers:
    """One timer for each id at most. To set, move or drop one costs the same however many run."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        """A heap of the steps that have timers, or had."""
        self._ids: dict[int, dict[str, None]] = {}
        self._step_of: dict[str, int] = {}

    def set(self, request_id: str, at_ms: int | None) -> None:
        """Set the timer of an id, instead of any other; None: no timer."""
        step = None if at_ms is None else -(-at_ms // TIMER_RESOLUTION_MS)
        before = self._step_of.get(request_id)
        if step == before:
            return
        if before is not None:
            del self._ids[before][request_id]
            del self._step_of[request_id]
        if step is None:
            return
        ids = self._ids.get(step)
        if ids is None:
            ids = self._ids[step] = {}
            heappush(self._steps, step)
        ids[request_id] = None
        self._step_of[request_id] = step

    def due(self, now_ms: int) -> list[str]:
        """Remove and return the ids whose timers have expired, in the order of their times."""
        found: list[str] = []
        while self._steps and self._steps[0] * TIMER_RESOLUTION_MS <= now_ms:
            for request_id in self._ids.pop(heappop(self._steps)):
                del self._step_of[request_id]
                found.append(request_id)
        return found
