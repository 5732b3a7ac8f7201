"""Simulated worker: the engine model with its current step and the time of its end, in ms.

Steps are those of `app/engine/simulated/step.py`, as in the simulated engine of a deployment.
Decode-only steps are batched (`app/engine/simulated/fast_forward.py`) up to the next event or
arrival.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from app.engine.simulated.batch import BatchSequence, BatchState, EngineLimits, StepResult
from app.engine.simulated.fast_forward import decode_only_ends_ms, decode_only_steps, fast_forward
from app.engine.simulated.step import add_sequence, run_step

NEVER = math.inf

MIN_BATCHED_STEPS = 1
"""Minimum number of decode-only steps that are batched."""
MAX_BATCHED_STEPS = 512
"""Maximum number of decode-only steps in a batch: the next arrival discards the rest."""


class SimulatedWorker:
    """A worker of the fleet. `epoch` is its number; `ends_at_ms` is NEVER while it is idle."""

    __slots__ = ("_ends", "_step", "ends_at_ms", "epoch", "name", "state")

    def __init__(self, name: str, epoch: int, shape: EngineLimits) -> None:
        self.name = name
        self.epoch = epoch
        self.state = BatchState(shape)
        self.ends_at_ms = NEVER
        self._step: StepResult | None = None
        self._ends: NDArray[np.float64] | None = None
        """Ends of the current batch of decode-only steps; the state is that before them."""

    def admit(self, sequence: BatchSequence, now_ms: float) -> None:
        """Admit a request to the next step. Raises ValueError, see `run_step`."""
        add_sequence(self.state, sequence)
        if self._ends is not None:
            current = int(self._ends.searchsorted(now_ms, side="right"))
            self._ends = self._ends[: current + 1]
            self.ends_at_ms = float(self._ends[-1])

    def begin(self, now_ms: float) -> None:
        """Start the next step, if there is work; not during a step."""
        assert self.ends_at_ms == NEVER, f"{self.name} is in a step"
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
            fast_forward(self.state, len(self._ends))
            self._ends = None
            return None
        done, self._step = self._step, None
        return done

    def output_tokens(self, now_ms: float) -> int:
        """Tokens of all decoding requests, without those of the current step."""
        state, over = self.state, self.state.step_count
        if self._ends is not None:
            over += int(self._ends.searchsorted(now_ms))
        elif self._step is not None:
            over -= 1
        tokens = state.offset_sum + len(state.decoding) * (over + 1)
        return tokens - sum([sequence.prompt_tokens for sequence in state.decoding])
