"""Steps in which nothing happens but that everybody in decode gets a token: many of them at once.

For replays, which ask for times and not for tokens. What is skipped here is what
`app/engine/step.py` would have done, to the bit: the same additions in the same order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import EngineState
from indexer.kernels import kernel


def quiet_steps(state: EngineState) -> int:
    """How many of the next steps only decode: nobody waits, joins, ends, or needs a block."""
    if state.waiting_count or state.partial is not None or not state.decoding:
        return 0
    following = min([*state.needs, *state.fills, *state.ends])
    return following - state.clock - 1


def quiet_ends_ms(state: EngineState, begin_ms: float, steps: int) -> NDArray[np.float64]:
    """When each of so many quiet steps ends, if the first one begins at `begin_ms`."""
    shape, running = state.shape, len(state.decoding)
    ends = np.empty(steps)
    fill_ends(
        state.offsets + running * (state.clock + 1), running, shape.block_size * shape.blocks,
        (*shape.curves.decode, shape.curves.decode_floor), begin_ms, ends,
    )  # fmt: skip
    return ends


@kernel()
def fill_ends(
    tokens: int, running: int, capacity_tokens: int, curve: tuple[float, float, float, float],
    at_ms: float, ends: NDArray[np.float64],
) -> None:  # fmt: skip
    """As many steps as `ends` has room for; `tokens` in the first of them, `running` more in each.

    `curve`: that of decode, and its floor, as `Curves.decode_ms` has them.
    """
    a, b, c, floor = curve
    for i in range(len(ends)):
        usage = min((tokens + running * i) / capacity_tokens, 1.0)
        at_ms += max((a * usage + b) * usage + c, floor)
        ends[i] = at_ms


def pass_quietly(state: EngineState, steps: int) -> None:
    """Take an engine through quiet steps."""
    state.clock += steps


def warm_up() -> None:
    """Call the kernel once, with what it will be called with."""
    fill_ends(1, 1, 1, (0.0, 0.0, 1.0, 1.0), 0.0, np.empty(1))
