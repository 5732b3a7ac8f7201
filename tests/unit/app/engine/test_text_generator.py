"""Tests of generated text: the same rest from any position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.engine.echo import echo_answer
from kvlane.app.engine.engine_factory import text_generator_of
from kvlane.app.engine.simulated.text_generator import (
    Continuation,
    ExpectedAnswer,
    TextGenerator,
    echo_continuation,
    expected_answer,
)
from kvlane.app.preprocess.models.byte_model import ByteModel
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.text.byte_level import ASSISTANT, USER
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.request import Request, StopConditions

tokens = st.lists(st.sampled_from([1, 2, 3, USER, ASSISTANT]), max_size=12)
WORDS = {"A": 1, " A": 11, "B": 2, " B": 12, " is": 5, " was": 6, " red": 7, " blue": 8}
END = 9
SENTENCES = ["A is red", "A was blue", "B was red"]


def words_of(text: str) -> list[int]:
    """Words as tokens; one that begins a text is another one than behind a space."""
    first, *rest = text.removeprefix(" ").split(" ")
    return [WORDS[text[0] + first if text[0] == " " else first], *(WORDS[f" {w}"] for w in rest)]


SPEAKER = TextGenerator(SENTENCES, words_of, END)
CONTINUATIONS: dict[str, Continuation] = {"echo": echo_continuation, "speaker": SPEAKER}


def first(output: Iterator[int], count: int) -> list[int]:
    return list(islice(output, count))


@pytest.mark.parametrize("name", CONTINUATIONS)
@given(prompt=tokens, limit=st.none() | st.integers(1, 20), cut=st.integers(0, 20))
def test_resumed_answer_continues_identically(
    name: str, prompt: list[int], limit: int | None, cut: int
) -> None:
    continuation = CONTINUATIONS[name]
    prompt = [*prompt, ASSISTANT]
    whole = first(continuation(prompt, limit), limit or 30)
    taken = whole[:cut]
    left = None if limit is None else limit - len(taken)
    if left is None or left > 0:
        rest = first(continuation(prompt + taken, left), (limit or 30) - len(taken))
        assert taken + rest == whole


@given(prompt=tokens, limit=st.none() | st.integers(1, 20))
def test_echo_equals_the_answer_of_the_echo_engine(prompt: list[int], limit: int | None) -> None:
    prompt = [*prompt, ASSISTANT]
    assert first(echo_continuation(prompt, limit), limit or 100) == echo_answer(prompt, limit)


def test_generator_writes_sentences_in_sequence() -> None:
    output = [token for token in first(SPEAKER([77], None), 400) if token != END]
    got = {tuple(output[i : i + 3]) for i in range(0, 300, 3)}
    assert got == {tuple(words_of(f + s)) for s in SENTENCES for f in ("", " ")}


def test_answer_of_a_speaker_ends_after_a_sentence() -> None:
    lengths = set()
    for prompt in range(100, 200):
        output = first(SPEAKER([prompt], None), 500)
        assert END in output
        lengths.add(output.index(END))
    assert all(length % 3 == 0 for length in lengths)
    assert len(lengths) > 3


def test_speaker_without_an_end_ends_by_itself() -> None:
    assert list(TextGenerator(SENTENCES, words_of, None)([5], None))


def test_one_other_token_in_a_prompt_makes_another_answer() -> None:
    output = {tuple(first(SPEAKER([n, *[0] * 50], None), 40)) for n in range(20)}
    assert len(output) == 20


def test_speaker_needs_sentences() -> None:
    with pytest.raises(ValueError, match="no sample sentences"):
        TextGenerator([], words_of, None)


@given(prompt=st.lists(st.integers(0, 4000), max_size=30))
def test_demo_model_writes_readable_text(prompt: list[int]) -> None:
    output = first(DEMO_SPEAKER(prompt, None), 40)
    text = DEMO_TOKENIZER.decode(output)
    assert "\ufffd" not in text
    assert text.isascii()


def test_demo_model_answers_a_chat_in_whole_sentences() -> None:
    chat = [3, *DEMO_TOKENIZER.encode_now("hello"), 1, 4]
    output = list(islice(DEMO_SPEAKER(chat, None), 2000))
    text = DEMO_TOKENIZER.decode(output[: output.index(1)])
    assert text[0].isupper()
    assert text.endswith(".")
    assert ".." not in text


_FILES = read_folder(DEMO_MODEL_FOLDER)
DEMO_TOKENIZER = Tokenizer(_FILES.tokenizer, InlinePool())
DEMO_SPEAKER = text_generator_of(_FILES)

# --- what is due ---------------------------------------------------------------------------------


def due_of(prompt: Sequence[int], context: int | None = None, **stop: Any) -> ExpectedAnswer:
    request = Request(id="r", token_ids=pack_tokens(prompt), stop=StopConditions(**stop))
    return expected_answer(request, echo_continuation, ByteModel().text_stream(request), context)


HELLO = [USER, *b"hello", ASSISTANT]


def test_text_without_limits_is_the_whole_model_output() -> None:
    assert due_of(HELLO) == ExpectedAnswer(tuple(b"hello"), "hello", "stop")


def test_answer_ends_at_the_limit() -> None:
    assert due_of(HELLO, max_tokens=7) == ExpectedAnswer(tuple(b"hellohe"), "hellohe", "length")


def test_answer_ends_at_the_end_of_the_context() -> None:
    assert due_of(HELLO, len(HELLO) + 3) == ExpectedAnswer(tuple(b"hel"), "hel", "length")


def test_answer_ends_at_a_stop_string() -> None:
    assert due_of(HELLO, max_tokens=50, stop=("lo",)) == ExpectedAnswer(
        tuple(b"hello"), "hel", "stop", "lo"
    )


def test_half_a_character_at_the_end_is_shown_as_a_replacement() -> None:
    assert due_of([USER, *"é".encode(), ASSISTANT], max_tokens=1).text == "\ufffd"
