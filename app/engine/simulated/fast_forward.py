"""Fast-forward over decode-only steps, for simulations, which need times and no tokens.

Equal to `app/engine/simulated/step.py` to the bit: the same additions in the same order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlane.app.engine.simulated.batch import BatchState
from kvlane.indexer.kernels import kernel


def decode_only_steps(state: BatchState) -> int:
    """Number of next steps in which no sequence waits, enters decode, ends, or needs a block."""
    if state.waiting_count or state.received or state.partial_prefill or not state.decoding:
        return 0
    following = min([*state.block_calendar, *state.fill_calendar, *state.end_calendar])
    return following - state.step_count - 1


def decode_only_ends_ms(state: BatchState, begin_ms: float, steps: int) -> NDArray[np.float64]:
    """End times of the next `steps` decode-only steps, the first of which begins at `begin_ms`."""
    shape, running = state.limits, len(state.decoding)
    ends = np.empty(steps)
    fill_end_times(
        state.offset_sum + running * (state.step_count + 1), running,
        shape.block_size * shape.cache_blocks,
        (*shape.curves.decode, shape.curves.min_decode_ms), begin_ms, ends,
    )  # fmt: skip
    return ends


@kernel()
def fill_end_times(
    tokens: int, running: int, capacity_tokens: int, curve: tuple[float, float, float, float],
    at_ms: float, ends: NDArray[np.float64],
) -> None:  # fmt: skip
    """Fill `end_calendar`, one step per element; `running` more tokens in each step. `curve`: the
    coefficients of decode and its floor, as in `PerfCurves.decode_ms`."""
    a, b, c, floor = curve
    for i in range(len(ends)):
        usage = min((tokens + running * i) / capacity_tokens, 1.0)
        at_ms += max((a * usage + b) * usage + c, floor)
        ends[i] = at_ms


def fast_forward(state: BatchState, steps: int) -> None:
    state.step_count += steps


def warm_up() -> None:
    """Compile the kernel by calling it once with the types of its arguments."""
    fill_end_times(1, 1, 1, (0.0, 0.0, 1.0, 1.0), 0.0, np.empty(1))
