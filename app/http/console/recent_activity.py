"""Recent decisions of a deployment, and its figures over time, in rings.

Fed with the records of `ledger` and the ends of requests, in the order in which they are read.
Memory: `MAX_DECISIONS` decisions, `MAX_BUCKETS` points, and the facts of `MAX_SAMPLES` requests of
each that is not final. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from kvlane.app.audit.cost_terms import ScoredCandidate, reasons_for
from kvlane.app.audit.fleet.request_facts import COMPLETED, RequestFacts
from kvlane.app.audit.fleet.request_rows import RequestRow
from kvlane.app.audit.fleet.worker_rows import WorkerRow
from kvlane.streams.ports import Partition
from kvlane.streams.records import Assigned, LogRecord
from kvlane.streams.topics import LEDGER

MAX_DECISIONS = 200
MAX_CANDIDATES = 6
"""Candidates of a decision that are shown, the cheapest."""
BUCKET_MS = 5_000
MAX_BUCKETS = 120
"""Ten minutes."""
MAX_SAMPLES = 200
"""Requests of a bucket whose times count at most: of more, each second, fourth and so on."""
SETTLED_MS = 4 * BUCKET_MS
"""Age at which a point is final. Before that the requests of a bucket are kept, since their begin
may be read after their end: partitions are read one after the other."""


class ShownCandidate(msgspec.Struct, frozen=True):
    worker: str
    rank: int
    is_chosen: bool
    cost: float
    terms: dict[str, float]
    cached_tokens: int
    open_runs: int
    open_tokens: int
    waiting_tokens: int


class DecisionRow(msgspec.Struct, frozen=True):
    """A decision as `kvlane explain` has it. `number`: of the decisions that were read, from 1.
    `runner_up`: "" without one; `lost_by`: its cost above that of the chosen worker."""

    number: int
    at_ms: int
    id: str
    attempt: int
    phase: str
    worker: str
    rank: int
    policy: str
    router: str
    service_class: str
    held_ms: int
    prompt_tokens: int
    cached_tokens_predicted: int
    ttft_ms_predicted: float
    itl_ms_predicted: float
    unit: str = ""
    words: str = ""
    choice: str = ""
    runner_up: str = ""
    lost_by: float | None = None
    lost_in: str = ""
    candidates: list[ShownCandidate] = []


class FigurePoint(msgspec.Struct, frozen=True):
    """Figures of the `BUCKET_MS` from `at_ms` on; times in ms, rates in requests a second, shares
    from 0 to 1. None: unknown."""

    at_ms: int
    ended_rate: float
    failed_rate: float
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    queued: int | None
    running: int | None
    hit_rate: float | None
    kv_use: float | None


class _Bucket:
    def __init__(self) -> None:
        self.ended = self.failed = 0
        self.answered: list[RequestFacts] = []
        """Each `distance`-th."""
        self.distance = 1
        self.point: FigurePoint | None = None
        """The final one."""
        self.queued: int | None = None
        self.running: int | None = None
        self.hit_rate: float | None = None
        self.kv_use: float | None = None


class RecentActivity:
    def __init__(self) -> None:
        self.decisions = 0
        """Number of those that were read."""
        self._ring: deque[tuple[int, LogRecord]] = deque(maxlen=MAX_DECISIONS)
        self._buckets: OrderedDict[int, _Bucket] = OrderedDict()

    def on_records(self, source: Partition, log_records: Sequence[LogRecord]) -> None:
        if source.topic != LEDGER:
            return
        for log_record in log_records:
            if type(log_record.record) is Assigned:
                self.decisions += 1
                self._ring.append((self.decisions, log_record))

    def on_ended(self, facts: RequestFacts) -> None:
        """Count a request that has ended."""
        bucket = self._bucket(facts.ended_ms)
        if bucket is None:
            return
        if facts.code not in COMPLETED:
            bucket.failed += 1
            return
        bucket.ended += 1
        if bucket.ended % bucket.distance == 0:
            bucket.answered.append(facts)
        if len(bucket.answered) > MAX_SAMPLES:
            del bucket.answered[::2]
            bucket.distance *= 2

    def sample(
        self, now_ms: int, workers: Sequence[WorkerRow], open_requests: Sequence[RequestRow]
    ) -> None:
        """Note the state of the moment; the last one of a bucket counts."""
        bucket = self._bucket(now_ms)
        if bucket is None:
            return
        bucket.queued = sum(row.phase == "queued" for row in open_requests)
        bucket.running = len(open_requests) - bucket.queued
        bucket.hit_rate = _mean([row.hit_rate for row in workers])
        bucket.kv_use = _mean([row.kv_use for row in workers])

    def points(self, now_ms: int) -> list[FigurePoint]:
        """The points of the buckets, the oldest first; the last one is not complete."""
        points = []
        for at_ms in sorted(self._buckets):
            bucket = self._buckets[at_ms]
            point = bucket.point or _point(at_ms, bucket)
            if at_ms < now_ms - SETTLED_MS:
                bucket.point = point
                bucket.answered.clear()
            if at_ms >= now_ms - MAX_BUCKETS * BUCKET_MS:
                points.append(point)
        return points

    def newest(self, after: int, most: int) -> list[tuple[int, LogRecord]]:
        """The newest decisions with their numbers, those above `after`, the last one first."""
        found = [each for each in reversed(self._ring) if each[0] > after]
        return found[:most]

    def _bucket(self, at_ms: int) -> _Bucket | None:
        """The bucket of a time; None for one before those that are kept."""
        start_ms = at_ms - at_ms % BUCKET_MS
        bucket = self._buckets.get(start_ms)
        if bucket is None:
            bucket = self._buckets[start_ms] = _Bucket()
            if len(self._buckets) > MAX_BUCKETS:
                oldest = min(self._buckets)
                del self._buckets[oldest]
                if oldest == start_ms:
                    return None
        return bucket


def _point(at_ms: int, bucket: _Bucket) -> FigurePoint:
    seconds = BUCKET_MS / 1000
    begun = [facts for facts in bucket.answered if facts.since_ms and facts.first_token_ms]
    ttft = [max(0, facts.first_token_ms - facts.since_ms) for facts in begun]
    itl = [
        max(0, facts.ended_ms - facts.first_token_ms) / (facts.output_tokens - 1)
        for facts in begun
        if facts.output_tokens > 1
    ]
    return FigurePoint(
        at_ms, bucket.ended / seconds, bucket.failed / seconds, _quantile(ttft, 0.5),
        _quantile(ttft, 0.95), _quantile(itl, 0.5), _quantile(itl, 0.95), bucket.queued,
        bucket.running, bucket.hit_rate, bucket.kv_use,
    )  # fmt: skip


def _quantile(samples: Sequence[float], share: float) -> float | None:
    if not samples:
        return None
    ordered = sorted(samples)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None


def decision_rows(decisions: Sequence[tuple[int, LogRecord]]) -> list[DecisionRow]:
    """Rows of decisions with the terms of the costs, recomputed: up to a millisecond for each."""
    return [_decision_row(number, log_record) for number, log_record in decisions]


def _decision_row(number: int, log_record: LogRecord) -> DecisionRow:
    record = log_record.record
    assert isinstance(record, Assigned)
    reasons = reasons_for(record)
    more: dict[str, Any] = {}
    if reasons is not None:
        weighed = sorted([reasons.chosen, *reasons.others], key=lambda each: each.cost)
        shown = weighed[:MAX_CANDIDATES]
        if reasons.chosen not in shown:
            shown[-1] = reasons.chosen
        more = {
            "unit": reasons.unit, "words": reasons.words, "choice": reasons.choice,
            "runner_up": reasons.others[0].worker if reasons.others else "",
            "lost_by": reasons.lost_by if reasons.others else None, "lost_in": reasons.lost_in,
            "candidates": [_candidate(each, is_chosen=each is reasons.chosen) for each in shown],
        }  # fmt: skip
    return DecisionRow(
        number, log_record.timestamp_ms, record.id, record.attempt, record.phase, record.worker,
        record.rank, record.policy, record.router, record.service_class, record.held_ms,
        record.prompt_tokens, record.cached_tokens_predicted, record.ttft_ms_predicted,
        record.itl_ms_predicted, **more,
    )  # fmt: skip


def _candidate(scored: ScoredCandidate, *, is_chosen: bool) -> ShownCandidate:
    has = scored.inputs
    return ShownCandidate(
        scored.worker, scored.rank, is_chosen, scored.cost, scored.terms, scored.cached_tokens,
        has.open_runs, has.open_tokens, has.prefill_tokens,
    )  # fmt: skip
