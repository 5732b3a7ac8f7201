"""Tests of pending results: the records that belong to the reply of a request."""

from __future__ import annotations

import pytest

from kvlane.app.results.pending_result import PendingResult
from kvlane.streams.clock import CLOCK_SKEW_MS
from kvlane.streams.records import Chunk, End, LogRecord
from kvlane.streams.request import Request, ResultOptions

APPENDED_MS = 10_000_000
WHOLE = Chunk(id="r", attempt=0, run="1", seq=0, index=0, text="a", chars=1, finish_reason="stop")


def pending_result() -> PendingResult:
    options = ResultOptions(kind="completion")
    request = Request(id="r", token_ids=b"\1\0\0\0", result=options)
    return PendingResult(LogRecord(9, APPENDED_MS, request), request, options)


@pytest.mark.parametrize(
    ("record", "at_ms"),
    [(WHOLE, APPENDED_MS - CLOCK_SKEW_MS - 1), (End(id="r", code="lost", origin=8), APPENDED_MS)],
)
def test_reply_of_an_earlier_copy_is_not_that_of_the_request(
    record: Chunk | End, at_ms: int
) -> None:
    pending = pending_result()
    assert not pending.apply(record, at_ms)
    assert pending.is_silent


def test_reply_may_be_older_than_its_request_by_the_clocks_of_two_brokers() -> None:
    assert pending_result().apply(WHOLE, APPENDED_MS - CLOCK_SKEW_MS)
