"""Tests of traces of requests: reading, and errors of other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, InvalidTrace, read_trace

LINE = '{"timestamp": 5, "input_length": 513, "output_length": 2, "hash_ids": [7, 8]}'


def test_shipped_slice_is_a_trace() -> None:
    rows = read_trace(BUNDLED_TRACE)
    assert len(rows) == 300
    assert rows[0].timestamp == 0


def test_requests_come_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    earlier = LINE.replace('p": 5', 'p": 3')
    file.write_text(f"{LINE}\n\n{earlier}\n")
    assert [row.timestamp for row in read_trace(file)] == [3, 5]


def test_only_whole_chunks_can_be_shared(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(LINE)
    assert read_trace(file)[0].full_chunks == [7]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no requests"),
        ("nonsense", "line 1"),
        (f'{LINE}\n{{"timestamp": 1}}', "line 2"),
        (LINE.replace("513", "512"), "line 1: 2 chunks"),
        (LINE.replace("513", "0").replace("[7, 8]", "[]"), "line 1: 0 chunks"),
        (LINE.replace("[7, 8]", "[7, -8]"), "line 1"),
        (LINE.replace('p": 5', 'p": -5'), "line 1"),
    ],
)
def test_invalid_trace_is_refused_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidTrace, match=why):
        read_trace(file)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match=r"absent.jsonl: No such file"):
        read_trace(tmp_path / "absent.jsonl")
