"""Tests of fast-forward over quiet steps: the same as the steps one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.engine.simulated.batch import BatchSequence, BatchState, EngineLimits
from kvlane.app.engine.simulated.fast_forward import (
    decode_only_ends_ms,
    decode_only_steps,
    fast_forward,
)
from kvlane.app.engine.simulated.step import add_sequence, run_step

SHAPE = EngineLimits(block_size=4, cache_blocks=40, max_batched_tokens=16, max_sequences=8)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 60), st.booleans()), min_size=1, max_size=10
)


def loaded(requests: list[tuple[int, int, bool]]) -> BatchState:
    state = BatchState(SHAPE)
    for number, (prompt, output, shares) in enumerate(requests):
        names = [100 * number + block for block in range(prompt // SHAPE.block_size)]
        add_sequence(state, BatchSequence(number, prompt, output, names, caches_output=shares))
    return state


def ends_one_by_one(state: BatchState) -> list[float]:
    ends = [0.0]
    while (done := run_step(state)) is not None:
        ends.append(ends[-1] + done.duration_ms)
    return ends


def ends_with_stretches(state: BatchState, most: int) -> list[float]:
    ends = [0.0]
    while True:
        quiet = min(decode_only_steps(state), most)
        if quiet:
            ends += decode_only_ends_ms(state, ends[-1], quiet).tolist()
            fast_forward(state, quiet)
        elif (done := run_step(state)) is not None:
            ends.append(ends[-1] + done.duration_ms)
        else:
            return ends


@given(REQUESTS, st.integers(1, 100))
def test_batched_quiet_steps_end_exactly_when_single_ones_do(
    requests: list[tuple[int, int, bool]], most: int
) -> None:
    assert ends_with_stretches(loaded(requests), most) == ends_one_by_one(loaded(requests))


def test_lone_sequence_is_quiet_until_it_needs_a_block() -> None:
    state = loaded([(5, 20, False)])
    run_step(state)
    assert decode_only_steps(state) == 3  # at 6, 7 and 8 tokens; 9 need another block
    fast_forward(state, 3)
    assert decode_only_steps(state) == 0


def test_step_in_which_a_sequence_ends_is_not_quiet() -> None:
    state = loaded([(5, 3, False)])
    run_step(state)
    assert decode_only_steps(state) == 1
    fast_forward(state, 1)
    done = run_step(state)
    assert done is not None
    assert [sequence.key for sequence in done.finished] == [0]


def test_no_step_is_quiet_with_waiting_or_prefilling_sequences_or_without_decode() -> None:
    state = loaded([(5, 9, False)])
    assert decode_only_steps(state) == 0
    run_step(state)
    add_sequence(state, BatchSequence("long", 40, 2))
    assert decode_only_steps(state) == 0
    run_step(state)
    assert state.partial_prefill is not None
    assert decode_only_steps(state) == 0
    assert decode_only_steps(BatchState(SHAPE)) == 0
