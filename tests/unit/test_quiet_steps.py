"""Many quiet steps at once are what they would have been one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.engine.batch import EngineState, Sequence, Shape
from app.engine.quiet import pass_quietly, quiet_ends_ms, quiet_steps
from app.engine.step import admit, step

SHAPE = Shape(block_size=4, blocks=40, max_batched_tokens=16, max_sequences=8)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 60), st.booleans()), min_size=1, max_size=10
)


def loaded(requests: list[tuple[int, int, bool]]) -> EngineState:
    state = EngineState(SHAPE)
    for number, (prompt, output, shares) in enumerate(requests):
        names = [100 * number + block for block in range(prompt // SHAPE.block_size)]
        admit(state, Sequence(number, prompt, output, names, shares_output=shares))
    return state


def ends_one_by_one(state: EngineState) -> list[float]:
    ends = [0.0]
    while (done := step(state)) is not None:
        ends.append(ends[-1] + done.duration_ms)
    return ends


def ends_with_stretches(state: EngineState, most: int) -> list[float]:
    ends = [0.0]
    while True:
        quiet = min(quiet_steps(state), most)
        if quiet:
            ends += quiet_ends_ms(state, ends[-1], quiet).tolist()
            pass_quietly(state, quiet)
        elif (done := step(state)) is not None:
            ends.append(ends[-1] + done.duration_ms)
        else:
            return ends


@given(REQUESTS, st.integers(1, 100))
def test_quiet_steps_end_when_single_ones_do_to_the_bit(
    requests: list[tuple[int, int, bool]], most: int
) -> None:
    assert ends_with_stretches(loaded(requests), most) == ends_one_by_one(loaded(requests))


def test_a_lone_sequence_is_quiet_until_it_needs_a_block() -> None:
    state = loaded([(5, 20, False)])
    step(state)
    assert quiet_steps(state) == 3  # at 6, 7 and 8 tokens; 9 need another block
    pass_quietly(state, 3)
    assert quiet_steps(state) == 0


def test_the_step_in_which_somebody_ends_is_not_quiet() -> None:
    state = loaded([(5, 3, False)])
    step(state)
    assert quiet_steps(state) == 1
    pass_quietly(state, 1)
    done = step(state)
    assert done is not None
    assert [sequence.key for sequence in done.finished] == [0]


def test_nothing_is_quiet_while_somebody_waits_or_prefills_or_nobody_decodes() -> None:
    state = loaded([(5, 9, False)])
    assert quiet_steps(state) == 0
    step(state)
    admit(state, Sequence("long", 40, 2))
    assert quiet_steps(state) == 0
    step(state)
    assert state.partial is not None
    assert quiet_steps(state) == 0
    assert quiet_steps(EngineState(SHAPE)) == 0
