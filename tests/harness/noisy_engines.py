"""Simulated engines whose steps vary: by noise, and by single long ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from kvlane.app.simulation.simulated_worker import NEVER, SimulatedWorker

Lengthen = Callable[[SimulatedWorker, int, Random], float]
"""The factor on the duration of a step of a worker, by the number of steps before it."""


def noise(sigma: float = 0.3, hiccups: float = 0.01) -> Lengthen:
    """A logarithmic normal distribution; a share of the steps takes ten times as long."""
    return lambda _, __, rng: (
        rng.lognormvariate(0, sigma) * (10.0 if rng.random() < hiccups else 1.0)
    )


def vary_steps(monkeypatch: pytest.MonkeyPatch, lengthen: Lengthen) -> None:
    """Let all simulated steps vary, those of equal runs equally."""
    begin, steps = SimulatedWorker.begin, dict[int, tuple[Random, list[int]]]()

    def begin_varied(worker: SimulatedWorker, now_ms: float) -> None:
        begin(worker, now_ms)
        if worker.ends_at_ms == NEVER:
            return
        rng, count = steps.setdefault(id(worker.state), (Random(worker.epoch), [0]))

        def factor() -> float:
            count[0] += 1
            return lengthen(worker, count[0] - 1, rng)

        if worker._ends is not None:
            gaps = np.diff(worker._ends, prepend=now_ms)
            worker._ends = now_ms + np.cumsum(gaps * [factor() for _ in gaps])
            worker.ends_at_ms = float(worker._ends[-1])
        elif worker._step is not None:
            duration_ms = worker._step.duration_ms * factor()
            worker._step = replace(worker._step, duration_ms=duration_ms)
            worker.ends_at_ms = now_ms + duration_ms

    monkeypatch.setattr(SimulatedWorker, "begin", begin_varied)
