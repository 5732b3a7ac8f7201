"""Tests of lines of a JSONL file that arrives in pieces, and the requests of a batch that they
are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.batches import batch_requests as requests
from kvlane.app.batches.batch_requests import (
    JobRequest,
    JsonlLine,
    RequestKeys,
    lines_of,
    parse_line,
)
from kvlane.app.preprocess.json_limits import MAX_PARTS, UNCHECKED_BYTES
from kvlane.app.preprocess.thread_pool import run_now
from kvlane.streams.record_types.batch_records import BatchError
from tests.harness.batch_harness import CHATS, chat_line

MOST = 20


async def _pieces(content: bytes, sizes: Sequence[int]) -> AsyncIterator[bytes]:
    at = 0
    for size in sizes:
        yield content[at : at + size]
        at += size
    yield content[at:]


def lines(content: bytes, *sizes: int, most: int = MOST) -> list[JsonlLine]:
    async def read() -> list[JsonlLine]:
        return [line async for line in lines_of(_pieces(content, sizes), most)]

    return asyncio.run(read())


def expected(content: bytes, most: int = MOST) -> list[JsonlLine]:
    """The same, of a file that is whole in memory."""
    found = []
    for number, line in enumerate(content.split(b"\n"), 1):
        stripped = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
        if len(line) > most:
            found.append(JsonlLine(number, None))
        elif stripped:
            found.append(JsonlLine(number, stripped))
    return found


def test_lines_are_numbered_and_blank_ones_count() -> None:
    assert lines(b"\xef\xbb\xbfa\r\n\n \t\nbc\n") == [JsonlLine(1, b"a"), JsonlLine(4, b"bc")]
    assert lines(b"a\nb") == [JsonlLine(1, b"a"), JsonlLine(2, b"b")]
    assert lines(b"") == lines(b"\n\n") == []


def test_only_the_number_of_a_too_long_line_is_kept() -> None:
    content = b"a\n" + b"x" * (MOST + 1) + b"\n" + b"y" * MOST + b"\n"
    for size in (1, 2, 7, 100):
        found = lines(content, *[size] * len(content))
        assert found == [JsonlLine(1, b"a"), JsonlLine(2, None), JsonlLine(3, b"y" * MOST)]
    assert lines(b"z" * 100, 30, 30) == [JsonlLine(1, None)]


def test_blank_lines_are_skipped_together() -> None:
    content = b"a\n" + b"\n" * 1000 + b" \t\r\n" * 1000 + b" " * MOST + b"\n" + b"b"
    assert lines(content) == [JsonlLine(1, b"a"), JsonlLine(2003, b"b")]
    assert lines(b"\n" * 10 + b" " * (MOST + 1) + b"\n") == [JsonlLine(11, None)]


@given(
    st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b" ", b"xyz" * 4, b"\xff", b"\xef\xbb\xbf"])),
    st.lists(st.integers(0, 30)),
)
def test_pieces_of_any_size_give_the_same_lines(parts: list[bytes], sizes: list[int]) -> None:
    content = b"".join(parts)
    assert lines(content, *sizes) == expected(content)


# --- requests -------------------------------------------------------------------------------------


def parsed(line: Any) -> JobRequest | BatchError:
    content = line if isinstance(line, bytes) else json.dumps(line).encode()
    return run_now(parse_line(JsonlLine(7, content), 3, CHATS))


def test_line_becomes_a_request() -> None:
    found = parsed(chat_line("a", extra="ignored"))
    assert found == JobRequest(3, 7, "a", chat_line("a")["body"])


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"", "invalid_json_line", None),
        (b"{", "invalid_json_line", None),
        (b'{"custom_id": "\xff\xfe"}', "invalid_json_line", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
        (b"[" * 100_000, "invalid_request", None),
        (b"[]", "invalid_request", None),
        ({}, "invalid_request", None),
        (chat_line("x" * 513), "invalid_request", None),
        (chat_line("a", custom_id=5), "invalid_request", None),
        (chat_line("a", body=[]), "invalid_request", None),
        (chat_line("a", method="PUT"), "invalid_method", "method"),
        (chat_line("a", url="/v1/models"), "mismatched_url", "url"),
        (chat_line("a", body={"model": ""}), "missing_required_parameter", "body.model"),
        (chat_line("a", body={"model": "m", "stream": 1}), "unsupported_parameter", "body.stream"),
        (chat_line("a", body={"model": "m", "nvext": 0}), "unsupported_parameter", "body.nvext"),
    ],
)
def test_wrong_line_is_an_error_with_its_number(line: Any, code: str, param: str | None) -> None:
    found = parsed(line)
    assert isinstance(found, BatchError)
    assert (found.line, found.code, found.param) == (7, code, param)
    assert len(found.message) < 300


def test_null_in_a_line_is_not_given() -> None:
    body = chat_line("a")["body"] | {"stream": None, "nvext": None}
    assert parsed(chat_line("a", method=None, body=body)) == JobRequest(3, 7, "a", body)


def test_line_that_is_too_long_is_an_error() -> None:
    found = run_now(parse_line(JsonlLine(7, None), 3, CHATS))
    assert isinstance(found, BatchError)
    assert found.code == "line_too_large"


@given(
    st.binary() | st.dictionaries(st.text(), st.integers()).map(lambda d: json.dumps(d).encode())
)
def test_no_line_is_more_than_an_error(content: bytes) -> None:
    assert isinstance(parsed(content), JobRequest | BatchError)


@pytest.mark.parametrize(
    "metadata",
    ["[" + "[]," * MAX_PARTS + "[]]", json.dumps(dict.fromkeys(map(str, range(70_000)), 0))],
)
def test_line_has_the_bounds_of_a_body_and_is_read_in_steps(metadata: str) -> None:
    line = json.dumps(chat_line("a")).encode()
    long = line.replace(b'"model"', b'"metadata":%s,"model"' % metadata.encode())
    reading = parse_line(JsonlLine(7, long), 3, CHATS)
    steps = 0
    try:
        while True:
            next(reading)
            steps += 1
    except StopIteration as end:
        found = end.value
    assert isinstance(found, BatchError)
    assert (found.line, found.code) == (7, "invalid_request")
    assert "too large" in found.message
    assert steps >= 5


@pytest.mark.parametrize("wanted", [True, False])
def test_other_tasks_run_while_a_file_is_read(wanted: bool) -> None:
    """For lines that are wanted and for skipped ones: about 64 KiB are read at a time."""
    body = {"model": "demo", "input": "x" * (UNCHECKED_BYTES // 3)}
    content = json.dumps(chat_line("a", body=body)).encode() + b"\n"
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read() -> int:
        task = asyncio.create_task(other())
        pieces = _pieces(content * 60, [])
        found = [r async for r in requests.requests_of(pieces, CHATS, lambda _: wanted)]
        task.cancel()
        return len(found)

    assert asyncio.run(read()) == (60 if wanted else 0)
    assert turns >= 15


def test_ids_of_requests_follow_from_batch_and_line() -> None:
    job = "batch_0198c5a4-0000-7000-8000-000000000001"
    names = [requests.request_id(job, index) for index in (1, 50_000)]
    assert [requests.request_index(job, name) for name in names] == [1, 50_000]
    others = ("x", names[0].replace("0198", "0199"), names[0][:-1], names[0] + "x", names[0] + "²")
    assert [requests.request_index(job, name) for name in others] == [None] * len(others)
    keys = RequestKeys(job)
    assert all(name.encode() in keys for name in names)
    assert others[1].encode() not in keys
    assert None not in keys
    assert CHATS in requests.KINDS
