"""Tests of placement of batch requests under bounds, and the runs that give way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.perf_curves import PerfCurves, curves_from
from kvlane.app.routing.selection.batch_placement import (
    BatchBounds,
    RankWork,
    blocked_share,
    bounds_in,
    group_size,
    has_headroom,
    reserved_ranks,
    runs_to_preempt,
    slowdown,
)
from kvlane.app.routing.selection.candidate_table import CandidateRow, CandidateTable
from kvlane.app.routing.selection.decision import RoutingState
from kvlane.app.routing.selection.eligibility import CandidatePool, CandidatePools
from kvlane.app.routing.state.active_load import NO_LOAD, ActiveLoad, WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchRun, BatchRunKey, BatchRuns, batch_delay_ms
from kvlane.app.routing.state.fleet import Fleet, WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.performance import RECENT_MS, EngineProfile, RecentPrefill
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.app.simulation.trace_requests import SIMULATION_SECRET
from kvlane.indexer.epochs import CacheId
from kvlane.streams.records import EngineConfig, WorkerCard

PROFILE = EngineProfile(capacity_tokens=1_000_000)
BOUNDS = BatchBounds()
RANK = WorkerRank("w", 1, 0)
DECODING = WorkerLoad(1, 10_000)
COMPUTING = WorkerLoad(1, 10_000, 8_000, 1)
BOTH = DECODING.add(COMPUTING)


def work(interactive: WorkerLoad = NO_LOAD, batch: WorkerLoad = NO_LOAD) -> RankWork:
    return RankWork(PROFILE, interactive, batch, 300.0, 300.0)


def fits(of: RankWork, tokens: int = 500, prefill: int = 500, most: int = 256) -> bool:
    return has_headroom(of, tokens, prefill, 300.0, most, BOUNDS)


def count_until_full(interactive: WorkerLoad) -> int:
    """Batch runs with a first token that a rank takes one after the other."""
    taken = 0
    while fits(work(interactive, WorkerLoad(taken, 500 * taken)), prefill=16):
        taken += 1
    return taken


def test_idle_rank_takes_more_than_one_with_interactive_runs() -> None:
    assert count_until_full(NO_LOAD) > count_until_full(DECODING) > 0


def test_no_batch_runs_are_placed_beside_an_interactive_prefill() -> None:
    assert fits(work())
    assert not fits(work(COMPUTING))


def test_prefill_that_one_step_cannot_hold_goes_one_by_one() -> None:
    assert fits(work(), tokens=50_000, prefill=50_000)
    assert not fits(work(batch=WorkerLoad(1, 500, 500, 1)), tokens=50_000, prefill=50_000)
    assert fits(work(batch=WorkerLoad(1, 100, 100, 1)), tokens=100, prefill=100)


def test_longest_step_bounds_the_runs_of_an_idle_rank() -> None:
    bounds = BOUNDS._replace(max_step_ms=PROFILE.decode_ms(100 * (500 + 150)))
    full = work(batch=WorkerLoad(100, 50_000))
    assert has_headroom(work(batch=WorkerLoad(99, 49_500)), 500, 16, 300.0, 256, bounds)
    assert not has_headroom(full, 500, 16, 300.0, 256, bounds)


def test_requests_begin_in_groups_that_a_step_can_compute() -> None:
    assert group_size(work(), 500, BOUNDS) == 1
    assert group_size(work(batch=WorkerLoad(20, 10_000)), 500, BOUNDS) == 5
    many = work(batch=WorkerLoad(200, 100_000))
    size = group_size(many, 500, BOUNDS)
    step_ms = PROFILE.decode_ms(many.all_tokens())
    assert 5 < size < 50
    assert step_ms + PROFILE.prefill_ms(500 * (size - 1)) <= BOUNDS.max_step_ms
    assert group_size(many, 8000, BOUNDS) == 1
    assert group_size(work(batch=WorkerLoad(200, 100_000, 500, 1)), 500, BOUNDS) == 1


def test_rank_that_is_almost_full_waits_until_a_group_fits() -> None:
    almost = work(batch=WorkerLoad(200, 100_000))
    assert has_headroom(almost, 500, 500, 300.0, 210, BOUNDS, 10)
    assert not has_headroom(almost, 500, 500, 300.0, 209, BOUNDS, 10)


@given(st.floats(0.0001, 50), st.integers(1, 60))
def test_more_ranks_block_fewer_prompts(load: float, ranks: int) -> None:
    assert 0 <= blocked_share(load, ranks) < blocked_share(load, ranks - 1) <= 1
    assert blocked_share(load, 1) == pytest.approx(load / (1 + load))


def pool_of(*speeds: float) -> CandidatePool:
    """A pool of workers, each so many times as fast as the published curve."""
    rows = [
        CandidateRow(
            WorkerRank(f"w{n}", n, 0), CacheId(f"w{n}", 0), "", frozenset(), True, 1,
            EngineProfile(curves_from(PerfCurves().coefficients(speed)) or PerfCurves()),
            WorkerCard(
                id=f"w{n}", slot=n, model="m", epoch=n, config=EngineConfig(model="m")
            ),
        )
        for n, speed in enumerate(speeds)
    ]  # fmt: skip
    return CandidatePool(
        tuple(rows), [row.worker_rank.worker for row in rows], 16, 0, 0, (), CandidateTable(rows)
    )


def view_after(pool: CandidatePool, *loads_ms: float, later_ms: int = 0) -> RoutingState:
    """The view a minute after the first of the prompts, which take so many ms."""
    recent, now_ms = RecentPrefill(), int(RECENT_MS)
    recent.add("elsewhere", 0.0, 0)
    for load_ms in loads_ms:
        recent.add(pool.workers[0], load_ms, now_ms)
    fleet = Fleet()
    return RoutingState(
        fleet, CandidatePools(fleet, SilentWorkers(fleet, 1.0)), KvIndexView(SIMULATION_SECRET),
        ActiveLoad(), ActiveLoad(), now_ms + later_ms, recent_prefill=recent,
    )  # fmt: skip


def reserved(pool: CandidatePool, *loads_ms: float, later_ms: int = 0) -> list[str]:
    """The workers that get no batch request, at that time."""
    view = view_after(pool, *loads_ms, later_ms=later_ms)
    return sorted(rank.worker for rank in reserved_ranks(pool, view, BOUNDS))


def test_more_ranks_are_reserved_for_more_interactive_prefill() -> None:
    pool = pool_of(*[1.0] * 8)
    counts = [len(reserved(pool, *[100.0] * count)) for count in (0, 1, 20, 100, 200, 2000)]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[1] == 1 or counts[1] == 2
    assert counts[-1] == 7  # batch requests have one rank at least
    assert reserved(pool, 100.0) == ["w0", "w1"][: counts[1]]


def test_no_rank_is_reserved_where_there_is_one_or_no_request_came_for_long() -> None:
    assert reserved(pool_of(1.0), *[100.0] * 100) == []
    assert reserved(pool_of(1.0, 1.0), *[100.0] * 100) == ["w0"]
    assert reserved(pool_of(1.0, 1.0), 100.0, later_ms=600_000) == []


@pytest.mark.parametrize(
    ("ranks", "loads_ms", "step_ms"), [(1, [100.0], 30.0), (1, [], 120.0), (2, [100.0], 120.0)]
)
def test_steps_are_short_where_no_rank_is_reserved_for_the_prompts_that_come(
    ranks: int, loads_ms: list[float], step_ms: float
) -> None:
    pool = pool_of(*[1.0] * ranks)
    assert bounds_in(pool, view_after(pool, *loads_ms), BOUNDS).max_step_ms == step_ms


def test_fastest_ranks_are_reserved() -> None:
    assert reserved(pool_of(1.0, 2.0, 1.0, 2.0), *[100.0] * 20)[:2] == ["w1", "w3"]


def test_cache_and_engine_bound_the_runs() -> None:
    assert not fits(work(), tokens=1_000_000)
    assert not fits(work(batch=WorkerLoad(4, 400)), most=4)


def open_runs(count: int, computing: int = 0) -> dict[BatchRunKey, BatchRun]:
    return {
        BatchRunKey(f"b{n}"): BatchRun(f"b{n}", 500, 500 if n < computing else 0, n)
        for n in range(count)
    }


def preempted(
    interactive: WorkerLoad, runs: dict[BatchRunKey, BatchRun], **over: object
) -> list[str]:
    keys = runs_to_preempt(PROFILE, interactive, runs, BOUNDS, 300.0, **over)  # type: ignore[arg-type]
    return [key.id for key in keys]


def test_no_run_is_preempted_without_interactive_runs() -> None:
    assert preempted(NO_LOAD, open_runs(200)) == []


def test_all_runs_are_preempted_by_a_prompt_without_decode_beside_it() -> None:
    assert preempted(COMPUTING, open_runs(4, computing=2)) == ["b1", "b0", "b3", "b2"]


def test_runs_in_prefill_are_preempted_by_a_prompt_and_the_others_stay() -> None:
    assert preempted(BOTH, open_runs(4, computing=2)) == ["b1", "b0"]
    assert preempted(DECODING, open_runs(4)) == []


def test_youngest_runs_are_preempted_until_the_bound_holds() -> None:
    gone = preempted(DECODING, open_runs(100))
    assert gone == [f"b{n}" for n in range(99, 99 - len(gone), -1)]
    left = 100 - len(gone)
    held = slowdown(work(DECODING, WorkerLoad(left, 500 * left)), 0)
    assert 0 < held <= BOUNDS.max_slowdown
    more = slowdown(work(DECODING, WorkerLoad(left + 1, 500 * (left + 1))), 0)
    assert more > BOUNDS.max_slowdown


def test_runs_that_cannot_be_continued_stay() -> None:
    runs = open_runs(3, computing=3)
    runs[BatchRunKey("b1")] = BatchRun("b1", 500, 500, 1, is_preemptible=False)
    assert preempted(COMPUTING, runs) == ["b2", "b0"]


def test_no_more_runs_stay_than_the_engine_computes_at_once() -> None:
    assert preempted(DECODING, open_runs(4), max_sequences=DECODING.runs + 3) == ["b3"]


def test_batch_runs_delay_a_prompt_by_a_step_of_decode_and_prefill() -> None:
    assert batch_delay_ms(PROFILE, NO_LOAD, 300.0) == 0.0
    decode = batch_delay_ms(PROFILE, WorkerLoad(4, 2000), 300.0)
    assert decode == PROFILE.decode_ms(2000 + 4 * 150)
    both = batch_delay_ms(PROFILE, WorkerLoad(4, 2000, 500, 1), 300.0)
    assert both == pytest.approx(decode + PROFILE.prefill_ms(500))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 9)), max_size=30))
def test_load_of_a_rank_is_that_of_its_runs(changes: list[tuple[int, bool, int]]) -> None:
    runs, expected = BatchRuns(), dict[int, int]()
    for number, comes, prefill in changes:
        if comes:
            runs.put(RANK, BatchRunKey(str(number)), BatchRun(str(number), 10, prefill))
            expected[number] = prefill
        else:
            runs.discard(BatchRunKey(str(number)))
            expected.pop(number, None)
    pending = [each for each in expected.values() if each]
    assert runs.load(RANK) == WorkerLoad(
        len(expected), 10 * len(expected), sum(pending), len(pending)
    )
    assert len(runs) == len(expected)


def test_run_that_moves_leaves_its_rank() -> None:
    runs, other = BatchRuns(), WorkerRank("v", 1, 0)
    runs.put(RANK, BatchRunKey("a"), BatchRun("a", 10))
    runs.put(other, BatchRunKey("a"), BatchRun("a", 10))
    assert not runs.on_rank(RANK)
    assert list(runs.on_rank(other)) == [BatchRunKey("a")]
