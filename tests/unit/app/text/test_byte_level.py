"""Tests of bytes as tokens: no half character is ever shown, and no cut changes the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.text.byte_level import (
    ASSISTANT,
    END_OF_TEXT,
    SYSTEM,
    USER,
    ByteDetokenizer,
    encode_bytes,
    render_chat,
)
from tests.harness.decoded import decode_bytes

EURO = encode_bytes("€")


def test_chat_is_marked_turn_by_turn() -> None:
    tokens = render_chat([("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v")])
    assert tokens == [SYSTEM, *b"s", USER, *b"u", ASSISTANT, *b"a", USER, *b"v", ASSISTANT]


def test_developer_message_is_rendered_as_system() -> None:
    assert render_chat([("developer", "x")]) == render_chat([("system", "x")])


def test_character_comes_out_whole_with_its_last_byte() -> None:
    detokenizer = ByteDetokenizer()
    assert [detokenizer.push([b]) for b in EURO] == ["", "", "€"]


def test_half_a_character_across_a_resume_comes_out_once() -> None:
    taken = encode_bytes("a") + EURO[:2]
    detokenizer = ByteDetokenizer(taken)
    assert detokenizer.chars == 1
    assert detokenizer.push(EURO[2:] + encode_bytes("b")) == "€b"


def test_unfinished_character_at_the_end_is_replaced() -> None:
    detokenizer = ByteDetokenizer()
    assert detokenizer.push(EURO[:2]) == ""
    assert detokenizer.end() == "\ufffd"


def test_markers_have_no_text() -> None:
    assert decode_bytes([*b"a", USER, END_OF_TEXT, *b"b"]) == "ab"


def test_lone_surrogates_are_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        encode_bytes("\ud800")


@given(
    data=st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    resumed_at=st.integers(0, 40),
)
def test_text_is_the_same_for_any_split(data: bytes, cuts: list[int], resumed_at: int) -> None:
    first = ByteDetokenizer()
    text = first.push(data[:resumed_at])
    rest = data[resumed_at:]
    second = ByteDetokenizer(data[:resumed_at])
    assert second.chars == len(text)
    edges = [0, *sorted(min(c, len(rest)) for c in cuts), len(rest)]
    for start, stop in pairwise(edges):
        text += second.push(rest[start:stop])
    assert text + second.end() == data.decode("utf-8", "replace")
