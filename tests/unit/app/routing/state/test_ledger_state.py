"""Tests of the view of the ledger: open requests, ended ones, and known ids."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.state.active_load import WorkerLoad
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.request_state import RunId
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Assigned,
    Ended,
    Fencing,
    Finished,
    LogRecord,
    PrefillDone,
    RequestOffset,
    RunKey,
    Started,
)

LANE = Partition("ledger", 3)
ORIGIN = RequestOffset(topic="requests", partition=3, offset=7)
RUN: dict[str, Any] = {"phase": "aggregated", "worker": "w1", "epoch": 10}
PLACE: dict[str, Any] = {"origin": ORIGIN, "deadline_ms": 60_000, "prompt_tokens": 5}


def assigned(name: str = "a", attempt: int = 0, responses_from: int = 4, **over: Any) -> Assigned:
    return Assigned(id=name, attempt=attempt, responses_from=responses_from, **(RUN | PLACE | over))


def started(name: str = "a", attempt: int = 0, responses_from: int = 4, **over: Any) -> Started:
    return Started(
        id=name, attempt=attempt, run=1, responses_from=responses_from, **(RUN | PLACE | over)
    )


def finished(code: Any = "stop", name: str = "a", attempt: int = 0, **over: Any) -> Finished:
    return Finished(id=name, attempt=attempt, code=code, **(RUN | over))


def prefilled(name: str = "a", attempt: int = 0, **over: Any) -> PrefillDone:
    return PrefillDone(id=name, attempt=attempt, run=1, **(RUN | over))


def applied(*records: Any, step_ms: int = 10, load: LedgerState | None = None) -> LedgerState:
    load = load or LedgerState(dedup_window_ms=1_200_000)
    first = load.position(LANE) or 0
    for n, record in enumerate(records, first):
        load.apply(LANE, [LogRecord(n, 1000 + n * step_ms, record)], n + 1)
    return load


def states(load: LedgerState, name: str = "a") -> dict[RunId, str]:
    timeline = load.request(3, name)
    return {} if timeline is None else {k: run.state for k, run in timeline.runs.items()}


def on(load: LedgerState, worker: str = "w1", rank: int = 0) -> WorkerLoad:
    return load.active_load.load(WorkerRank(worker, 10, rank))


def ended(load: LedgerState, name: str = "a") -> str:
    timeline = load.request(3, name)
    assert timeline is not None
    return timeline.ended


def test_started_without_assigned_counts_as_assigned() -> None:
    load = applied(started())
    timeline = load.request(3, "a")
    assert timeline is not None
    assert timeline.is_known
    assert timeline.origin == ORIGIN
    assert states(load) == {RunId(0, "aggregated", "w1", 10): "started"}


def test_lowest_responses_from_is_kept() -> None:
    load = applied(
        assigned(responses_from=9), started(responses_from=4), assigned(responses_from=6)
    )
    timeline = load.request(3, "a")
    assert timeline is not None
    assert timeline.responses_from == 4


NEXT = RequestOffset(topic="requests", partition=3, offset=20)


def renewed(attempt: int = 1, **over: Any) -> Fencing:
    fields = {"origin": NEXT, "responses_from": 30, "deadline_ms": 90_000} | over
    return Fencing(id="a", attempt=attempt, reason="renewed", **fields)


@pytest.mark.parametrize("is_seen_from_its_begin", [False, True])
def test_renewal_moves_a_request_for_every_router(is_seen_from_its_begin: bool) -> None:
    """A router that starts reads no older record of it than the renewal."""
    before = [assigned(), Fencing(id="a", attempt=1, reason="preempted")]
    load = applied(*before * is_seen_from_its_begin, renewed(), started(), assigned(attempt=1))
    copy = LedgerState(dedup_window_ms=1_200_000)
    copy.restore(LANE, load.snapshot(LANE), load.position(LANE) or 0)
    for each in (load, copy):
        state = each.request(3, "a")
        assert state is not None
        assert (state.origin, state.responses_from, state.deadline_ms) == (NEXT, 30, 90_000)
        assert (state.attempt, state.failures, state.is_prompt) == (1, 0, True)
        assert (state.is_known, state.renewed_at) == (True, 20)


@pytest.mark.parametrize("attempt", [0, 1])
def test_renewal_does_not_count_once_its_attempt_has_a_run(attempt: int) -> None:
    load = applied(assigned(), Fencing(id="a", attempt=1, reason="preempted"), assigned(attempt=1))
    applied(renewed(attempt), load=load)
    state = load.request(3, "a")
    assert state is not None
    assert (state.origin, state.responses_from, state.renewed_at) == (ORIGIN, 4, -1)


def test_lone_finished_does_not_mark_an_id_as_seen() -> None:
    timeline = applied(finished("worker_full")).request(3, "a")
    assert timeline is not None
    assert not timeline.is_known


def test_first_close_of_a_run_is_final() -> None:
    load = applied(assigned(), finished("broken"), started(), finished("stop"))
    assert list(states(load).values()) == ["broken"]


def test_fencing_closes_the_runs_below_and_nothing_below_opens_afterwards() -> None:
    load = applied(
        assigned(), Fencing(id="a", attempt=1, reason="lost"), started(), finished("stop")
    )
    timeline = load.request(3, "a")
    assert timeline is not None
    assert timeline.attempt == 1
    assert timeline.runs == {}
    assert not timeline.is_finished


def test_ended_is_final() -> None:
    load = applied(assigned(), Ended(id="a", code="cancelled"), assigned(attempt=1), started())
    timeline = load.request(3, "a")
    assert timeline is not None
    assert timeline.is_finished
    assert timeline.runs == {}
    assert load.lane(3).unfinished == {}


def test_full_workers_use_up_no_attempts_and_are_not_avoided() -> None:
    load = applied(
        assigned(), finished("worker_full"), Fencing(id="a", attempt=1, reason="worker_full")
    )
    timeline = load.request(3, "a")
    assert timeline is not None
    assert (timeline.failures, timeline.full_rejections, timeline.failed_workers) == (0, 1, set())


def test_evacuation_uses_up_no_attempt_and_its_worker_is_avoided() -> None:
    load = applied(assigned(), started(), Fencing(id="a", attempt=1, reason="evacuated"))
    state = load.request(3, "a")
    assert state is not None
    assert (state.attempt, state.failures, state.failed_workers) == (1, 0, {"w1"})


def test_failed_worker_is_recorded() -> None:
    load = applied(assigned(), finished("broken"), Fencing(id="a", attempt=1, reason="broken"))
    timeline = load.request(3, "a")
    assert timeline is not None
    assert timeline.failures == 1
    assert timeline.failed_workers == {"w1"}


def test_full_worker_beside_a_broken_run_has_not_failed() -> None:
    load = applied(
        assigned(),
        finished("broken"),
        finished("worker_full", worker="w2"),
        Fencing(id="a", attempt=1, reason="broken"),
    )
    timeline = load.request(3, "a")
    assert timeline is not None
    assert (timeline.failures, timeline.failed_workers) == (1, {"w1"})


def test_loads_follow_the_runs() -> None:
    load = applied(assigned(), assigned("b"), started("b"))
    both = load.active_load.total("w1", 10)
    assert (both.runs, both.tokens, both.prefill_runs) == (2, 10, 2)
    applied(finished(), Fencing(id="b", attempt=1, reason="lost"), load=load)
    assert load.active_load.total("w1", 10) == WorkerLoad(0, 0)
    assert not load.active_load


def test_prefill_counts_until_it_is_done_and_as_much_as_was_predicted() -> None:
    load = applied(assigned(prompt_tokens=100, base_tokens=20, prefill_tokens=70, rank=1))
    applied(started(prompt_tokens=100), load=load)
    assert on(load, rank=1) == WorkerLoad(1, 120, 70, 1, 1010)
    assert on(load) == WorkerLoad()
    applied(prefilled(), load=load)
    assert on(load, rank=1) == WorkerLoad(1, 120)


def test_load_is_counted_by_adapter_until_the_run_ends() -> None:
    load = applied(
        assigned(lora_name="l"), assigned("b", lora_name="l", worker="w2"), assigned("c")
    )
    assert load.active_load.adapter_runs("l") == 2
    applied(finished(), load=load)
    assert load.active_load.adapter_runs("l") == 1
    restored = LedgerState(dedup_window_ms=1_200_000)
    restored.restore(LANE, load.snapshot(LANE), load.position(LANE) or 0)
    assert restored.active_load.adapter_runs("l") == 1
    applied(Ended(id="b", code="cancelled"), load=load)
    assert load.active_load.adapter_runs("l") == 0


def test_run_of_policy_direct_has_no_load() -> None:
    load = applied(assigned(policy="direct", prompt_tokens=500))
    assert on(load) == WorkerLoad(1, 0, 0, 1, 1000)


def test_last_prefill_end_of_a_rank_is_kept_until_it_is_idle() -> None:
    place = WorkerRank("w1", 10, 0)
    load = applied(assigned(), assigned("b"), prefilled())
    assert load.active_load.last_first_token_ms[place] == 1020
    applied(prefilled("b"), finished(), load=load)
    assert load.active_load.last_first_token_ms[place] == 1030
    second = LedgerState(dedup_window_ms=1_200_000)
    second.restore(LANE, load.snapshot(LANE), load.position(LANE) or 0)
    assert second.active_load.last_first_token_ms[place] == 1030
    applied(finished(name="b"), load=load)
    assert load.active_load.last_first_token_ms.get(place) is None


def test_last_first_token_of_a_rank_is_kept_while_a_run_waits_there() -> None:
    runs = assigned("a"), assigned("b"), prefilled("a"), finished(name="a"), started("b")
    load = applied(*runs)
    assert load.active_load.last_first_token_ms == {WorkerRank("w1", 10, 0): 1020}


def test_started_without_a_decision_has_the_load_of_its_whole_prompt() -> None:
    load = applied(started(prompt_tokens=100))
    assert on(load) == WorkerLoad(1, 100, 100, 1, 1000)
    applied(assigned(prompt_tokens=100, prefill_tokens=30, rank=1), load=load)
    assert on(load) == WorkerLoad()
    assert on(load, rank=1) == WorkerLoad(1, 100, 30, 1, 1000)


@pytest.mark.parametrize("service_class", ["interactive", "batch"])
def test_late_first_token_of_a_superseded_attempt_leaves_the_load_of_the_next_one(
    service_class: Any,
) -> None:
    """Also where both are on the same worker."""
    fence = Fencing(id="a", attempt=1, reason="lost")
    again = assigned(attempt=1, prefill_tokens=5, service_class=service_class)
    load = applied(assigned(service_class=service_class), started(), fence, again)
    place = WorkerRank("w1", 10, 0)
    before = on(load), load.batch_runs.load(place)
    applied(prefilled(), load=load)
    assert states(load) == {RunId(1, "aggregated", "w1", 10): "assigned"}
    assert (on(load), load.batch_runs.load(place)) == before
    assert load.active_load.last_first_token_ms == {}
    applied(prefilled(attempt=1), load=load)
    assert (on(load), load.batch_runs.load(place)) != before


def test_prefill_that_was_handed_off_is_not_the_end_of_its_request() -> None:
    load = applied(assigned(phase="prefill"), prefilled(phase="prefill"))
    applied(finished("handed_off", phase="prefill"), load=load)
    assert states(load) == {RunId(0, "prefill", "w1", 10): "handed_off"}
    assert "a" in load.lane(3).unfinished
    assert not load.active_load
    applied(assigned(phase="decode"), finished(phase="decode"), load=load)
    assert ended(load) == "stop"


def begun_at_once() -> LedgerState:
    """A prefill on w1, and the decode beside it on w2."""
    prefill = assigned(phase="prefill", prefill_tokens=5)
    return applied(prefill, assigned(phase="decode", worker="w2"))


@pytest.mark.parametrize("record", [prefilled, finished])
def test_first_token_or_end_of_a_decode_ends_its_prefill(record: Any) -> None:
    load = begun_at_once()
    assert on(load).prefill_runs == 1
    applied(record(phase="decode", worker="w2"), load=load)
    assert not on(load).runs
    assert ended(load) == ("stop" if record is finished else "")
    assert not load.lane(3).open_runs.get(("w1", 10))


@pytest.mark.parametrize("code", ["broken", "worker_full"])
def test_failed_decode_does_not_end_its_prefill(code: str) -> None:
    load = applied(finished(code, phase="decode", worker="w2"), load=begun_at_once())
    assert states(load)[RunId(0, "prefill", "w1", 10)] == "assigned"
    assert on(load).prefill_runs == 1


def test_request_is_not_over_while_its_prefill_and_decode_run() -> None:
    load = applied(prefilled(phase="prefill"), load=begun_at_once())
    assert "a" in load.lane(3).unfinished
    assert not on(load).runs


def test_end_of_a_request_is_kept_and_nothing_after_it_counts() -> None:
    load = applied(assigned(), finished())
    applied(Fencing(id="a", attempt=1, reason="lost"), started(attempt=1), started(), load=load)
    assert ended(load) == "stop"
    assert load.lane(3).unfinished == {}
    assert not load.active_load


def test_lookup_creates_no_lane() -> None:
    load = LedgerState(dedup_window_ms=100)
    assert load.lane(3).requests == {}
    assert load.position(LANE) is None


def test_request_without_a_record_expires_with_its_load() -> None:
    load = LedgerState(dedup_window_ms=100)
    applied(prefilled(), step_ms=50, load=load)
    assert load.active_load
    applied(*(finished("worker_full", name=f"late{n}") for n in range(4)), step_ms=50, load=load)
    assert load.request(3, "a") is None
    assert not load.active_load


def test_request_without_its_first_record_is_kept_for_the_window() -> None:
    load = LedgerState(dedup_window_ms=100)
    applied(finished("worker_full"), finished("worker_full", worker="w2"), step_ms=60, load=load)
    load.apply(LANE, [LogRecord(9, 1120, finished(name="later"))], 10)
    assert set(states(load).values()) == {"worker_full"}
    load.apply(LANE, [LogRecord(10, 1170, finished(name="later"))], 11)
    assert load.request(3, "a") is None


def test_outcomes_expire_after_the_window_and_open_requests_do_not() -> None:
    load = LedgerState(dedup_window_ms=100)
    applied(assigned(), finished(), assigned("open"), assigned("late"), step_ms=50, load=load)
    assert load.request(3, "a") is not None
    applied(assigned("later"), assigned("latest"), step_ms=50, load=load)
    assert load.request(3, "a") is None
    assert load.request(3, "open") is not None


class NotSearched(dict[str, Any]):
    """The first key of a dict is found behind all that were deleted before it."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("it is searched for its oldest key")


