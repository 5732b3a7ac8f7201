"""Tests of the usage of requests by the records of their ledger."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvlane.app.results.request_usage import REPORT_WAIT_MS, AnswerStart, LaneUsage, ShownAnswer
from kvlane.app.routing.state.request_state import LedgerRecord
from kvlane.streams.codecs import encode
from kvlane.streams.records import (
    Account,
    Assigned,
    Ended,
    Fencing,
    Finished,
    LogRecord,
    PrefillDone,
    RequestOffset,
    RequestUsage,
    Started,
    Usage,
)

ACCOUNT = Account("acme", "5f", "demo", "lora", "batch", "chat")
BEGUN: dict[str, Any] = {
    "origin": RequestOffset(topic="requests", partition=0, offset=7),
    "responses_from": 40, "deadline_ms": 9_000_000, "prompt_tokens": 100,
}  # fmt: skip


class Ledger:
    """A lane of the ledger, with one request `a`; a record is appended each 100 ms."""

    def __init__(self, window_ms: int = 60_000) -> None:
        self.lane = LaneUsage(window_ms)
        self.count = 0

    def append(self, *records: LedgerRecord) -> None:
        for record in records:
            self.lane.apply(LogRecord(self.count, 100 * self.count, record))
            self.count += 1

    def usage(self, after_ms: int = 0, shown: ShownAnswer | None = None) -> list[RequestUsage]:
        ready = list(self.lane.ready(100 * self.count + after_ms))
        self.lane.finish(ready)
        return [history.usage(shown) for history in ready]


def run(worker: str = "w1", attempt: int = 0, phase: Any = "aggregated") -> dict[str, Any]:
    return {"id": "a", "attempt": attempt, "phase": phase, "worker": worker, "epoch": 3}


def begun(worker: str = "w1", attempt: int = 0, base: int = 0) -> list[LedgerRecord]:
    key = run(worker, attempt)
    return [
        Assigned(**key, **BEGUN, base_tokens=base, account=ACCOUNT),
        Started(**key, **BEGUN, run=1),
        PrefillDone(**key, run=1, cached_tokens=32, prefill_ms=20.0),
    ]


def test_whole_answer_has_the_counts_of_its_client() -> None:
    ledger = Ledger()
    details = {"completion_tokens_details": {"reasoning_tokens": 4}}
    counts = Usage(prompt_tokens=100, completion_tokens=11, cached_tokens=32, details=details)
    ledger.append(
        *begun(), Finished(**run(), code="stop", output_tokens=11, itl_ms=3.0, usage=counts)
    )
    assert ledger.usage() == [
        RequestUsage(
            id="a", code="stop", ended_ms=300, tenant="acme", key_id="5f", model="demo",
            alias="chat", adapter="lora", service_class="batch", prompt_tokens=100,
            cached_tokens=32, output_tokens=11, reasoning_tokens=4, attempts=1, prefill_ms=20,
            decode_ms=30, workers=("w1",),
        )
    ]  # fmt: skip


def test_continued_answer_counts_its_prompt_once_and_what_was_computed_again() -> None:
    ledger = Ledger()
    counts = Usage(prompt_tokens=100, completion_tokens=11, cached_tokens=32)
    ledger.append(
        *begun(), Fencing(id="a", attempt=1, reason="lost"), *begun("w2", 1, base=5),
        Finished(**run("w2", 1), code="length", output_tokens=6, usage=counts),
    )  # fmt: skip
    [usage] = ledger.usage()
    assert (usage.prompt_tokens, usage.output_tokens) == (100, 11)
    assert usage.recomputed_tokens == 100 + 5 - 32
    assert (usage.attempts, usage.workers) == (2, ("w1", "w2"))


def test_cancelled_answer_waits_for_the_count_of_its_worker() -> None:
    ledger = Ledger()
    ledger.append(*begun(), Ended(id="a", code="cancelled"))
    assert ledger.usage() == []
    ledger.append(Finished(**run(), code="cancelled", output_tokens=7))
    [usage] = ledger.usage()
    assert (usage.code, usage.prompt_tokens, usage.output_tokens) == ("cancelled", 100, 7)


def test_answer_of_a_silent_worker_has_the_tokens_of_its_readers() -> None:
    ledger = Ledger()
    ledger.append(*begun(base=2), Ended(id="a", code="deadline"))
    [usage] = ledger.usage(after_ms=REPORT_WAIT_MS, shown=ShownAnswer(6, "deadline"))
    assert (usage.output_tokens, usage.unknown) == (6, ())


def test_answer_whose_end_its_readers_have_seen_has_that_end() -> None:
    ledger = Ledger()
    ledger.append(
        *begun(), Finished(**run(), code="broken"), Fencing(id="a", attempt=1),
        Ended(id="a", code="seen"),
    )  # fmt: skip
    [usage] = ledger.usage(shown=ShownAnswer(6, "stop"))
    assert (usage.code, usage.output_tokens) == ("stop", 6)


def test_answer_is_counted_from_its_begin_where_a_decision_has_no_record() -> None:
    """The router died before its `Assigned` was appended; the worker had its assignment."""
    ledger = Ledger()
    ledger.append(*begun()[:2], Fencing(id="a", attempt=1, reason="lost"))
    ledger.append(Started(**run("w2", 1), **BEGUN, run=2), Ended(id="a", code="lost"))
    (history,) = ledger.lane.ready(100 * ledger.count + REPORT_WAIT_MS)
    assert (history.needs_count, history.answer_start) == (True, AnswerStart(0, 0, 40))
    assert history.usage(ShownAnswer(12, "")).output_tokens == 12


def test_account_is_that_of_the_worker_where_a_decision_has_no_record() -> None:
    ledger = Ledger()
    ledger.append(Started(**run(), **BEGUN, run=1, account=ACCOUNT), Ended(id="a", code="seen"))
    (usage,) = ledger.usage(REPORT_WAIT_MS + 1)
    assert (usage.tenant, usage.key_id) == ("acme", "5f")


def test_cancelled_run_without_a_decision_is_counted_too() -> None:
    ledger = Ledger()
    ledger.append(*begun()[:2], Fencing(id="a", attempt=1, reason="lost"))
    ledger.append(Started(**run("w2", 1), **BEGUN, run=2), Ended(id="a", code="cancelled"))
    ledger.append(Finished(**run("w2", 1), code="cancelled", output_tokens=3))
    (history,) = ledger.lane.ready(100 * ledger.count)
    assert history.needs_count


def test_renewed_answer_is_counted_from_its_renewal() -> None:
    ledger = Ledger()
    ledger.append(*begun(), Fencing(
        id="a", attempt=1, reason="renewed", responses_from=70, base_tokens=9,
    ), Ended(id="a", code="deadline"))  # fmt: skip
    (history,) = ledger.lane.ready(100 * ledger.count + REPORT_WAIT_MS)
    assert (history.needs_count, history.answer_start) == (True, AnswerStart(1, 9, 70))


def test_answer_without_kept_records_has_an_unknown_output() -> None:
    ledger = Ledger()
    ledger.append(*begun(base=2), Ended(id="a", code="deadline"))
    [usage] = ledger.usage(after_ms=REPORT_WAIT_MS)
    assert (usage.output_tokens, usage.unknown) == (2, ("output_tokens",))


def test_request_that_was_refused_has_its_account_and_no_tokens() -> None:
    ledger = Ledger()
    ledger.append(Ended(id="a", code="none_eligible", account=ACCOUNT))
    [usage] = ledger.usage()
    assert (usage.tenant, usage.code, usage.attempts) == ("acme", "none_eligible", 0)
    assert (usage.prompt_tokens, usage.output_tokens) == (0, 0)


def test_prompt_that_no_worker_has_computed_counts_no_tokens() -> None:
    ledger = Ledger()
    ledger.append(*begun()[:2], Ended(id="a", code="no_workers"))
    [usage] = ledger.usage(after_ms=REPORT_WAIT_MS, shown=ShownAnswer(0, ""))
    assert (usage.prompt_tokens, usage.attempts) == (0, 1)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, -5.0, 1e308])
def test_usage_is_a_number_whatever_records_say(odd: float) -> None:
    ledger = Ledger()
    ledger.append(*begun()[:2], PrefillDone(**run(), run=1, cached_tokens=-3, prefill_ms=odd))
    ledger.append(Finished(**run(), code="stop", output_tokens=2**63 - 1, itl_ms=odd))
    [usage] = ledger.usage()
    counts = (usage.prefill_ms, usage.decode_ms, usage.output_tokens, usage.cached_tokens)
    assert all(0 <= each <= 2**40 for each in counts)
    encode(usage, usage.id)


def test_late_records_and_repetitions_make_no_second_usage() -> None:
    ledger = Ledger()
    counts = Usage(prompt_tokens=100, completion_tokens=1)
    ledger.append(*begun(), Finished(**run(), code="stop", output_tokens=1, usage=counts))
    assert len(ledger.usage()) == 1
    ledger.append(*begun("w2"), Finished(**run("w2"), code="stop", output_tokens=9))
    ledger.append(Ended(id="a", code="seen"), Ended(id="b", code="seen"))
    assert ledger.usage(after_ms=REPORT_WAIT_MS) == []


def test_repetition_after_the_window_of_the_ledger_leaves_the_usage_as_it_is() -> None:
    """The collector was down for longer than the ledger knows ids."""
    ledger = Ledger(window_ms=200)
    ledger.append(Ended(id="a", code="invalid", account=ACCOUNT))
    ledger.append(*(Ended(id=f"b{n}", code="invalid") for n in range(9)))
    ledger.append(Ended(id="a", code="seen"))
    assert [usage.id for usage in ledger.usage()] == ["a", *(f"b{n}" for n in range(9))]
    assert ledger.lane.first_besides(()) is None


def test_written_usage_is_not_made_again_from_an_earlier_offset() -> None:
    ledger = Ledger()
    ledger.lane.add_written({"a": 0})
    ledger.append(*begun(), Finished(**run(), code="stop", output_tokens=1))
    assert ledger.usage(after_ms=REPORT_WAIT_MS) == []


def test_first_record_is_that_of_the_oldest_request_without_usage() -> None:
    ledger = Ledger()
    ledger.append(*begun())
    ledger.append(Ended(id="b", code="invalid"))
    first = ledger.lane.first_besides({3})
    assert first is not None
    assert (first.id, first.offset) == ("a", 0)
    assert ledger.lane.first_besides({0, 3}) is None
