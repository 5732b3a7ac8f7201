"""Placement of batch requests under bounds, and the runs that give way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.routing.selection.batch_placement import (
    BatchBounds,
    RankWork,
    has_headroom,
    runs_to_preempt,
    slowdown,
)
from app.routing.state.active_load import NO_LOAD, WorkerLoad
from app.routing.state.batch_runs import BatchRun, BatchRunKey, BatchRuns
from app.routing.state.performance import EngineProfile
from app.routing.worker_rank import WorkerRank

PROFILE = EngineProfile(capacity_tokens=1_000_000)
BOUNDS = BatchBounds()
RANK = WorkerRank("w", 1, 0)
DECODING = WorkerLoad(1, 10_000)
COMPUTING = WorkerLoad(1, 10_000, 8_000, 1)


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


def test_runs_in_prefill_are_preempted_by_a_prompt_and_the_others_stay() -> None:
    assert preempted(COMPUTING, open_runs(4, computing=2)) == ["b1", "b0"]
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