def test_oldest_outcome_is_found_without_a_search() -> None:
    load = LedgerState(dedup_window_ms=100)
    applied(assigned(), load=load)
    outcomes = load.lane(3).finished = NotSearched()
    for n in range(50):
        applied(assigned(f"r{n}"), finished(name=f"r{n}"), load=load)
    assert 4 <= len(outcomes) <= 6


IDS = st.sampled_from(["a", "b"])
ATTEMPTS = st.integers(0, 2)
WORKERS = st.sampled_from(["w1", "w2"])
PHASES = st.sampled_from(["aggregated", "aggregated", "prefill", "decode"])
RECORDS = st.one_of(
    st.builds(
        assigned, IDS, ATTEMPTS, st.integers(0, 9), worker=WORKERS, phase=PHASES,
        rank=st.integers(0, 1), prefill_tokens=st.integers(0, 5),
    ),
    st.builds(started, IDS, ATTEMPTS, st.integers(0, 9), worker=WORKERS, phase=PHASES),
    st.builds(
        finished,
        st.sampled_from(["stop", "broken", "worker_full", "error", "cancelled"]),
        IDS, ATTEMPTS, worker=WORKERS, phase=PHASES, retryable=st.booleans(),
    ),
    st.builds(prefilled, IDS, ATTEMPTS, worker=WORKERS, phase=PHASES),
    st.builds(lambda i, a, r: Fencing(id=i, attempt=a, reason=r), IDS, ATTEMPTS,
              st.sampled_from(["lost", "worker_full"])),
    st.builds(lambda i: Ended(id=i, code="cancelled"), IDS),
)  # fmt: skip


