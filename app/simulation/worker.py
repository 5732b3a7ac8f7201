"""An engine and its time: which step it is in, and when that ends, in ms.

The step is `app/engine/step.py`'s, as in the engine that is asked for tokens. Steps that only
decode are taken together (`app/engine/quiet.py`) until something happens, or somebody comes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import EngineState, Sequence, Shape, Step
from app.engine.quiet import pass_quietly, quiet_ends_ms, quiet_steps
from app.engine.step import admit, step

NEVER = math.inf

FEW = 1
"""Quiet steps that are worth being taken together."""
MANY = 512
"""More at a time are not worth it: the next arrival makes them void."""


class Worker:
    """One of the fleet. `epoch` is its number, `ends_at_ms` NEVER while it has no work."""

    __slots__ = ("_ends", "_step", "ends_at_ms", "epoch", "name", "state")

    def __init__(self, name: str, epoch: int, shape: Shape) -> None:
        self.name = name
        self.epoch = epoch
        self.state = EngineState(shape)
        self.ends_at_ms = NEVER
        self._step: Step | None = None
        self._ends: NDArray[np.float64] | None = None
        """When each of the quiet steps ends that it is in; the state is still before them."""

    def admit(self, sequence: Sequence, now_ms: float) -> None:
        """Take a request in; it counts from the next step on. Raises ValueError, see `step`."""
        admit(self.state, sequence)
        if self._ends is not None:
            under_way = int(self._ends.searchsorted(now_ms, side="right"))
            self._ends = self._ends[: under_way + 1]
            self.ends_at_ms = float(self._ends[-1])

    def begin(self, now_ms: float) -> None:
        """Go on with the next step, if there is work; not within a step."""
        assert self.ends_at_ms == NEVER, f"{self.name} is in a step"
        quiet = quiet_steps(self.state)
        if quiet >= FEW:
            self._ends = quiet_ends_ms(self.state, now_ms, min(quiet, MANY))
            self.ends_at_ms = float(self._ends[-1])
            return
        self._step = step(self.state)
        if self._step is not None:
            self.ends_at_ms = now_ms + self._step.duration_ms

    def end(self) -> Step | None:
        """The step is over: what it did; None for quiet ones, which made tokens only."""
        self.ends_at_ms = NEVER
        if self._ends is not None:
            pass_quietly(self.state, len(self._ends))
            self._ends = None
            return None
        done, self._step = self._step, None
        return done

    def output_tokens(self, now_ms: float) -> int:
        """Of the requests in decode together, without those of the step that it is in."""
        state, over = self.state, self.state.clock
        if self._ends is not None:
            over += int(self._ends.searchsorted(now_ms))
        elif self._step is not None:
            over -= 1
        tokens = state.offsets + len(state.decoding) * (over + 1)
        return tokens - sum([sequence.prompt_tokens for sequence in state.decoding])
