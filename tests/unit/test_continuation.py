"""What an engine without a model says: the same rest from wherever it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.continuation import Continuation, echo, from_next_token, from_table
from app.engine.echo import echo_answer
from app.preprocess.byte_level import ASSISTANT, USER

tokens = st.lists(st.sampled_from([1, 2, 3, USER, ASSISTANT]), max_size=12)
WORDS = [101, 202, 303, 404]


def three_more(sequence: list[int]) -> int | None:
    return sequence[-1] + 1 if len(sequence) < 6 else None


CONTINUATIONS = {
    "echo": echo,
    "function": from_next_token(three_more),
    "table": from_table(WORDS),
}


def first(said: Iterator[int], count: int) -> list[int]:
    return list(islice(said, count))


@pytest.mark.parametrize("name", CONTINUATIONS)
@given(prompt=tokens, limit=st.none() | st.integers(1, 20), cut=st.integers(0, 20))
def test_a_resumed_answer_continues_identically(
    name: str, prompt: list[int], limit: int | None, cut: int
) -> None:
    continuation: Continuation = CONTINUATIONS[name]
    prompt = [*prompt, ASSISTANT]
    whole = first(continuation(prompt, limit), limit or 30)
    taken = whole[:cut]
    left = None if limit is None else limit - len(taken)
    if left is None or left > 0:
        rest = first(continuation(prompt + taken, left), (limit or 30) - len(taken))
        assert taken + rest == whole


@given(prompt=tokens, limit=st.none() | st.integers(1, 20))
def test_echo_says_what_the_echo_engine_says(prompt: list[int], limit: int | None) -> None:
    prompt = [*prompt, ASSISTANT]
    assert first(echo(prompt, limit), limit or 100) == echo_answer(prompt, limit)


def test_a_function_may_end_the_answer() -> None:
    assert list(from_next_token(three_more)([1, 2, 3], None)) == [4, 5, 6]


def test_a_table_gives_nothing_but_its_tokens_and_not_always_the_same() -> None:
    said = first(from_table(WORDS)([1, 2, 3], None), 200)
    assert set(said) == set(WORDS)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        from_table([])
