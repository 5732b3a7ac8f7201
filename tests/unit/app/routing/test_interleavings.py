"""Tests of random orders of records: when all requests have ended, no state of them is left, no
action is due, and all readers agree."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.reconcile import ReconcileTimeouts, next_action
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Assigned,
    Ended,
    Fencing,
    Finished,
    Heartbeat,
    LogRecord,
    Lost,
    PrefillDone,
    RequestOffset,
    RunProgress,
    Started,
)

LANES = (0, 1, 2)
WINDOW_MS = 1_200_000
FOREVER_MS = 10**9
REQUESTS = {"a": 0, "b": 0, "c": 1, "d": 2}
"""By their lanes."""
RUN_CODES = ["stop", "length", "cancelled", "error", "broken", "worker_full", "expired"]

RUNS = {
    "attempt": st.integers(0, 3),
    "phase": st.sampled_from(["aggregated", "prefill", "decode"]),
    "worker": st.sampled_from(["w1", "w2"]),
    "epoch": st.integers(0, 2),
}
PLACES = {
    "origin": st.just(RequestOffset(topic="requests", partition=0, offset=0)),
    "responses_from": st.integers(0, 9),
    "deadline_ms": st.integers(0, 5000),
    "prompt_tokens": st.integers(0, 99),
}
IDS = st.sampled_from(sorted(REQUESTS))
NEWS = st.one_of(
    st.builds(
        Assigned, id=IDS, **RUNS, **PLACES, rank=st.integers(0, 1), base_tokens=st.integers(0, 9),
        prefill_tokens=st.integers(0, 99), lora_name=st.sampled_from(["", "l"]),
        policy=st.sampled_from(["dynamo", "direct"]),
    ),
    st.builds(Started, id=IDS, **RUNS, **PLACES, run=st.just(1)),
    st.builds(PrefillDone, id=IDS, **RUNS, run=st.just(1)),
    st.builds(Finished, id=IDS, **RUNS, code=st.sampled_from(RUN_CODES), retryable=st.booleans()),
    st.builds(Fencing, id=IDS, attempt=st.integers(0, 3), reason=st.just("lost")),
)  # fmt: skip


def _fleet(rng: random.Random) -> Fleet:
    """A fleet in which workers list runs that may be over, and may be dead."""
    fleet = Fleet()
    running = tuple(
        RunProgress(id=i, attempt=rng.randint(0, 3), phase="aggregated") for i in REQUESTS
    )
    log_records: list[LogRecord] = [
        LogRecord(
            n, 1000, Heartbeat(worker=w, epoch=rng.randint(0, 2), slot_offset=1, running=running)
        )
        for n, w in enumerate(("w1", "w2"))
    ]
    if rng.random() < 0.5:
        log_records.append(LogRecord(2, 1000, Lost(worker="w1", epoch=rng.randint(0, 2))))
    fleet.apply(Partition("kv-events", 0), log_records, len(log_records))
    return fleet


def _lanes(records: list[Any]) -> dict[int, list[LogRecord]]:
    lanes: dict[int, list[LogRecord]] = {lane: [] for lane in LANES}
    for n, record in enumerate(records):
        log_records = lanes[REQUESTS[record.id]]
        log_records.append(LogRecord(len(log_records), 1000 + n, record))
    return lanes


def _read(lanes: dict[int, list[LogRecord]], rng: random.Random) -> LedgerState:
    load, at = LedgerState(WINDOW_MS), dict.fromkeys(LANES, 0)
    while left := [lane for lane in LANES if at[lane] < len(lanes[lane])]:
        lane = rng.choice(left)
        size = rng.randint(1, 4)
        batch = lanes[lane][at[lane] : at[lane] + size]
        at[lane] += len(batch)
        load.apply(Partition("ledger", lane), batch, at[lane])
    return load


@given(st.lists(NEWS, max_size=40), st.randoms(use_true_random=False))
def test_finished_requests_leave_no_state_and_no_duties(
    news: list[Any], rng: random.Random
) -> None:
    records = list(news)
    for request_id in REQUESTS:  # each ends somewhere in the middle, the rest comes too late
        records.insert(rng.randint(0, len(records)), Ended(id=request_id, code="cancelled"))
    lanes = _lanes(records)
    one, other = _read(lanes, rng), _read(lanes, rng)
    fleet = _fleet(rng)
    for load in (one, other):
        assert not load.active_load
        assert load.active_load.adapter_runs("l") == 0
        for request_id, lane in REQUESTS.items():
            timeline = load.request(lane, request_id)
            assert timeline is not None
            assert timeline.ended
            for now_ms in (0, 2000, FOREVER_MS):
                assert next_action(request_id, timeline, fleet, now_ms, ReconcileTimeouts()) is None
            assert not load.lane(lane).unfinished
    for lane in LANES:
        source = Partition("ledger", lane)
        if lanes[lane]:
            assert one.state_hash(source) == other.state_hash(source)


@given(st.lists(NEWS, max_size=40), st.randoms(use_true_random=False))
def test_replicas_agree_on_load_and_duties_at_every_moment(
    news: list[Any], rng: random.Random
) -> None:
    lanes = _lanes(news)
    one, other = _read(lanes, rng), _read(lanes, rng)
    fleet = _fleet(rng)
    for worker in ("w1", "w2"):
        for epoch in range(3):
            assert one.active_load.total(worker, epoch) == other.active_load.total(worker, epoch)
    assert one.active_load.adapter_runs("l") == other.active_load.adapter_runs("l")
    for request_id, lane in REQUESTS.items():
        first, second = one.request(lane, request_id), other.request(lane, request_id)
        assert first == second
        if first is not None and second is not None:
            for now_ms in (0, 2000, FOREVER_MS):
                sent = fleet, now_ms, ReconcileTimeouts()
                assert next_action(request_id, first, *sent) == next_action(
                    request_id, second, *sent
                )


@given(st.lists(NEWS, max_size=40), st.randoms(use_true_random=False))
def test_unfinished_request_is_running_or_has_a_next_action(
    news: list[Any], rng: random.Random
) -> None:
    load, fleet = _read(_lanes(news), rng), _fleet(rng)
    for request_id, lane in REQUESTS.items():
        timeline = load.lane(lane).unfinished.get(request_id)
        if timeline is not None:
            handed_off = any(run.state == "handed_off" for run in timeline.runs.values())
            owed = next_action(request_id, timeline, fleet, FOREVER_MS, ReconcileTimeouts())
            assert owed is not None or handed_off or (not timeline.runs and timeline.attempt == 0)
