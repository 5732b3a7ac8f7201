"""The engine of worlds that cache: what it says is what the echo engine says."""

from __future__ import annotations

from app.engine.batch import Shape
from app.engine.contract import Engine
from app.engine.simulated import SimulatedEngine
from streams.clock import Clock

ENGINE = Shape(block_size=2, blocks=1100)
"""Small blocks, since prompts are short; two endless answers fill it."""
CONTEXT = 2100
SLOWNESS = 10
"""A step takes as long as one of the echo engine, more or less."""


def engine_of(clock: Clock, model: str, sequences: int) -> Engine:
    """An engine that says what the echo engine says, and tells of its cache."""
    return SimulatedEngine(
        clock,
        ENGINE._replace(max_sequences=sequences),
        model=model,
        context_length=CONTEXT,
        speedup=1 / SLOWNESS,
    )
