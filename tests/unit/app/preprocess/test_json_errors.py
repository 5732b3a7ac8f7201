"""Tests of errors of malformed JSON: the right position."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.preprocess.json_limits import json_error


def why(body: bytes) -> str:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError, RecursionError)) as failed:
        msgspec.json.decode(body)
    return json_error(body, failed.value)


@pytest.mark.parametrize(
    ("body", "at"),
    [
        (rb'{"a":"\ud800"}', 6),
        (rb'{"a":"\ud800x"}', 6),
        (rb'{"a":"\ud800\n"}', 6),
        (rb'{"a":"\ud800xxxxxxxxxxxxxxx"}', 6),
        (rb'{"a":"\ud800\u0041"}', 6),
        (rb'{"a":"\udc00"}', 6),
        (rb'{"a":"\uDC00xxxxxxxxxxx"}', 6),
        (rb'{"a":"\ud83d\ude00\udc00xxxxxxxxxxx"}', 18),
        (rb'{"a":"\\\ud800"}', 8),
        (rb'{"\ud800":1}', 2),
    ],
)
def test_lone_surrogate_is_named_with_its_position(body: bytes, at: int) -> None:
    assert why(body) == f"the escape at byte {at} is a lone surrogate (one half of a character)"


@pytest.mark.parametrize(
    ("body", "output"),
    [
        (b'{"a":"xx\xff"}', "byte 0xff at position 8 is not UTF-8"),
        (b'{"\xc3(":1}', "byte 0xc3 at position 2 is not UTF-8"),
        ("{'a': 'é'}".encode(), "JSON is malformed: object keys must be strings (byte 1)"),
        (b'{"a":', "it ends within a value, after 5 bytes"),
        (b"", "it ends within a value, after 0 bytes"),
        (rb'{"a":"\\ud800"', "it ends within a value, after 14 bytes"),
        (b"[" * 100_000, "it is nested too deep"),
    ],
)
def test_other_reasons(body: bytes, output: str) -> None:
    assert why(body) == output


@given(st.binary(max_size=40))
def test_any_bytes_have_a_reason(body: bytes) -> None:
    error: Exception | None = None
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        error = e
    assert error is None or json_error(body, error)
