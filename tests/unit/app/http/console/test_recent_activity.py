"""Tests of the rings of decisions and figures of the console."""

from __future__ import annotations

from kvlane.app.audit.fleet.request_facts import RequestFacts
from kvlane.app.http.console.recent_activity import (
    BUCKET_MS,
    MAX_BUCKETS,
    MAX_DECISIONS,
    MAX_SAMPLES,
    RecentActivity,
    decision_rows,
)
from kvlane.streams.ports import Partition
from kvlane.streams.records import Assigned, LogRecord, RequestOffset
from kvlane.streams.topics import LEDGER, REQUESTS

NOW_MS = 1_790_000_000_000


def decided(number: int) -> LogRecord:
    record = Assigned(
        id=f"r{number}", attempt=0, phase="aggregated", worker="w1", epoch=1,
        origin=RequestOffset(topic=REQUESTS, partition=0, offset=number), responses_from=0,
        deadline_ms=NOW_MS,
    )  # fmt: skip
    return LogRecord(number, NOW_MS + number, record)


def ended(at_ms: int, ttft_ms: int = 40, code: str = "stop", tokens: int = 11) -> RequestFacts:
    return RequestFacts(
        0, began_ms=at_ms - 1000, first_token_ms=at_ms - 1000 + ttft_ms, ended_ms=at_ms,
        output_tokens=tokens, code=code,
    )  # fmt: skip


def test_ring_of_decisions_keeps_the_newest() -> None:
    activity = RecentActivity()
    for number in range(3 * MAX_DECISIONS):
        activity.on_records(Partition(LEDGER, 0), [decided(number)])
    rows = decision_rows(activity.newest(0, 10_000))
    assert len(rows) == MAX_DECISIONS
    assert [row.id for row in rows[:2]] == [
        f"r{3 * MAX_DECISIONS - 1}",
        f"r{3 * MAX_DECISIONS - 2}",
    ]
    assert [row.number for row in decision_rows(activity.newest(activity.decisions - 2, 40))] == [
        activity.decisions, activity.decisions - 1,
    ]  # fmt: skip
    assert rows[0].words == "", "a decision without inputs"


def test_point_has_rates_and_percentiles_of_its_seconds() -> None:
    activity = RecentActivity()
    for ttft_ms in range(1, 101):
        activity.on_ended(ended(NOW_MS, ttft_ms))
    activity.on_ended(ended(NOW_MS, code="error"))
    (point,) = activity.points(NOW_MS)
    assert (point.ended_rate, point.failed_rate) == (100 / 5, 1 / 5)
    assert (point.ttft_p50, point.ttft_p95) == (51, 96)
    assert point.itl_p50 == 95.0, "(1000 - 50) ms for 10 tokens after the first"
    assert point.queued is None


def test_buckets_and_samples_have_a_bound_and_old_ends_are_left_out() -> None:
    activity = RecentActivity()
    for number in range(2 * MAX_BUCKETS):
        for _ in range(MAX_SAMPLES + 50 if number % 40 == 0 else 1):
            activity.on_ended(ended(NOW_MS + number * BUCKET_MS))
    activity.on_ended(ended(NOW_MS))
    last_ms = NOW_MS + (2 * MAX_BUCKETS - 1) * BUCKET_MS
    assert len(activity.points(last_ms)) == MAX_BUCKETS
    assert len(activity._buckets) == MAX_BUCKETS
    assert min(activity._buckets) > NOW_MS
    assert sum(len(bucket.answered) for bucket in activity._buckets.values()) == 5, "not final"


def test_begin_that_is_read_after_the_end_counts() -> None:
    activity, facts = RecentActivity(), ended(NOW_MS)
    began_ms, facts.began_ms = facts.began_ms, 0
    activity.on_ended(facts)
    assert activity.points(NOW_MS)[0].ttft_p50 is None
    facts.began_ms = began_ms
    assert activity.points(NOW_MS)[0].ttft_p50 == 40
    (final,) = activity.points(NOW_MS + 10 * BUCKET_MS)
    facts.began_ms = 0
    assert activity.points(NOW_MS + 10 * BUCKET_MS) == [final]
