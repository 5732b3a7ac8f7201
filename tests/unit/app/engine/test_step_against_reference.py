"""Tests of the step model against a plain twin: equal results for random work."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.app.engine.simulated.batch import (
    FINISHED,
    BatchSequence,
    BatchState,
    EngineLimits,
    StepResult,
)
from kvlane.app.engine.simulated.step import add_sequence, remove_sequence, run_step
from kvlane.app.perf_curves import PerfCurves
from tests.reference_engine import ReferenceEngine, ReferenceSequence, ReferenceStep

SIZE = 2


class Ask(NamedTuple):
    prompt: list[int]
    limit: int
    priority: int
    steps_before: int
    cancel_after: int | None
    way: str = "whole"


requests = st.lists(
    st.builds(
        Ask,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        limit=st.integers(1, 8),
        priority=st.integers(0, 1),
        steps_before=st.integers(0, 2),
        cancel_after=st.none() | st.integers(0, 6),
        way=st.sampled_from(["whole", "whole", "received", "handed over"]),
    ),
    max_size=9,
)
shapes = st.builds(
    EngineLimits,
    block_size=st.just(SIZE),
    cache_blocks=st.integers(8, 14),
    max_batched_tokens=st.integers(4, 9),
    max_sequences=st.integers(1, 4),
    curves=st.just(PerfCurves()),
)


class Names:
    """A name for every prefix of whole blocks; all answers continue with zeros."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, ...], int] = {}

    def of(self, tokens: list[int]) -> list[int]:
        ends = range(SIZE, len(tokens) + 1, SIZE)
        return [self._names.setdefault(tuple(tokens[:e]), len(self._names)) for e in ends]

    def prefixes(self, names: set[int]) -> set[tuple[int, ...]]:
        return {prefix for prefix, name in self._names.items() if name in names}


