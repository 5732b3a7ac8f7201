"""Tests of sessions by the ledger: the same worker for all readers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.sessions import SessionAffinities
from kvlane.streams.ports import Partition
from kvlane.streams.records import Assigned, LogRecord, Phase, RequestOffset, SessionUse

WINDOW_MS = 1_200_000
W1, W2 = WorkerRank("w1", 4), WorkerRank("w2", 5, 1)


def decided(
    place: WorkerRank = W1, name: str = "s", phase: Phase = "aggregated", **use: Any
) -> Assigned:
    return Assigned(
        id="a", attempt=0, phase=phase, worker=place.worker, epoch=place.epoch, rank=place.rank,
        origin=RequestOffset(topic="requests", partition=0, offset=0), responses_from=0,
        deadline_ms=0,
        session=SessionUse(id=name, **use),
    )  # fmt: skip


def got(*decisions: tuple[int, int, Assigned]) -> SessionAffinities:
    """Sessions that heard of decisions: lane, time, record."""
    sessions = SessionAffinities(WINDOW_MS)
    for lane, at_ms, decision in decisions:
        sessions.apply(lane, decision, at_ms)
    return sessions


def test_session_is_bound_by_its_first_decision() -> None:
    sessions = got((0, 1000, decided(W1)))
    assert sessions.preferred_rank("s", "aggregated", 1000) == W1
    assert sessions.preferred_rank("other", "aggregated", 1000) is None


def test_decisions_without_a_session_bind_nothing() -> None:
    sessions = SessionAffinities(WINDOW_MS)
    plain = decided()
    sessions.apply(0, Assigned(**{f: getattr(plain, f) for f in plain.__struct_fields__}
                               | {"session": None}), 1000)  # fmt: skip
    assert len(sessions) == 0


@pytest.mark.parametrize("lanes", [(7, 1), (1, 7)])
def test_session_moves_with_the_last_decision_of_any_lane(lanes: tuple[int, int]) -> None:
    later, earlier = (lanes[0], 3000, decided(W2)), (lanes[1], 2000, decided(W1))
    for order in itertools.permutations((later, earlier)):
        assert got(*order).preferred_rank("s", "aggregated", 3000) == W2


@pytest.mark.parametrize("phase", ["aggregated", "decode"])
def test_prefill_is_bound_separately(phase: Phase) -> None:
    sessions = got((0, 1000, decided(W1, phase="prefill")), (0, 1001, decided(W2, phase=phase)))
    assert sessions.preferred_rank("s", "prefill", 1001) == W1
    assert sessions.preferred_rank("s", "aggregated", 1001) == W2
    assert sessions.preferred_rank("s", "decode", 1001) == W2


def test_idle_session_ends_after_its_time_and_use_extends_it() -> None:
    sessions = got((0, 1000, decided(timeout_s=10)))
    assert sessions.preferred_rank("s", "aggregated", 11_000) == W1
    assert sessions.preferred_rank("s", "aggregated", 11_001) is None
    sessions.apply(0, decided(timeout_s=10), 11_000)
    assert sessions.preferred_rank("s", "aggregated", 21_000) == W1


def test_idle_time_is_limited_to_the_start_window_of_a_router() -> None:
    sessions = got((0, 0, decided(timeout_s=10**6)))
    assert sessions.preferred_rank("s", "aggregated", WINDOW_MS) == W1
    assert sessions.preferred_rank("s", "aggregated", WINDOW_MS + 1) is None


def test_closed_session_ends_for_any_earlier_records_of_other_lanes() -> None:
    sessions = got((0, 1000, decided()), (1, 2000, decided(closes=True)))
    assert sessions.preferred_rank("s", "aggregated", 2000) is None
    sessions.apply(2, decided(W2), 3000)
    assert sessions.preferred_rank("s", "aggregated", 3000) == W2, "and may begin again"


def test_expired_sessions_are_dropped() -> None:
    sessions = got((0, 0, decided(name="old")), (0, WINDOW_MS + 1, decided(name="new")))
    assert len(sessions) == 1


def test_forgotten_lane_removes_only_its_own_sessions() -> None:
    sessions = got((0, 1000, decided(W1)), (1, 2000, decided(W2)))
    sessions.forget(1)
    assert sessions.preferred_rank("s", "aggregated", 2000) == W1
    sessions.forget(0)
    assert len(sessions) == 0


# Replicas

SESSIONS = st.sampled_from(["s", "t"])
PLACES = st.sampled_from([W1, W2, WorkerRank("w3", 9)])
DECISIONS = st.builds(
    decided, PLACES, SESSIONS, st.sampled_from(["aggregated", "prefill", "decode"]),
    timeout_s=st.sampled_from([1, 30, 10_000]), closes=st.booleans(),
)  # fmt: skip
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40_000), DECISIONS), max_size=30)


def _lanes(steps: list[tuple[int, int, Assigned]]) -> dict[int, list[LogRecord]]:
    """What stands in each lane; time goes on from record to record."""
    lanes: dict[int, list[LogRecord]] = {0: [], 1: [], 2: []}
    now_ms = 0
    for lane, after_ms, decision in steps:
        now_ms += after_ms
        lanes[lane].append(LogRecord(len(lanes[lane]), now_ms, decision))
    return lanes


def _read(lanes: dict[int, list[LogRecord]], rng: random.Random) -> LedgerState:
    """A router that read them, lane by lane and batch by batch as it happened."""
    load, left = (
        LedgerState(WINDOW_MS),
        {lane: list(log_records) for lane, log_records in lanes.items()},
    )
    while any(left.values()):
        lane = rng.choice([lane for lane in left if left[lane]])
        batch, left[lane] = left[lane][:2], left[lane][2:]
        load.apply(Partition("ledger", lane), batch, batch[-1].offset + 1)
    return load


@given(STEPS, st.integers(0, 2**32), st.integers(0, 2**32))
def test_all_routers_with_the_same_records_agree(
    steps: list[tuple[int, int, Assigned]], one: int, other: int
) -> None:
    lanes = _lanes(steps)
    first, second = (_read(lanes, random.Random(seed)) for seed in (one, other))
    end_ms = max(
        (log_records[-1].timestamp_ms for log_records in lanes.values() if log_records), default=0
    )
    phases: tuple[Phase, ...] = ("aggregated", "prefill", "decode")
    for name, phase, after_ms in itertools.product(("s", "t"), phases, (0, 900, 20_000, 2**40)):
        sent = name, phase, end_ms + after_ms
        assert first.sessions.preferred_rank(*sent) == second.sessions.preferred_rank(*sent)
    for lane in lanes:
        source = Partition("ledger", lane)
        assert first.state_hash(source) == second.state_hash(source)


@given(STEPS, st.integers(0, 30))
def test_snapshot_holds_the_sessions(steps: list[tuple[int, int, Assigned]], at: int) -> None:
    rng = random.Random(1)
    straight, before = _read(_lanes(steps), rng), _read(_lanes(steps[:at]), rng)
    restored = LedgerState(WINDOW_MS)
    for lane, log_records in _lanes(steps).items():
        source = Partition("ledger", lane)
        restored.restore(source, before.snapshot(source), before.position(source) or 0)
        rest = log_records[before.position(source) or 0 :]
        restored.apply(source, rest, len(log_records))
    end_ms = sum(after_ms for _, after_ms, _ in steps)
    phases: tuple[Phase, ...] = ("aggregated", "prefill")
    for name, phase in itertools.product(("s", "t"), phases):
        assert restored.sessions.preferred_rank(
            name, phase, end_ms
        ) == straight.sessions.preferred_rank(name, phase, end_ms)
