"""Tests of the demo's figures of a request from the ledger: its workers, its cached tokens,
hand-overs."""

from __future__ import annotations

from kvlane.app.demo.ledger_reader import LedgerDecisions, TimeErrors
from kvlane.app.demo.policy_comparison import PolicyRun, prediction_lines
from kvlane.streams.clock import SystemClock
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.records import Assigned, Finished, Phase, PrefillDone, RequestOffset, RunCode

ORIGIN = RequestOffset(topic="requests", partition=0, offset=0)


def ledger_decisions() -> LedgerDecisions:
    return LedgerDecisions(MemoryLog(MemoryBroker(SystemClock(), lanes=1), "reader"))


def run(
    decisions: LedgerDecisions,
    phase: Phase,
    worker: str,
    cached: int,
    *,
    code: RunCode = "stop",
    attempt: int = 0,
) -> None:
    """The records of one run; without PrefillDone if it has failed."""
    decisions.on_record(
        Assigned(
            id="a", attempt=attempt, phase=phase, worker=worker, epoch=1, origin=ORIGIN,
            responses_from=0, deadline_ms=0,
        )
    )  # fmt: skip
    fields = {"id": "a", "attempt": attempt, "worker": worker, "epoch": 1, "run": 1}
    if code != "error":
        decisions.on_record(PrefillDone(phase=phase, cached_tokens=cached, **fields))  # type: ignore[arg-type]
    decisions.on_record(Finished(phase=phase, code=code, cached_tokens=cached, **fields))  # type: ignore[arg-type]


def test_cached_tokens_of_a_handed_over_request_are_those_of_its_prefill() -> None:
    decisions = ledger_decisions()
    run(decisions, "prefill", "p1", 32, code="handed_off")
    assert decisions.cached_tokens("a") is None
    assert decisions.handed_over_requests == 0
    run(decisions, "decode", "d1", 100)
    assert decisions.cached_tokens("a") == 32
    assert decisions.handed_over_requests == 1
    assert decisions.answering_workers("a") == ["d1"]
    assert decisions.workers_of("a") == ["p1", "d1"]


def test_whole_request_is_not_handed_over() -> None:
    decisions = ledger_decisions()
    run(decisions, "aggregated", "d1", 48)
    assert (decisions.cached_tokens("a"), decisions.handed_over_requests) == (48, 0)


def test_failed_decode_is_no_hand_over() -> None:
    decisions = ledger_decisions()
    run(decisions, "prefill", "p1", 0, code="handed_off")
    run(decisions, "decode", "d1", 0, code="error")
    run(decisions, "aggregated", "d2", 0, attempt=1)
    assert decisions.handed_over_requests == 0
    assert decisions.answering_workers("a") == ["d1", "d2"]


def test_prediction_is_compared_with_the_times_of_its_run() -> None:
    decisions = ledger_decisions()
    place = {"attempt": 0, "phase": "aggregated", "worker": "w1", "epoch": 1}
    for name, predicted_ms in (("a", 60.0), ("b", 0.0)):
        made = Assigned(
            id=name, origin=ORIGIN, responses_from=0, deadline_ms=0,
            ttft_ms_predicted=predicted_ms, itl_ms_predicted=predicted_ms / 10, **place,  # type: ignore[arg-type]
        )  # fmt: skip
        decisions.on_record(made)
        end = Finished(id=name, code="stop", ttft_ms=40.0, itl_ms=8.0, **place)  # type: ignore[arg-type]
        decisions.on_record(end)
    assert decisions.prediction_errors("a") == TimeErrors(0.5, 0.25)
    assert decisions.prediction_errors("b") == decisions.prediction_errors("c") == TimeErrors()


def test_policies_that_predict_get_a_line_of_errors() -> None:
    runs = [
        PolicyRun("by cache", (), 1.0, 0.5, 0.5, {"TTFT": [0.1, 0.2, 0.4], "ITL": []}),
        PolicyRun("in turn", (), 1.0, 0.5, 0.5, {"TTFT": [], "ITL": []}),
    ]
    assert prediction_lines(runs) == [
        "by cache: error of the prediction, TTFT 20% (median), 40% (p90)"
    ]