class Both:
    """The model and its twin, asked for the same things."""

    def __init__(self, shape: EngineLimits, *, shares_output: bool) -> None:
        self.state = BatchState(shape)
        self.plain = ReferenceEngine(shape)
        self.names = Names()
        self.shares_output = shares_output
        self.sequences: list[BatchSequence] = []
        self.twins: list[ReferenceSequence] = []
        self.made: list[int] = []
        self.got: set[int] = set()

    def admit(self, send: Ask) -> None:
        key = len(self.sequences)
        limit = 1 if send.way == "handed over" else send.limit
        received, handed_over = send.way == "received", send.way == "handed over"
        whole = self.names.of(send.prompt + [0] * limit)
        known = len(send.prompt) // SIZE
        names = whole if self.shares_output else whole[:known]
        sequence = BatchSequence(
            key, len(send.prompt), limit, whole[:known],
            priority=send.priority, caches_output=self.shares_output,
            is_received=received, is_handed_over=handed_over,
        )  # fmt: skip
        twin = ReferenceSequence(
            key, len(send.prompt), limit, names, send.priority, received, handed_over
        )
        self.sequences.append(sequence)
        self.twins.append(twin)
        self.made.append(0)
        add_sequence(self.state, sequence)
        self.plain.admit(twin)

    def cancel(self, key: int) -> None:
        remove_sequence(self.state, self.sequences[key])
        if not self.twins[key].over:
            self.plain.cancel(self.twins[key])

    def step(self) -> StepResult | None:
        done, plain = run_step(self.state), self.plain.step()
        assert in_keys(done) == plain
        if done is not None:
            for sequence in [*done.decoded, *(c.sequence for c in done.chunks if c.is_last)]:
                self._count(sequence)
            assert plain is not None
            self.got = (self.got - set(plain.removed)) | set(plain.stored)
        return done

    def _count(self, sequence: BatchSequence) -> None:
        key: Any = sequence.key
        self.made[key] += 1
        twin = self.twins[key]
        if self.shares_output:
            tokens = twin.prompt + self.made[key]
            sequence.block_ids[:] = twin.names[: tokens // SIZE]


def in_keys(done: StepResult | None) -> ReferenceStep | None:
    if done is None:
        return None

    def keys(sequences: Any) -> list[Any]:
        return [sequence.key for sequence in sequences]

    stored = [
        sequence.block_ids[index]
        for sequence, start, end in done.stored
        for index in range(start, end)
    ]
    chunks: list[Any] = [(c.sequence.key, c.tokens, c.is_last) for c in done.chunks]
    return ReferenceStep(
        done.duration_ms, keys(done.decoded), chunks, keys(done.finished),
        keys(done.preempted), list(done.removed), stored, keys(done.received),
    )  # fmt: skip


def played(shape: EngineLimits, sent: list[Ask], *, shares_output: bool = True) -> Both:
    """All that was asked for, to the end."""
    both = Both(shape, shares_output=shares_output)
    cancels: dict[int, int] = {}
    for send in sent:
        for _ in range(send.steps_before):
            one_step(both, cancels)
        both.admit(send)
        if send.cancel_after is not None:
            cancels[len(both.sequences) - 1] = send.cancel_after
    for _ in range(1000):
        if one_step(both, cancels) is None:
            if not both.plain.held:
                return both
            both.cancel(both.plain.held[0].key)  # transferred, which may make room for others
    raise AssertionError("it never came to rest")


def one_step(both: Both, cancels: dict[int, int]) -> StepResult | None:
    for key, left in list(cancels.items()):
        cancels[key] = left - 1
        if not left:
            del cancels[key]
            both.cancel(key)
    done = both.step()
    assert 0 <= both.state.cache.used_blocks <= both.state.limits.cache_blocks
    assert both.state.cache.used_blocks == both.plain.cache.capacity - both.plain.cache.available()
    return done


@settings(max_examples=300, deadline=None)
@given(shape=shapes, sent=requests, shares_output=st.booleans())
def test_scheduler_equals_its_reference(
    shape: EngineLimits, sent: list[Ask], shares_output: bool
) -> None:
    both = played(shape, sent, shares_output=shares_output)
    cached = [s.cached_tokens for s in both.sequences]
    assert cached == [twin.cached or 0 for twin in both.twins]


@settings(deadline=None)
@given(shape=shapes, sent=requests)
def test_no_token_is_lost_or_made_twice_however_often_a_sequence_is_preempted(
    shape: EngineLimits, sent: list[Ask]
) -> None:
    sent = [send._replace(cancel_after=None) for send in sent]
    both = played(shape, sent)
    assert both.made == [1 if send.way == "handed over" else send.limit for send in sent]


@settings(deadline=None)
@given(shape=shapes, sent=requests)
def test_idle_scheduler_holds_no_block_and_no_slot(shape: EngineLimits, sent: list[Ask]) -> None:
    both = played(shape, sent)
    state = both.state
    assert all(s.phase == FINISHED and not s.blocks for s in both.sequences)
    assert (
        state.cache.used_blocks,
        state.running_count,
        state.waiting_count,
        state.offset_sum,
    ) == (0, 0, 0, 0)
    calendars = (state.block_calendar, state.fill_calendar, state.end_calendar)
    assert not any(bucket for calendar in calendars for bucket in calendar.values())


@settings(deadline=None)
@given(shape=shapes, sent=requests)
def test_cached_block_has_its_whole_prefix_cached(shape: EngineLimits, sent: list[Ask]) -> None:
    both = played(shape, sent)
    got = both.names.prefixes(both.got)
    assert all(len(prefix) == SIZE or prefix[:-SIZE] in got for prefix in got)
    assert both.got == {b.name for b in both.plain.cache.blocks if b.got}


@settings(deadline=None)
@given(shape=shapes, sent=requests)
def test_same_requests_give_the_same_steps(shape: EngineLimits, sent: list[Ask]) -> None:
    def steps() -> list[ReferenceStep | None]:
        both = Both(shape, shares_output=True)
        for send in sent:
            both.admit(send)
        return [in_keys(both.step()) for _ in range(60)]

    assert steps() == steps()
