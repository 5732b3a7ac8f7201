"""Simulated workers: the engine model with its current step, and the queue of events to come.

Decode-only steps are batched (`app/engine/simulated/fast_forward.py`) up to the next event.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.app.engine.simulated.batch import (
    DECODE,
    FINISHED,
    PREFILL,
    BatchSequence,
    BatchState,
    EngineLimits,
    StepResult,
)
from kvlane.app.engine.simulated.fast_forward import (
    decode_only_ends_ms,
    decode_only_steps,
    fast_forward,
)
from kvlane.app.engine.simulated.step import add_sequence, remove_sequence, run_step
from kvlane.app.perf_curves import PerfCurves

NEVER = math.inf

MIN_BATCHED_STEPS = 1
MAX_BATCHED_STEPS = 512
"""The next arrival discards the rest of a batch."""


class RemovedSequence(NamedTuple):
    """A sequence that was removed, with the tokens that it had made, and those in the cache."""

    sequence: BatchSequence
    output_tokens: int
    computed_tokens: int


class SimulatedWorker:
    """A worker of the fleet. `epoch` is its number; `ends_at_ms` is NEVER while it is idle."""

    __slots__ = (
        "_began_ms", "_ends", "_gaps", "_removals", "_step", "ends_at_ms", "epoch", "name", "state",
    )  # fmt: skip

    def __init__(self, name: str, epoch: int, shape: EngineLimits) -> None:
        self.name = name
        self.epoch = epoch
        self.state = BatchState(shape)
        self.ends_at_ms = NEVER
        self._step: StepResult | None = None
        self._began_ms = 0.0
        self._gaps: list[tuple[NDArray[np.float64], int]] = []
        self._removals: list[BatchSequence] = []
        self._ends: NDArray[np.float64] | None = None
        """Ends of the current decode-only steps; the state is that before them."""

    def admit(self, sequence: BatchSequence, now_ms: float) -> None:
        add_sequence(self.state, sequence)
        self._end_after_current(now_ms)

    def remove(self, sequence: BatchSequence, now_ms: float) -> None:
        """Remove a request at the end of the current step; `removed` returns it then."""
        self._removals.append(sequence)
        self._end_after_current(now_ms)

    def change_curves(self, curves: PerfCurves, now_ms: float) -> None:
        self._end_after_current(now_ms)
        self.state.limits = self.state.limits._replace(curves=curves)

    def removed(self) -> list[RemovedSequence]:
        """Remove the runs marked for removal that have not ended; not during a step."""
        found = []
        for sequence in self._removals:
            if sequence.phase == FINISHED:
                continue
            made = sequence.prefill_target - sequence.prompt_tokens
            computed = sequence.computed_tokens if sequence.phase == PREFILL else 0
            if sequence.phase == DECODE:
                computed = sequence.offset + self.state.step_count
                made = computed + 1 - sequence.prompt_tokens
            remove_sequence(self.state, sequence)
            found.append(RemovedSequence(sequence, made, computed))
        self._removals.clear()
        return found

    def _end_after_current(self, now_ms: float) -> None:
        """Cut the decode-only steps after the current one."""
        if self._ends is not None:
            current = int(self._ends.searchsorted(now_ms, side="right"))
            self._ends = self._ends[: current + 1]
            self.ends_at_ms = float(self._ends[-1])

    def begin(self, now_ms: float) -> None:
        """Start the next step, if there is work; not during a step."""
        assert self.ends_at_ms == NEVER, f"{self.name} is in a step"
        self._began_ms = now_ms
        quiet = decode_only_steps(self.state)
        if quiet >= MIN_BATCHED_STEPS:
            self._ends = decode_only_ends_ms(self.state, now_ms, min(quiet, MAX_BATCHED_STEPS))
            self.ends_at_ms = float(self._ends[-1])
            return
        self._step = run_step(self.state)
        if self._step is not None:
            self.ends_at_ms = now_ms + self._step.duration_ms

    def end(self) -> StepResult | None:
        """End the step, and return it; None for decode-only steps, which only made tokens."""
        self.ends_at_ms = NEVER
        if self._ends is not None:
            gaps = np.diff(self._ends, prepend=self._began_ms)
            self._gaps.append((gaps, len(self.state.decoding)))
            fast_forward(self.state, len(self._ends))
            self._ends = None
            return None
        done, self._step = self._step, None
        if done is not None and (count := len(done.decoded) - len(done.received)) > 0:
            self._gaps.append((np.array([done.duration_ms]), count))
        return done

    def started(self) -> tuple[BatchSequence, ...]:
        return () if self._step is None else self._step.received

    def token_gaps(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Times between tokens of running requests in ms, by steps of decode, and the number of
        each."""
        counts = [np.full(len(gaps), count, np.int64) for gaps, count in self._gaps]
        gaps = [gaps for gaps, _ in self._gaps]
        return np.concatenate([[], *gaps]), np.concatenate([np.empty(0, np.int64), *counts])

    def output_tokens(self, now_ms: float) -> int:
        """Tokens of all decoding requests, without those of the current step."""
        state, over = self.state, self.state.step_count
        if self._ends is not None:
            over += int(self._ends.searchsorted(now_ms))
        elif self._step is not None:
            over -= 1
        tokens = state.offset_sum + len(state.decoding) * (over + 1)
        return tokens - sum([sequence.prompt_tokens for sequence in state.decoding])


@dataclass(slots=True)
class EventQueue:
    """Ends of steps by worker, and delayed actions; actions of one time keep their order."""

    workers: list[SimulatedWorker]
    _ends: list[tuple[float, int]] = field(default_factory=list)
    """Heap of ends with the worker's number; stale where it differs from the worker's
    `ends_at_ms`."""
    _actions: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
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
