"""Tests of the visible text of an answer, and its end.

`reference` says it in one go for a whole answer; every way to cut the answer into steps, and every
place to interrupt it, must show the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.text.stop_conditions import TextPiece, TextStream
from kvlane.streams.request import StopConditions

SPEC = read_folder(DEMO_MODEL_FOLDER).tokenizer
TOKENIZER = Tokenizer(SPEC, InlinePool())
LIBRARY = tokenizers.Tokenizer.from_buffer(SPEC)
BYTES = {TOKENIZER._vocabulary.pieces[i]: i for i in range(5, 261)}
END = 1
EOS = (0, END)


def ids(text: str) -> list[int]:
    return LIBRARY.encode(text, add_special_tokens=False).ids


def bytewise(text: str) -> list[int]:
    return [BYTES[bytes([byte])] for byte in text.encode()]


def stream(
    taken: Sequence[int] = (), *, include_stop: bool = False, **conditions: Any
) -> TextStream:
    return TextStream(
        TOKENIZER.detokenizer(),
        StopConditions(**conditions),
        eos_token_ids=EOS,
        include_stop=include_stop,
        taken=taken,
    )


def fed(text_stream: TextStream, tokens: Sequence[int]) -> list[str]:
    """The pieces of text, one for each token."""
    return [text_stream.feed([token]).text for token in tokens]


class Answer(NamedTuple):
    text: str
    tokens: int
    finish_reason: str | None
    stop_reason: int | str | None


def whole(text_stream: TextStream, steps: Sequence[Sequence[int]]) -> Answer:
    pieces = [text_stream.feed(step) for step in steps]
    text = "".join(piece.text for piece in pieces) + text_stream.end().text
    last = text_stream.ended or TextPiece("", 0)
    return Answer(text, text_stream.tokens, last.finish_reason, last.stop_reason)


# --- without stops --------------------------------------------------------------------------------


def test_text_is_delivered_as_it_is_generated() -> None:
    assert fed(stream(), bytewise("abc")) == ["a", "b", "c"]


def test_half_a_character_waits_for_the_rest() -> None:
    assert fed(stream(), bytewise("é!")) == ["", "é", "!"]


def test_no_text_is_withheld_without_stop_strings() -> None:
    text_stream = stream()
    text_stream.feed(bytewise("abc"))
    assert text_stream.end().text == ""


def test_end_of_an_answer_shows_its_half_character() -> None:
    text_stream = stream()
    text_stream.feed(bytewise("é")[:1])
    assert text_stream.end().text == "\ufffd"


def test_empty_step_has_no_output() -> None:
    assert stream().feed([]) == TextPiece("", 0)


# --- hidden stop tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("eos", EOS)
def test_end_of_text_ends_without_text_and_without_a_reason(eos: int) -> None:
    assert stream().feed([*bytewise("ab"), eos]) == TextPiece("ab", 3, "stop", None)


def test_requests_own_hidden_stop_token_ends_as_an_end_of_text_does() -> None:
    x = BYTES[b"x"]
    piece = stream(stop_token_ids_hidden=(x,)).feed(bytewise("abxc"))
    assert piece == TextPiece("ab", 3, "stop", None)


def test_text_after_the_end_is_dropped() -> None:
    text_stream = stream()
    assert text_stream.feed([BYTES[b"a"], END, BYTES[b"b"]]).tokens == 2
    assert text_stream.feed(bytewise("c")) == TextPiece("", 0, "stop", None)


def test_end_of_text_releases_text_withheld_for_a_stop_string() -> None:
    assert stream(stop=("xyz",)).feed([*bytewise("axy"), END]).text == "axy"


def test_end_of_text_shows_half_a_character() -> None:
    assert stream().feed([*bytewise("é")[:1], END]).text == "\ufffd"


def test_ignored_end_of_text_ends_nothing() -> None:
    piece = stream(ignore_eos=True).feed([BYTES[b"a"], END, BYTES[b"b"]])
    assert piece == TextPiece("ab", 3)


def test_stop_strings_count_although_the_end_of_text_is_ignored() -> None:
    piece = stream(ignore_eos=True, stop=("b",)).feed(bytewise("ab"))
    assert (piece.text, piece.stop_reason) == ("a", "b")


# --- named stop tokens ----------------------------------------------------------------------------


def test_named_stop_token_ends_without_its_text_and_is_the_reason() -> None:
    x = BYTES[b"x"]
    piece = stream(stop_token_ids=(x,)).feed(bytewise("axb"))
    assert piece == TextPiece("a", 2, "stop", x)


def test_named_stop_token_is_shown_on_request() -> None:
    x = BYTES[b"x"]
    assert stream(stop_token_ids=(x,), include_stop=True).feed(bytewise("axb")).text == "ax"


def test_stop_token_that_is_an_end_of_text_has_no_reason() -> None:
    assert stream(stop_token_ids=(END,)).feed([END]).stop_reason is None


# --- stop strings ---------------------------------------------------------------------------------


def test_stop_string_ends_before_its_first_character() -> None:
    assert stream(stop=("xyz",)).feed(bytewise("abxyzc")) == TextPiece("ab", 5, "stop", "xyz")


def test_stop_string_is_shown_on_request_and_nothing_after_it() -> None:
    text_stream = stream(stop=("th",), include_stop=True)
    token = ids(" the")
    assert len(token) == 1
    assert text_stream.feed(token) == TextPiece(" th", 1, "stop", "th")


def test_stop_string_is_found_across_tokens() -> None:
    text_stream = stream(stop=("xyz",))
    assert fed(text_stream, bytewise("axyzb")) == ["a", "", "", "", ""]
    assert text_stream.ended == TextPiece("", 0, "stop", "xyz")


def test_possible_start_of_a_stop_string_is_withheld() -> None:
    assert fed(stream(stop=("xyz",)), bytewise("axyb")) == ["a", "", "", "xyb"]


def test_only_a_possible_start_of_a_stop_string_is_withheld() -> None:
    assert fed(stream(stop=("aab",)), bytewise("aaaa")) == ["", "", "a", "a"]


def test_end_of_an_answer_releases_withheld_text() -> None:
    text_stream = stream(stop=("xyz",))
    assert text_stream.feed(bytewise("axy")).text + text_stream.end().text == "axy"


@pytest.mark.parametrize("cut", [ids, bytewise])
def test_stop_string_completed_first_counts(cut: Any) -> None:
    piece = stream(stop=("bcd", "c")).feed(cut("abcd"))
    assert (piece.text, piece.stop_reason) == ("ab", "c")


def test_longer_of_two_stop_strings_completed_together_counts() -> None:
    assert stream(stop=("b", "ab")).feed(bytewise("xab")) == TextPiece("x", 3, "stop", "ab")


def test_stop_string_may_overlap_itself() -> None:
    assert stream(stop=("abab",)).feed(bytewise("aababab")).text == "a"


def test_stop_string_ends_in_the_middle_of_a_character_of_bytes() -> None:
    assert stream(stop=("é",)).feed(bytewise("aéb")) == TextPiece("a", 3, "stop", "é")


def test_empty_stop_string_stops_nothing() -> None:
    assert stream(stop=("",)).feed(bytewise("ab")) == TextPiece("ab", 2)


# --- min_tokens -----------------------------------------------------------------------------------


def test_end_of_text_before_min_tokens_ends_nothing() -> None:
    assert stream(min_tokens=3).feed([BYTES[b"a"], END, BYTES[b"b"]]) == TextPiece("ab", 3)


def test_answer_may_end_with_its_min_tokens_token() -> None:
    assert stream(min_tokens=2).feed([BYTES[b"a"], END]) == TextPiece("a", 2, "stop", None)


def test_stop_string_before_min_tokens_is_shown_and_ends_nothing() -> None:
    text_stream = stream(min_tokens=4, stop=("ab",))
    assert "".join(fed(text_stream, bytewise("xabc"))) == "xabc"
    assert text_stream.ended is None


def test_stop_string_may_begin_before_min_tokens() -> None:
    assert stream(min_tokens=3, stop=("abc",)).feed(bytewise("abc")) == TextPiece(
        "", 3, "stop", "abc"
    )


def test_stop_string_may_begin_within_an_ignored_one() -> None:
    piece = stream(min_tokens=3, stop=("aa",)).feed(bytewise("aaa"))
    assert piece == TextPiece("a", 3, "stop", "aa")


def test_stop_string_is_not_found_late() -> None:
    """It was complete while stops did not count, inside what was held for a longer one."""
    text_stream = stream(min_tokens=4, stop=("abcd", "bc"))
    assert text_stream.feed(bytewise("abcx")) == TextPiece("abcx", 4)


def test_named_stop_token_before_min_tokens_ends_nothing() -> None:
    x = BYTES[b"x"]
    assert stream(min_tokens=2, stop_token_ids=(x,)).feed([x]) == TextPiece("x", 1)


# --- max_tokens -----------------------------------------------------------------------------------


def test_last_allowed_token_ends_for_length() -> None:
    assert stream(max_tokens=2).feed(bytewise("abc")) == TextPiece("ab", 2, "length", None)


def test_stop_at_the_last_allowed_token_is_a_stop() -> None:
    assert stream(max_tokens=2, stop=("b",)).feed(bytewise("ab")).finish_reason == "stop"


def test_length_limit_releases_withheld_text() -> None:
    assert stream(max_tokens=2, stop=("abc",)).feed(bytewise("ab")).text == "ab"


# --- across a fence -------------------------------------------------------------------------------


def test_continued_run_shows_only_new_text() -> None:
    assert stream(bytewise("ab")).feed(bytewise("c")) == TextPiece("c", 1)


def test_half_a_character_across_a_fence_is_shown_once() -> None:
    first, second = bytewise("é")
    before = stream()
    assert before.feed([first]).text == ""
    assert stream([first]).feed([second]).text == "é"


def test_stop_string_across_a_fence_is_found() -> None:
    assert stream(bytewise("ax"), stop=("xy",)).feed(bytewise("y")) == TextPiece(
        "", 1, "stop", "xy"
    )


def test_text_withheld_before_a_fence_is_shown_after_it() -> None:
    assert stream(bytewise("ax"), stop=("xy",)).feed(bytewise("b")).text == "xb"


def test_resumed_tokens_count_for_min_and_max() -> None:
    assert stream(bytewise("ab"), min_tokens=3).feed([END]).finish_reason == "stop"
    assert stream(bytewise("ab"), max_tokens=3).feed(bytewise("c")).finish_reason == "length"


def test_resumed_answer_may_already_be_complete() -> None:
    over = stream(bytewise("axy"), stop=("xy",))
    assert over.ended == TextPiece("", 0, "stop", "xy")
    assert (over.chars, over.end().text) == (1, "")


def test_chars_includes_text_of_earlier_runs() -> None:
    text_stream = stream(bytewise("abx"), stop=("xy",))
    assert text_stream.chars == 2
    text_stream.feed(bytewise("c"))
    assert text_stream.chars == 4


# --- any cuts, any fence --------------------------------------------------------------------------


def text_of(tokens: Sequence[int], *, final: bool) -> str:
    """All text of some tokens; unless final without a character that is only begun."""
    pieces = TOKENIZER._vocabulary.pieces
    data = b"".join(b"" if t in TOKENIZER.special else pieces[t] for t in tokens)
    for cut in () if final else range(1, 4):
        try:
            data[-cut:].decode()
        except UnicodeDecodeError as e:
            if e.reason == "unexpected end of data" and e.start == 0:
                return data[:-cut].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def stop_string_in(text: str, old: int, stops: Sequence[str], *, shown: bool) -> tuple[str, str]:
    """The text up to the first stop string that is complete after `old` characters, and it."""
    for end in range(old + 1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            string = max(found, key=len)
            return text[: end if shown else end - len(string)], string
    return "", ""


def reference(tokens: Sequence[int], conditions: StopConditions, *, include_stop: bool) -> Answer:
    """The answer in one go: where it ends is looked up in the text of each of its beginnings."""
    tokens = tokens[: conditions.max_tokens]
    hidden = set() if conditions.ignore_eos else {*EOS, *conditions.stop_token_ids_hidden}
    for count in range(max(conditions.min_tokens, 1), len(tokens) + 1):
        last, so_far, before = tokens[count - 1], tokens[:count], tokens[: count - 1]
        if last in hidden:
            return Answer(text_of(before, final=True), count, "stop", None)
        if last in conditions.stop_token_ids:
            shown = so_far if include_stop else before
            return Answer(text_of(shown, final=True), count, "stop", last)
        text, old = text_of(so_far, final=False), len(text_of(before, final=False))
        shown_text, string = stop_string_in(text, old, conditions.stop, shown=include_stop)
        if string:
            return Answer(shown_text, count, "stop", string)
    reason = "length" if len(tokens) == conditions.max_tokens else None
    return Answer(text_of(tokens, final=True), len(tokens), reason, None)


def steps_of(tokens: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    places = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(places)]


dead_letters = st.text("abé😀", max_size=5)
answers = st.one_of(
    st.lists(dead_letters | st.just("<|end|>"), max_size=6).map("".join).map(ids),
    dead_letters.map(bytewise),
    st.lists(st.sampled_from([*bytewise("abé😀"), END, *ids("the a")]), max_size=16),
    st.lists(st.integers(0, 4095), max_size=16),
)
all_conditions = st.builds(
    StopConditions,
    max_tokens=st.none() | st.integers(1, 12),
    min_tokens=st.integers(0, 6),
    stop=st.lists(st.text("abé😀\ufffd", min_size=1, max_size=4), max_size=3).map(tuple),
    stop_token_ids=st.sampled_from([(), (BYTES[b"a"],), (END,)]),
    ignore_eos=st.booleans(),
    stop_token_ids_hidden=st.sampled_from([(), (BYTES[b"b"],)]),
)
cuts = st.lists(st.integers(0, 16), max_size=5)


@given(answers, all_conditions, st.booleans(), cuts)
@example(bytewise("aab"), StopConditions(stop=("ab",), min_tokens=2), False, [1])
def test_any_steps_show_the_same(
    tokens: list[int], conditions: StopConditions, include_stop: bool, some: list[int]
) -> None:
    text_stream = TextStream(
        TOKENIZER.detokenizer(), conditions, eos_token_ids=EOS, include_stop=include_stop
    )
    expected = reference(tokens, conditions, include_stop=include_stop)
    assert whole(text_stream, steps_of(tokens, some)) == expected


@given(answers, all_conditions, st.booleans(), cuts, st.lists(st.integers(0, 16), max_size=3))
def test_any_fences_show_the_same(
    tokens: list[int],
    conditions: StopConditions,
    include_stop: bool,
    some: list[int],
    fences: list[int],
) -> None:
    """Each run shows a part of its steps before the next one takes over with what was shown."""
    taken, text = 0, ""
    for fence in [*sorted(fences), None]:
        run = TextStream(
            TOKENIZER.detokenizer(),
            conditions,
            eos_token_ids=EOS,
            include_stop=include_stop,
            taken=tokens[:taken],
        )
        assert run.chars == len(text)
        for step in steps_of(tokens[taken:fence], some):
            piece = run.feed(step)
            taken, text = taken + piece.tokens, text + piece.text
    text += run.end().text
    last = run.ended or TextPiece("", 0)
    expected = reference(tokens, conditions, include_stop=include_stop)
    assert Answer(text, taken, last.finish_reason, last.stop_reason) == expected


@given(answers, all_conditions, st.booleans())
def test_chars_is_the_length_of_the_shown_text(
    tokens: list[int], conditions: StopConditions, include_stop: bool
) -> None:
    text_stream = TextStream(
        TOKENIZER.detokenizer(), conditions, eos_token_ids=EOS, include_stop=include_stop
    )
    text = "".join(text_stream.feed([token]).text for token in tokens) + text_stream.end().text
    assert text_stream.chars == len(text)