@given(st.lists(RECORDS, max_size=30))
def test_loads_are_the_sum_over_open_runs(records: list[Any]) -> None:
    load = applied(*records)
    for worker, rank in itertools.product(("w1", "w2"), (0, 1)):
        runs = [
            timeline.runs[k]
            for timeline in load.lane(3).requests.values()
            for k in timeline.open_runs()
            if k.worker == worker and timeline.runs[k].place.rank == rank
        ]
        waiting = [run for run in runs if run.state != "prefilled"]
        expected = WorkerLoad(
            len(runs), sum(run.tokens for run in runs), sum(run.prefill_tokens for run in waiting),
            len(waiting), sum(run.since_ms for run in waiting),
        )  # fmt: skip
        assert on(load, worker, rank) == expected
    for worker in ("w1", "w2"):
        both = on(load, worker, 0).add(on(load, worker, 1))
        assert load.active_load.total(worker, 10) == both


@given(st.lists(RECORDS, max_size=30), st.integers(0, 30))
def test_requests_and_their_open_runs_are_filed_by_their_states(
    records: list[Any], asked_at: int
) -> None:
    load = applied(*records[:asked_at])
    _ = load.lane(3).open_runs  # kept up to date from here on
    lane = applied(*records[asked_at:], load=load).lane(3)
    known = {name: state for name, state in lane.requests.items() if state.is_known}
    assert lane.unfinished == known
    assert not any(state.is_finished for state in known.values())
    assert {(epoch, key) for epoch, keys in lane.open_runs.items() for key in keys} == {
        ((run.worker, run.epoch), RunKey(name, run.attempt, run.phase))
        for name, state in known.items()
        for run in state.open_runs()
    }


