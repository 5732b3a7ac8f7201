"""Tests of the capture format: whole files or none, and errors that name the fault."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvlane.app.traces.capture_format import (
    CAPTURE_FORMAT,
    AnyCaptureLine,
    CapturedDecision,
    CapturedRequest,
    CaptureHeader,
    CaptureTotals,
    InvalidCapture,
    created_capture,
    read_capture,
)
from kvlane.streams.records import Assigned, Candidate, RequestOffset

HEAD = CaptureHeader(format=CAPTURE_FORMAT, from_ms=1, to_ms=9, lanes=4)
ASKED = CapturedRequest(id="a", at_ms=2, prompt_tokens=40, block_size=16, blocks=bytes(range(16)))
DECIDED = CapturedDecision(
    at_ms=3, lane=1, offset=7,
    decision=Assigned(
        id="a", attempt=0, phase="aggregated", worker="w", epoch=1, responses_from=0,
        deadline_ms=5, origin=RequestOffset(topic="requests", partition=1, offset=0),
        seed=2**32 - 1,
        listed=(Candidate(worker="w", epoch=1, cost=0.1 + 0.2, ahead_ms=(1e-17, 1 / 3)),),
    ),
)  # fmt: skip
LAST = CaptureTotals(lines={"Capture": 1})


@pytest.fixture(params=["run.jsonl", "run.jsonl.zst"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def put(file: Path, *lines: AnyCaptureLine) -> None:
    with created_capture(file) as out:
        for line in lines:
            out.write_line(line)


def test_capture_is_read_back_bit_by_bit(file: Path) -> None:
    put(file, HEAD, ASKED, DECIDED, LAST)
    assert list(read_capture(file)) == [HEAD, ASKED, DECIDED, LAST]


def test_infinite_values_are_preserved(file: Path) -> None:
    decision = DECIDED.decision
    cheap, dear = decision.candidates[0], replace(decision.candidates[0], cost=inf)
    endless = replace(decision, params={"a": 1.0, "b": inf}, listed=(cheap, dear))
    line = replace(DECIDED, decision=endless)
    put(file, HEAD, line, LAST)
    assert list(read_capture(file)) == [HEAD, line, LAST]


def test_lines_look_as_they_are_documented(tmp_path: Path) -> None:
    put(tmp_path / "x", HEAD, ASKED, LAST)
    assert (tmp_path / "x").read_bytes().splitlines() == [
        b'{"t":"Capture","format":1,"from_ms":1,"to_ms":9,"lanes":4}',
        (
            b'{"t":"Asked","id":"a","at_ms":2,"prompt_tokens":40,"block_size":16,'
            b'"blocks":"AAECAwQFBgcICQoLDA0ODw=="}'
        ),
        b'{"t":"Counted","lines":{"Capture":1}}',
    ]


def test_blocks_have_numbers_for_names() -> None:
    assert ASKED.block_hashes.tolist() == [0x0706050403020100, 0x0F0E0D0C0B0A0908]


def test_name_that_ends_in_zst_is_compressed(tmp_path: Path) -> None:
    lines = [HEAD, *[ASKED] * 1000, LAST]
    put(tmp_path / "a.zst", *lines)
    put(tmp_path / "a", *lines)
    assert (tmp_path / "a.zst").stat().st_size * 20 < (tmp_path / "a").stat().st_size


def test_file_is_there_whole_or_not_at_all(file: Path) -> None:
    file.write_text("from before")

    def fail() -> None:
        with created_capture(file) as out:
            out.write_line(HEAD)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert file.read_text() == "from before"
    assert list(file.parent.iterdir()) == [file]


def test_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCapture, match=r"absent/x cannot be written: No such file"):
        put(tmp_path / "absent" / "x", HEAD)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCapture, match=r"absent: No such file"):
        list(read_capture(tmp_path / "absent"))


def test_file_that_was_cut_is_no_capture(file: Path) -> None:
    put(file, HEAD, *[ASKED] * 50, LAST)
    whole = file.read_bytes()
    for size in (1, 5, len(whole) // 2, len(whole) - 2):
        file.write_bytes(whole[:size])
        with pytest.raises(InvalidCapture, match="capture"):
            list(read_capture(file))
    put(file, HEAD, ASKED)
    with pytest.raises(InvalidCapture, match="truncated after line 2"):
        list(read_capture(file))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "truncated after line 0"),
        ("nonsense\n", "line 1: not a line of a capture"),
        ('{"timestamp": 0, "hash_ids": []}\n', "line 1: not a line of a capture"),
        ('{"t":"Asked","id":"a","at_ms":2,"prompt_tokens":40,"block_size":16}\n', "not a capture"),
        ('{"t":"Capture","format":2,"from_ms":1,"to_ms":2}\n', "format 2, this version reads 1"),
        ('{"t":"Capture","format":1,"from_ms":1,"to_ms":2}\n{"t":"Asked"}\n', "line 2"),
    ],
)
def test_malformed_capture_is_refused_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "x"
    file.write_text(text)
    with pytest.raises(InvalidCapture, match=why):
        list(read_capture(file))


def test_lines_and_fields_of_later_versions_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text(
        '{"t":"Capture","format":1,"from_ms":1,"to_ms":9,"lanes":4,"mood":"new"}\n'
        '{"t":"Poem","lines":3}\n'
        '{"t":"Counted","lines":{"Capture":1}}\n'
    )
    assert list(read_capture(file)) == [HEAD, LAST]
