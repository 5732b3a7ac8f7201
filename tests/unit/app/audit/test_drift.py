"""Tests of drift: windows and percentiles of errors, and excluded runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.audit.drift import (
    MAX_OPEN_DECISIONS,
    MAX_RUNS,
    MIN_RUNS,
    WINDOW_MS,
    DriftSummary,
    DriftTracker,
    ErrorShares,
)
from kvlane.streams.records import (
    Assigned,
    Candidate,
    Finished,
    LogRecord,
    PrefillDone,
    RequestOffset,
)

SIZE = 16
NOW_MS = 10_000_000


def assigned(name: str, cached: int = 0, ttft_ms: float = 0.0, **over: Any) -> Assigned:
    fields = {"id": name, "attempt": 0, "phase": "aggregated", "worker": "w1", "epoch": 3} | over
    return Assigned(
        **{
            "origin": RequestOffset(topic="requests", partition=0, offset=0), "responses_from": 0,
            "deadline_ms": 0, "block_size": SIZE, "cached_tokens_predicted": cached,
            "ttft_ms_predicted": ttft_ms, "listed": (Candidate(worker="w1", epoch=3),),
        }
        | fields
    )  # fmt: skip


def finished(name: str, cached: int = 0, ttft_ms: float = 1.0, **over: Any) -> Finished:
    fields = {"id": name, "attempt": 0, "phase": "aggregated", "worker": "w1", "epoch": 3} | over
    return Finished(**{"code": "stop", "cached_tokens": cached, "ttft_ms": ttft_ms} | fields)


def write(drift: DriftTracker, record: Any, at_ms: int = NOW_MS) -> None:
    drift.on_record(LogRecord(0, at_ms, record))


def run(
    drift: DriftTracker, name: str, expected: int, found: int, at_ms: int = NOW_MS, **over: Any
) -> None:
    write(drift, assigned(name, expected, **over), at_ms)
    write(drift, finished(name, found, **over), at_ms)


def test_cache_agrees_while_nearly_all_runs_are_within_a_block() -> None:
    drift = DriftTracker()
    for n in range(100):
        run(drift, str(n), 160, 160 if n < 50 else 176 if n < 95 else 0)
    assert drift.summary_of(["w1"], NOW_MS) == DriftSummary(100, 1.0, None)
    assert drift.summary_of(["w1"], NOW_MS).is_within_limit is True
    run(drift, "one more", 160, 0)
    run(drift, "and another", 0, 160)
    assert drift.summary_of(["w1"], NOW_MS).blocks == 10.0
    assert drift.summary_of(["w1"], NOW_MS).is_within_limit is False


def test_fetched_blocks_are_no_drift_of_a_decode_worker() -> None:
    drift = DriftTracker()
    for n in range(MIN_RUNS):
        write(drift, assigned(str(n), 0, phase="prefill", worker="p1"))
        write(drift, finished(str(n), 160, phase="prefill", worker="p1", code="handed_off"))
        run(drift, str(n), 0, 1600, phase="decode")
    assert drift.summary_of(["p1"], NOW_MS) == DriftSummary(MIN_RUNS, 10.0)
    assert drift.workers_with_runs(NOW_MS) == ["p1"]


def test_too_few_runs_raise_no_alert() -> None:
    drift = DriftTracker()
    for n in range(MIN_RUNS - 1):
        run(drift, str(n), 0, 1600)
    assert drift.summary_of(["w1"], NOW_MS) == DriftSummary(MIN_RUNS - 1)
    assert drift.summary_of(["w1"], NOW_MS).is_within_limit is None
    run(drift, "last", 0, 1600)
    assert drift.summary_of(["w1"], NOW_MS).is_within_limit is False


def test_runs_older_than_the_window_do_not_count() -> None:
    drift = DriftTracker()
    for n in range(30):
        run(drift, str(n), 0, 1600, NOW_MS)
    assert drift.summary_of(["w1"], NOW_MS + WINDOW_MS - 1).runs == 30
    assert drift.summary_of(["w1"], NOW_MS + WINDOW_MS).runs == 0
    assert drift.workers_with_runs(NOW_MS + WINDOW_MS - 1) == ["w1"]
    assert drift.workers_with_runs(NOW_MS + WINDOW_MS) == []


def test_first_tokens_are_compared_where_one_was_expected() -> None:
    drift = DriftTracker()
    for n in range(40):
        write(drift, assigned(str(n), ttft_ms=0.0 if n % 2 else 50.0))
        write(drift, finished(str(n), ttft_ms=80.0))
    assert drift.summary_of(["w1"], NOW_MS) == DriftSummary(
        40, 0.0, 30.0, ErrorShares(0.375, 0.375)
    )


@pytest.mark.parametrize("code", ["cancelled", "error", "broken", "worker_full", "expired"])
def test_runs_that_failed_do_not_count(code: str) -> None:
    drift = DriftTracker()
    for n in range(MIN_RUNS):
        write(drift, assigned(str(n), 160))
        write(drift, finished(str(n), code=code))
    assert drift.summary_of(["w1"], NOW_MS).runs == 0


def test_only_the_run_that_was_decided_on_counts() -> None:
    drift = DriftTracker()
    write(drift, finished("a"))
    write(drift, assigned("b"))
    write(drift, finished("b", epoch=4))
    write(drift, assigned("c"))
    write(drift, finished("c", attempt=1))
    write(drift, assigned("d", block_size=0))
    write(drift, finished("d"))
    write(drift, assigned("e", listed=()))
    write(drift, finished("e"))
    write(drift, assigned("f"))
    write(drift, PrefillDone(id="f", attempt=0, phase="aggregated", worker="w1", epoch=3, run=1))
    write(drift, finished("f"))
    write(drift, finished("f"))
    assert drift.summary_of(["w1"], NOW_MS).runs == 1


def test_memory_is_bounded() -> None:
    drift = DriftTracker()
    for n in range(MAX_OPEN_DECISIONS + 1):
        write(drift, assigned(str(n)))
    write(drift, finished("0"))
    write(drift, finished("1"))
    assert drift.summary_of(["w1"], NOW_MS).runs == 1
    for n in range(MAX_RUNS + 100):
        run(drift, f"again {n}", 0, 0)
    assert drift.summary_of(["w1"], NOW_MS).runs == MAX_RUNS


def test_errors_of_predictions_are_shares_of_the_measured_times() -> None:
    drift = DriftTracker()
    for n in range(40):
        write(drift, assigned(str(n), ttft_ms=100.0 + n, itl_ms_predicted=20.0))
        write(drift, finished(str(n), ttft_ms=50.0, itl_ms=0.0 if n < 10 else 25.0))
    found = drift.summary_of(["w1"], NOW_MS)
    assert found.ttft_error == pytest.approx((1.38, 1.7))
    assert found.itl_error == pytest.approx((0.2, 0.2)), "answers of one token have no such time"
    for n in range(MIN_RUNS):
        run(drift, f"unpredicted {n}", 0, 0, worker="w2")
    assert drift.summary_of(["w2"], NOW_MS).ttft_error is None


CASES = st.lists(
    st.tuples(
        st.sampled_from(["w1", "w2"]),
        st.integers(0, 40),
        st.integers(0, 40),
        st.integers(0, 2 * WINDOW_MS),
    ),
    max_size=120,
)


@given(CASES, st.integers(0, 2 * WINDOW_MS), st.randoms(use_true_random=False))
def test_drift_matches_its_definition_for_interleaved_lanes(
    cases: list[tuple[str, int, int, int]], now_ms: int, rng: Any
) -> None:
    records: list[tuple[int, Any]] = []
    for n, (worker, expected, found, at_ms) in enumerate(cases):
        over = {"worker": worker, "listed": (Candidate(worker=worker, epoch=3),)}
        records.append((at_ms, assigned(str(n), expected * SIZE, **over)))
        records.append((at_ms, finished(str(n), found * SIZE, worker=worker)))
    order = sorted(range(len(records)), key=lambda i: (rng.random(), i))
    begun: set[str] = set()
    drift = DriftTracker()
    for i in order:  # each Assigned before its Finished, else in any order
        for at_ms, record in (records[i - i % 2], records[i - i % 2 + 1]):
            if isinstance(record, Assigned) and record.id in begun:
                break
            begun.add(record.id)
            write(drift, record, at_ms)
    for workers in (["w1"], ["w2"], ["w1", "w2"], []):
        values = sorted(
            abs(expected - found)
            for worker, expected, found, at_ms in cases
            if worker in workers and now_ms - WINDOW_MS < at_ms
        )
        got = drift.summary_of(workers, now_ms)
        assert got.runs == len(values)
        if len(values) < MIN_RUNS:
            assert got.is_within_limit is None
            continue
        assert got.blocks == values[math.ceil(0.95 * len(values) - 1e-9) - 1]
        assert got.is_within_limit is (sum(v <= 1 for v in values) >= 0.95 * len(values) - 1e-9)
