"""Tests of the step model, rule by rule."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.engine.simulated.batch import (
    BatchSequence,
    BatchState,
    EngineLimits,
    PrefillChunk,
    StepResult,
)
from kvlane.app.engine.simulated.step import add_sequence, remove_sequence, run_step
from kvlane.app.perf_curves import PerfCurves

CURVES = PerfCurves()
SMALL = EngineLimits(block_size=4, cache_blocks=10)


def state_with(*sequences: BatchSequence, shape: EngineLimits = SMALL) -> BatchState:
    state = BatchState(shape)
    for sequence in sequences:
        add_sequence(state, sequence)
    return state


def stepped(state: BatchState) -> StepResult:
    done = run_step(state)
    assert done is not None
    return done


def run_out(state: BatchState) -> list[StepResult]:
    steps = []
    while (done := run_step(state)) is not None:
        steps.append(done)
    return steps


def names(sequence: BatchSequence, done: StepResult) -> list[int]:
    return [
        sequence.block_ids[index]
        for got, start, end in done.stored
        if got is sequence
        for index in range(start, end)
    ]


def test_without_work_there_is_no_step() -> None:
    assert run_step(BatchState(SMALL)) is None


# --- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "ms"), [(0, 0.0), (1, 16.5166038609989), (8192, 169.1369184042496)]
)
def test_prefill_takes_the_published_time(tokens: int, ms: float) -> None:
    assert CURVES.prefill_ms(tokens) == pytest.approx(ms, rel=1e-9)


@pytest.mark.parametrize(("usage", "ms"), [(0.0, 5.74), (0.5, 26.31), (1.0, 34.01), (1.7, 34.01)])
def test_decode_takes_the_published_time(usage: float, ms: float) -> None:
    assert CURVES.decode_ms(usage) == pytest.approx(ms)


def test_decode_takes_its_floor_at_least() -> None:
    assert PerfCurves(decode=(0.0, 0.0, 0.2)).decode_ms(0.5) == 1.0


def test_step_takes_the_time_of_all_its_new_prompt_tokens_together() -> None:
    state = state_with(BatchSequence("a", 5, 2), BatchSequence("b", 7, 2))
    assert stepped(state).duration_ms == CURVES.prefill_ms(12)


def test_decode_time_follows_the_tokens_of_the_sequences_in_decode() -> None:
    state = state_with(BatchSequence("a", 5, 3), BatchSequence("b", 7, 3))
    stepped(state)
    assert stepped(state).duration_ms == CURVES.decode_ms((6 + 8) / 40)
    assert stepped(state).duration_ms == CURVES.decode_ms((7 + 9) / 40)


def test_mixed_step_takes_both_times() -> None:
    state = state_with(BatchSequence("a", 5, 3))
    stepped(state)
    add_sequence(state, BatchSequence("b", 9, 2))
    assert stepped(state).duration_ms == CURVES.prefill_ms(9) + CURVES.decode_ms(6 / 40)


def test_shared_blocks_count_as_often_as_they_are_used() -> None:
    state = state_with(BatchSequence("a", 9, 3, [1, 2]), BatchSequence("b", 9, 3, [1, 2]))
    stepped(state)
    assert stepped(state).duration_ms == CURVES.decode_ms(20 / 40)


# --- tokens --------------------------------------------------------------------------------------


def test_sequence_makes_exactly_its_tokens() -> None:
    sequence = BatchSequence("a", 5, 3)
    steps = run_out(state_with(sequence))
    assert [len(s.decoded) for s in steps] == [0, 1, 1]
    assert [s.finished for s in steps] == [(), (), (sequence,)]


def test_one_token_ends_with_the_prefill() -> None:
    sequence = BatchSequence("a", 5, 1)
    state = state_with(sequence)
    assert stepped(state).finished == (sequence,)
    assert run_step(state) is None


@pytest.mark.parametrize(("prompt", "limit"), [(0, 1), (1, 0), (41, 1), (20, 22)])
def test_impossible_sequence_is_refused(prompt: int, limit: int) -> None:
    with pytest.raises(ValueError, match="token"):
        add_sequence(BatchState(SMALL), BatchSequence("a", prompt, limit))


def test_sequence_that_fills_the_whole_cache_runs() -> None:
    assert run_out(state_with(BatchSequence("a", 20, 21)))[-1].finished


# --- the batch -----------------------------------------------------------------------------------


def test_long_prompt_is_computed_in_chunks() -> None:
    sequence = BatchSequence("a", 20, 1)
    steps = run_out(
        state_with(sequence, shape=EngineLimits(4, 10, max_batched_tokens=8, max_sequences=2))
    )
    assert [s.chunks for s in steps] == [
        (PrefillChunk(sequence, 8, False),),
        (PrefillChunk(sequence, 8, False),),
        (PrefillChunk(sequence, 4, True),),
    ]


def test_decode_goes_before_prefill_and_a_begun_prompt_before_a_new_one() -> None:
    first, long, last = (
        BatchSequence("a", 4, 9),
        BatchSequence("b", 10, 1),
        BatchSequence("c", 4, 1),
    )
    state = state_with(first, shape=EngineLimits(4, 20, max_batched_tokens=8, max_sequences=4))
    stepped(state)
    add_sequence(state, long)
    add_sequence(state, last)
    chunks: list[Any] = [stepped(state).chunks for _ in range(2)]
    assert chunks == [
        (PrefillChunk(long, 7, False),),
        (PrefillChunk(long, 3, True), PrefillChunk(last, 4, True)),
    ]


def test_no_more_sequences_run_than_allowed() -> None:
    sequences = [BatchSequence(key, 2, 4) for key in "abc"]
    state = state_with(*sequences, shape=EngineLimits(4, 10, max_sequences=2))
    stepped(state)
    assert (state.running_count, state.waiting_count) == (2, 1)


def test_first_sequence_that_does_not_fit_blocks_those_behind_it() -> None:
    running, big, small = (
        BatchSequence("a", 20, 3),
        BatchSequence("b", 24, 1),
        BatchSequence("c", 4, 1),
    )
    state = state_with(running, big, small)
    assert [c.sequence for c in stepped(state).chunks] == [running]
    run_out(state)
    assert big.phase == small.phase == running.phase


def test_lower_priority_number_goes_first() -> None:
    low, high = BatchSequence("low", 4, 1, priority=1), BatchSequence("high", 4, 1, priority=0)
    state = state_with(low, high, shape=EngineLimits(4, 10, max_sequences=1))
    assert stepped(state).finished == (high,)


def test_batch_must_have_room_for_every_sequence() -> None:
    with pytest.raises(ValueError, match="below"):
        BatchState(EngineLimits(4, 10, max_batched_tokens=8, max_sequences=9))


# --- the cache -----------------------------------------------------------------------------------


def test_cached_prefix_is_not_computed_again() -> None:
    state = state_with(BatchSequence("a", 9, 1, [1, 2]))
    stepped(state)
    again = BatchSequence("b", 11, 1, [1, 2])
    add_sequence(state, again)
    assert stepped(state).chunks == (PrefillChunk(again, 3, True),)
    assert again.cached_tokens == 8


def test_of_a_whole_hit_the_last_block_is_computed_again() -> None:
    state = state_with(BatchSequence("a", 8, 1, [1, 2]))
    stepped(state)
    again = BatchSequence("b", 8, 1, [1, 2])
    add_sequence(state, again)
    done = stepped(state)
    assert done.chunks == (PrefillChunk(again, 4, True),)
    assert done.stored == ()


def test_prompt_is_shared_from_the_step_that_admits_it() -> None:
    first, second = BatchSequence("a", 9, 2, [1, 2]), BatchSequence("b", 9, 2, [1, 2])
    state = state_with(first, second)
    done = stepped(state)
    assert done.chunks == (PrefillChunk(first, 9, True), PrefillChunk(second, 1, True))
    assert state.cache.used_blocks == 4
    assert (names(first, done), names(second, done)) == ([1, 2], [])


def test_blocks_are_reported_stored_with_the_chunk_that_computed_them() -> None:
    sequence = BatchSequence("a", 13, 1, [1, 2, 3])
    state = state_with(sequence, shape=EngineLimits(4, 10, max_batched_tokens=6, max_sequences=2))
    assert [names(sequence, done) for done in run_out(state)] == [[1], [2, 3], []]


def test_output_blocks_with_a_name_are_shared_when_they_are_full() -> None:
    sequence = BatchSequence("a", 6, 4, [1], caches_output=True)
    state = state_with(sequence)
    got = [names(sequence, stepped(state)), names(sequence, stepped(state))]
    sequence.block_ids.append(2)
    got.append(names(sequence, stepped(state)))
    assert got == [[1], [], [2]]


def test_output_blocks_without_a_name_and_their_successors_match_nothing() -> None:
    sequence = BatchSequence("a", 6, 8, [1], caches_output=True)
    state = state_with(sequence)
    for _ in range(5):
        stepped(state)
    sequence.block_ids += [2, 3]
    assert [done.stored for done in run_out(state)] == [(), (), ()]


def test_leaf_that_was_used_longest_ago_is_evicted_first() -> None:
    state = state_with(BatchSequence("a", 12, 1, [1, 2, 3]), BatchSequence("b", 12, 1, [1, 2, 4]))
    run_out(state)
    add_sequence(state, BatchSequence("c", 28, 1, [10, 11, 12, 13, 14, 15, 16]))
    assert stepped(state).removed == (3,)
    add_sequence(state, BatchSequence("d", 12, 1, [20, 21, 22]))
    assert stepped(state).removed == (4, 2, 1)


def test_free_blocks_are_used_before_cached_ones() -> None:
    state = state_with(BatchSequence("a", 12, 1, [1, 2, 3]))
    run_out(state)
    add_sequence(state, BatchSequence("b", 28, 1, [10, 11, 12, 13, 14, 15, 16]))
    assert stepped(state).removed == ()


def test_evicted_block_may_be_stored_again_in_the_same_step() -> None:
    state = state_with(BatchSequence("a", 20, 1, [1, 2, 3, 4, 5]))
    run_out(state)
    wide = BatchSequence("b", 24, 1, [10, 11, 12, 13, 14, 15])
    again = BatchSequence("c", 9, 1, [1, 5])
    add_sequence(state, wide)
    add_sequence(state, again)
    done = stepped(state)
    assert done.removed == (5, 4, 3)
    assert names(again, done) == [5]


def test_block_another_sequence_computed_outlives_a_cancelled_prefill() -> None:
    shape = EngineLimits(4, 10, max_batched_tokens=3, max_sequences=3)
    state = state_with(BatchSequence("a", 8, 1, [1, 2]), shape=shape)
    run_out(state)
    again = BatchSequence("b", 8, 1, [1, 2])
    add_sequence(state, again)
    stepped(state)
    remove_sequence(state, again)
    third = BatchSequence("c", 9, 1, [1, 2])
    add_sequence(state, third)
    run_out(state)
    assert third.cached_tokens == 8


# --- cancel --------------------------------------------------------------------------------------


def test_cancelled_sequence_leaves_its_blocks_in_the_cache_and_makes_no_more_tokens() -> None:
    sequence = BatchSequence("a", 9, 20, [1, 2])
    state = state_with(sequence)
    stepped(state)
    remove_sequence(state, sequence)
    assert run_step(state) is None
    assert state.cache.used_blocks == 0
    assert state.cache.match([1, 2], 2).blocks == 2


def test_cancelling_a_waiting_or_finished_sequence_changes_nothing_else() -> None:
    running, waiting = BatchSequence("a", 4, 2), BatchSequence("b", 4, 2)
    state = state_with(running, waiting, shape=EngineLimits(4, 10, max_sequences=1))
    stepped(state)
    remove_sequence(state, waiting)
    remove_sequence(state, waiting)
    assert [done.finished for done in run_out(state)] == [(running,)]


def test_cancelled_sequences_do_not_accumulate_behind_a_waiting_one() -> None:
    state = state_with(BatchSequence("run", 20, 20), BatchSequence("head", 40, 1))
    stepped(state)
    for key in range(1000):
        sequence = BatchSequence(key, 4, 1)
        add_sequence(state, sequence)
        remove_sequence(state, sequence)
    assert len(state.waiting) < 100


def test_many_cancels_leave_the_order_of_waiting_sequences() -> None:
    state = state_with(BatchSequence("run", 20, 20), shape=EngineLimits(4, 10, max_sequences=1))
    stepped(state)
    waiting = [BatchSequence(key, 4, 1, priority=key * 37 % 101) for key in range(600)]
    for sequence in waiting:
        add_sequence(state, sequence)
    for sequence in waiting:
        if sequence.arrival % 3:
            remove_sequence(state, sequence)
    over = [s for done in run_out(state) for s in done.finished][1:]
    assert over == sorted((s for s in waiting if not s.arrival % 3), key=lambda s: s.priority)


# --- preemption ----------------------------------------------------------------------------------


def full(first: BatchSequence, second: BatchSequence) -> BatchState:
    """Two sequences that fill the cache with their prompts; the first needs a block next."""
    state = state_with(first, second)
    stepped(state)
    assert state.cache.available_blocks == 0
    return state


def test_last_sequence_is_preempted_when_no_block_is_left() -> None:
    first, second = BatchSequence("a", 20, 3), BatchSequence("b", 18, 3)
    state = full(first, second)
    done = stepped(state)
    assert (done.preempted, done.decoded) == ((second,), (first,))


def test_sequence_with_the_higher_priority_number_is_preempted_even_if_it_came_first() -> None:
    first, second = BatchSequence("a", 18, 3, priority=1), BatchSequence("b", 20, 3)
    state = full(first, second)
    done = stepped(state)
    assert (done.preempted, done.decoded) == ((first,), (second,))


def test_last_sequence_preempts_itself_when_it_needs_a_block() -> None:
    first, second = BatchSequence("a", 18, 3), BatchSequence("b", 20, 3)
    state = full(first, second)
    assert stepped(state).preempted == (second,)


def test_no_sequence_is_admitted_in_a_step_that_preempts() -> None:
    first, second = BatchSequence("a", 20, 3), BatchSequence("b", 18, 3)
    state = full(first, second)
    add_sequence(state, BatchSequence("c", 4, 1))
    assert stepped(state).chunks == ()


def test_preempted_sequence_recomputes_its_tokens_and_continues() -> None:
    first, second = BatchSequence("a", 20, 3), BatchSequence("b", 18, 3)
    state = full(first, second)
    steps = run_out(state)
    assert [s for done in steps for s in done.finished] == [first, second]
    assert [c.tokens for done in steps for c in done.chunks] == [19]
    assert second.preemptions == 1


def test_preempted_sequence_finds_its_cached_blocks() -> None:
    first = BatchSequence("a", 20, 2)
    second = BatchSequence("b", 18, 3, [1, 2, 3, 4])
    state = full(first, second)
    steps = run_out(state)
    assert [c.tokens for done in steps for c in done.chunks] == [3]
    assert second.cached_tokens == 0


def test_prompt_preempted_half_way_keeps_its_computed_part() -> None:
    first, second = BatchSequence("a", 4, 8), BatchSequence("b", 36, 1, list(range(9)))
    state = state_with(
        first, second, shape=EngineLimits(4, 10, max_batched_tokens=16, max_sequences=4)
    )
    assert [c.tokens for c in stepped(state).chunks] == [4, 12]
    assert stepped(state).preempted == (second,)
    assert sum(c.tokens for done in run_out(state) for c in done.chunks) == 36 - 12
