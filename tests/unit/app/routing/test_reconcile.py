"""Tests of reconciliation: every row of the table in `app/routing/reconcile.py`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.reconcile import (
    Action,
    Decode,
    Finish,
    ReconcileTimeouts,
    Restart,
    Verify,
    next_action,
    next_action_times,
)
from kvlane.app.routing.state.fleet import Fleet, WorkerRank
from kvlane.app.routing.state.request_state import RequestState, RunId, RunState, RunStatus
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    EngineConfig,
    Heartbeat,
    LogRecord,
    Lost,
    RequestOffset,
    RunProgress,
    WorkerCard,
)

RUN = RunId(0, "aggregated", "w1", 7)
PREFILL = RunId(0, "prefill", "w1", 7)
TWIN = RunId(0, "aggregated", "w2", 8)
PATIENCE = ReconcileTimeouts(
    start_timeout_ms=3000, heartbeat_timeout_ms=2000, full_backoff_ms=50, full_backoff_max_ms=2000
)


def timeline(runs: dict[RunId, RunState], since_ms: int = 1000, **over: Any) -> RequestState:
    got = {"origin": RequestOffset(topic="requests", partition=0, offset=0), "deadline_ms": 60_000}
    found = {k: RunStatus(s, since_ms, WorkerRank(k.worker, k.epoch)) for k, s in runs.items()}
    return RequestState(**(got | {"runs": found} | over))


def fleet(lost: bool = False, listed: bool = True, beat_ms: int = 1000) -> Fleet:
    view = Fleet()
    cards = [
        WorkerCard(id=w, slot=0, model="m", config=EngineConfig(model="m"), epoch=e)
        for w, e in (("w1", 7), ("w2", 8))
    ]
    view.apply(Partition("registry", 0), [LogRecord(10 + n, 0, c) for n, c in enumerate(cards)], 20)
    running = (RunProgress(id="a", attempt=0, phase="aggregated"),) if listed else ()
    events: list[LogRecord] = [
        LogRecord(n, beat_ms, Heartbeat(worker=w, epoch=e, slot_offset=5, running=running))
        for n, (w, e) in enumerate((("w1", 7), ("w2", 8)))
    ]
    if lost:
        events.append(LogRecord(2, beat_ms, Lost(worker="w1", epoch=7)))
    view.apply(Partition("kv-events", 0), events, 3)
    return view


def owed(got: RequestState, view: Fleet | None = None, now_ms: int = 1500) -> Action | None:
    return next_action("a", got, view or fleet(), now_ms, PATIENCE)


def test_ended_request_has_no_next_action_whatever_its_state() -> None:
    assert owed(timeline({RUN: "broken"}, ended="cancelled"), fleet(lost=True), 99_999) is None


def test_unknown_id_has_no_next_action() -> None:
    assert owed(timeline({RUN: "worker_full"}, origin=None)) is None


def test_intended_attempt_without_a_run_is_resumed() -> None:
    assert owed(timeline({}, attempt=2)) == Restart(2, "resume")


@pytest.mark.parametrize("state", ["assigned", "started", "prefilled"])
def test_healthy_run_has_no_next_action(state: RunState) -> None:
    assert owed(timeline({RUN: state})) is None


@pytest.mark.parametrize("state", ["stop", "length", "cancelled", "error"])
def test_run_with_a_last_chunk_has_no_next_action_even_past_the_deadline(state: RunState) -> None:
    assert owed(timeline({RUN: state}), fleet(lost=True), now_ms=99_999) is None


@pytest.mark.parametrize("state", ["assigned", "started", "broken", "retryable", "worker_full"])
def test_passed_deadline_ends_unfinished_requests(state: RunState) -> None:
    assert owed(timeline({RUN: state}), now_ms=60_001) == Finish("deadline")


def test_expired_run_ends_the_request() -> None:
    assert owed(timeline({RUN: "expired"})) == Finish("deadline")


@pytest.mark.parametrize("state", ["broken", "retryable"])
def test_failed_run_is_restarted(state: RunState) -> None:
    assert owed(timeline({RUN: state})) == Restart(1, state)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["assigned", "started", "prefilled"])
def test_open_run_on_a_lost_epoch_is_restarted(state: RunState) -> None:
    assert owed(timeline({RUN: state}), fleet(lost=True)) == Restart(1, "lost")


def test_decode_is_due_after_a_prefill_that_was_handed_off() -> None:
    got = timeline({PREFILL: "handed_off"})
    assert not got.is_finished
    lost = fleet(lost=True, listed=False, beat_ms=50_000)
    assert owed(got, lost, 59_000) == Decode(0)  # whether it can be used shows where it is taken
    assert owed(got, now_ms=60_001) == Finish("deadline")


def test_decode_is_due_once() -> None:
    decode = RunId(0, "decode", "w2", 8)
    assert owed(timeline({PREFILL: "handed_off", decode: "assigned"})) is None
    assert owed(timeline({PREFILL: "handed_off", decode: "broken"})) == Restart(1, "broken")


def test_decode_does_not_wait_for_the_twin_of_its_prefill() -> None:
    twin = RunId(0, "prefill", "w2", 8)
    for state in ("started", "broken", "worker_full"):
        assert owed(timeline({PREFILL: "handed_off", twin: state})) == Decode(0)


def test_refused_decode_begins_the_next_attempt() -> None:
    refused = timeline({PREFILL: "handed_off", RunId(0, "decode", "w2", 8): "worker_full"})
    assert owed(refused, now_ms=59_000) == Restart(1, "worker_full")


DECODE = RunId(0, "decode", "w2", 8)


@pytest.mark.parametrize("waiting", ["assigned", "started"])
@pytest.mark.parametrize("state", ["broken", "retryable"])
def test_failed_prefill_ends_a_decode_that_waits_for_it(waiting: RunState, state: RunState) -> None:
    failed = timeline({PREFILL: state, DECODE: waiting})
    assert owed(failed) == Restart(1, state)  # type: ignore[arg-type]


def test_lost_prefill_ends_a_decode_that_waits_for_it() -> None:
    both = timeline({PREFILL: "started", DECODE: "started"})
    assert owed(both, fleet(lost=True)) == Restart(1, "lost")


def test_missing_prefill_is_looked_for_while_decode_waits_for_it() -> None:
    both = timeline({PREFILL: "assigned", DECODE: "assigned"}, since_ms=1000)
    assert owed(both, fleet(listed=False, beat_ms=3500), 4001) == Verify(DECODE)
    both.runs[DECODE].state, both.runs[DECODE].since_ms = "started", 3400
    assert owed(both, fleet(listed=False, beat_ms=3500), 4001) == Verify(PREFILL)


def test_refused_prefill_ends_a_decode_that_waits_for_it_after_the_back_off() -> None:
    refused = timeline({PREFILL: "worker_full", DECODE: "started"})
    assert owed(refused, now_ms=1001) is None
    at_ms = next_action_times("a", refused, 1001, PATIENCE).run_ms
    assert at_ms is not None
    assert owed(refused, now_ms=at_ms) == Restart(1, "worker_full")


def test_ages_of_runs_count_by_the_clock_of_the_ledgers_leader() -> None:
    lag_ms = 20_000
    refused, assigned = timeline({RUN: "worker_full"}), timeline({RUN: "assigned"})
    for got, view in ((refused, fleet()), (assigned, fleet(listed=False))):
        at_ms = next_action_times("a", got, 1001 + lag_ms, PATIENCE, lag_ms).run_ms
        assert at_ms is not None
        assert at_ms == next_action_times("a", got, 1001, PATIENCE).run_ms
        assert next_action("a", got, view, at_ms + lag_ms - 1, PATIENCE, lag_ms) is None
        assert next_action("a", got, view, at_ms + lag_ms, PATIENCE, lag_ms) is not None


def test_refused_decode_ends_the_prefill_beside_it() -> None:
    refused = timeline({PREFILL: "started", DECODE: "worker_full"})
    assert owed(refused, now_ms=59_000) == Restart(1, "worker_full")


@pytest.mark.parametrize("state", ["broken", "started", "worker_full"])
def test_decode_with_tokens_needs_no_prefill_any_more(state: RunState) -> None:
    both = timeline({PREFILL: state, DECODE: "prefilled"})
    assert owed(both, fleet(lost=True), 59_000) is None


def test_decode_whose_prefill_was_handed_over_needs_no_twin_of_it() -> None:
    twin = RunId(0, "prefill", "w3", 9)
    assert owed(timeline({PREFILL: "handed_off", twin: "broken", DECODE: "started"})) is None


def test_each_run_keeps_its_own_obligation() -> None:
    assert owed(timeline({RUN: "broken", TWIN: "started"})) == Restart(1, "broken")
    assert owed(timeline({TWIN: "started", RUN: "broken"})) == Restart(1, "broken")
    assert owed(timeline({RUN: "started", TWIN: "stop"}), fleet(lost=True)) == Restart(1, "lost")


def test_full_worker_is_due_after_its_back_off_and_not_before() -> None:
    got = timeline({RUN: "worker_full"}, since_ms=1000)
    assert owed(got, now_ms=1020) is None
    assert owed(got, now_ms=1050) == Restart(1, "worker_full")


@pytest.mark.parametrize("state", ["assigned", "started", "prefilled", "stop", "length"])
def test_refused_twin_does_not_fence_a_healthy_run(state: RunState) -> None:
    for runs in ({RUN: state, TWIN: "worker_full"}, {TWIN: "worker_full", RUN: state}):
        got = timeline(runs)  # type: ignore[arg-type]
        assert owed(got, now_ms=3000) is None
        assert got.is_finished == (state in ("stop", "length"))


def test_refused_twin_does_not_hide_the_outcome_of_the_other() -> None:
    assert owed(timeline({RUN: "broken", TWIN: "worker_full"})) == Restart(1, "broken")
    assert owed(timeline({RUN: "expired", TWIN: "worker_full"})) == Finish("deadline")
    assert owed(timeline({RUN: "started", TWIN: "worker_full"}), fleet(lost=True)) == Restart(
        1, "lost"
    )
    refused = timeline({RUN: "worker_full", TWIN: "worker_full"})
    assert owed(refused, now_ms=3000) == Restart(1, "worker_full")


def test_back_off_grows_with_the_refusals_up_to_its_limit() -> None:
    got = timeline({RUN: "worker_full"}, since_ms=1000, full_rejections=20)
    assert owed(got, now_ms=1900) is None
    assert owed(got, now_ms=3001) == Restart(1, "worker_full")


def test_assignment_that_does_not_start_is_verified_after_a_while() -> None:
    got = timeline({RUN: "assigned"}, since_ms=1000)
    assert owed(got, fleet(listed=False), now_ms=3900) is None
    assert owed(got, fleet(listed=False), now_ms=4001) == Verify(RUN)


def test_started_run_that_its_worker_no_longer_lists_is_verified() -> None:
    got = timeline({RUN: "started"}, since_ms=1000)
    assert owed(got, fleet(listed=False, beat_ms=2900)) is None
    assert owed(got, fleet(listed=False, beat_ms=3001)) == Verify(RUN)
    assert owed(got, fleet(listed=True, beat_ms=3001)) is None


def test_heartbeat_of_another_epoch_does_not_affect_a_run() -> None:
    """The worker has begun another life, and its card is still to be read: then the run is lost."""
    view = fleet(beat_ms=1000)
    beat = Heartbeat(worker="w1", epoch=30, slot_offset=5)
    view.apply(Partition("kv-events", 0), [LogRecord(3, 9000, beat)], 4)
    assert owed(timeline({RUN: "started"}), view, now_ms=9000) is None


RUNS = st.dictionaries(
    st.sampled_from([RUN, TWIN, RunId(1, "aggregated", "w1", 7), RunId(0, "prefill", "w1", 7)]),
    st.sampled_from(
        ["assigned", "started", "prefilled", "stop", "broken", "worker_full", "handed_off"]
    ),
    max_size=3,
)


@given(
    RUNS, st.integers(0, 1), st.integers(0, 5), st.booleans(), st.booleans(),
    st.integers(1000, 70_000), st.integers(0, 70_000),
)  # fmt: skip
def test_nothing_becomes_due_before_its_announced_time(
    runs: dict[RunId, RunState],
    attempt: int,
    fulls: int,
    lost: bool,
    listed: bool,
    now_ms: int,
    later_ms: int,
) -> None:
    got, view = timeline(runs, attempt=attempt, full_rejections=fulls), fleet(lost, listed)
    if owed(got, view, now_ms) is not None:
        return
    times = [at_ms for at_ms in next_action_times("a", got, now_ms, PATIENCE) if at_ms is not None]
    assert all(at_ms > now_ms for at_ms in times)
    then_ms = now_ms + later_ms
    if all(then_ms < at_ms for at_ms in times):
        assert owed(got, view, then_ms) is None
