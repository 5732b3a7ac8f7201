"""Steps in which nothing happens but that everybody in decode gets a token: many of them at once.

For replays, which ask for times and not for tokens. What is skipped here is what
`app/engine/step.py` would have done, to the bit: the same additions in the same order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import EngineState


def quiet_steps(state: EngineState) -> int:
    """How many of the next steps only decode: nobody waits, joins, ends, or needs a block."""
    if state.waiting_count or state.partial is not None or not state.decoding:
        return 0
    following = min(map(min, filter(None, (state.needs, state.fills, state.ends))))
    return following - state.clock - 1


def quiet_ends_ms(state: EngineState, begin_ms: float, steps: int) -> NDArray[np.float64]:
    """When each of so many quiet steps ends, if the first one begins at `begin_ms`."""
    curves, (a, b, c) = state.shape.curves, state.shape.curves.decode
    running = len(state.decoding)
    first = state.offsets + running * (state.clock + 1)
    lengths = np.arange(first, first + running * steps, running)
    usage = np.minimum(lengths / state.shape.capacity_tokens, 1.0)
    times = np.empty(steps + 1)
    times[0] = begin_ms
    np.maximum((a * usage + b) * usage + c, curves.decode_floor, out=times[1:])
    ends: NDArray[np.float64] = np.add.accumulate(times)[1:]
    return ends


def pass_quietly(state: EngineState, steps: int) -> None:
    """Take an engine through quiet steps."""
    state.clock += steps