@given(st.lists(RECORDS, max_size=30), st.integers(0, 30))
def test_snapshot_restores_the_same_state_at_any_point(records: list[Any], at: int) -> None:
    straight = applied(*records)
    first = applied(*records[:at])
    second = LedgerState(dedup_window_ms=1_200_000)
    second.restore(LANE, first.snapshot(LANE), first.position(LANE) or 0)
    applied(*records[at:], load=second)
    assert second.state_hash(LANE) == straight.state_hash(LANE)
    assert second.active_load.total("w1", 10) == straight.active_load.total("w1", 10)
    assert set(second.lane(3).unfinished) == set(straight.lane(3).unfinished)


@given(st.lists(RECORDS, max_size=30), st.randoms(use_true_random=False))
def test_batching_does_not_matter(records: list[Any], rng: random.Random) -> None:
    log_records = [LogRecord(n, 1000 + n * 10, r) for n, r in enumerate(records)]
    load, at = LedgerState(dedup_window_ms=1_200_000), 0
    load.apply(LANE, [], 0)
    while at < len(log_records):
        size = rng.randint(1, 5)
        load.apply(LANE, log_records[at : at + size], min(at + size, len(log_records)))
        at += size
    assert load.state_hash(LANE) == applied(*records).state_hash(LANE)


@given(st.lists(RECORDS, max_size=30))
def test_dropped_partition_leaves_no_state(records: list[Any]) -> None:
    load = applied(*records)
    load.forget(LANE)
    assert load.position(LANE) is None
    assert load.lane(3).requests == {}
    assert not load.active_load


def test_newest_record_gives_the_read_time() -> None:
    load = applied(assigned(), started())
    assert load.last_append_ms == 1010
    load.apply(Partition("ledger", 4), [LogRecord(0, 900, assigned("b"))], 1)
    assert load.last_append_ms == 1010, "an older one of another lane takes nothing back"
    load.apply(Partition("ledger", 4), [], 5)
    assert load.last_append_ms == 1010
