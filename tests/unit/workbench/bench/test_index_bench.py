"""Tests of the index bench: both sides do the same work and agree, and its figures."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from kvlane.indexer.block_hashes import (
    LOOPBACK_SECRET,
    derive_secret,
    local_hashes,
    prompt_keys,
    sequence_hashes,
)
from workbench.bench.index.comparison import (
    OUR_INDEX,
    IndexFigure,
    RatioTarget,
    SampleSummary,
    latency_figure,
    thresholds,
    throughput_figure,
)
from workbench.bench.index.index_workload import (
    MATCH,
    REMOVED,
    STORED,
    CachedSequences,
    IndexSetup,
    OperationBatch,
    TraceFleet,
    make_sequences,
    queries_by_overlap,
    trace_operations,
)
from workbench.bench.index.kernel_timing import DictIndex, KernelIndex, ticks_per_us
from workbench.bench.index.measurements import (
    AnswerComparison,
    IndexMeasurements,
    Repetitions,
    replay_trace,
)
from workbench.bench.index.peers import (
    CrateIndex,
    MeasuredIndex,
    PeerCrate,
    PeerStructure,
    PeerUnavailable,
    load_crate,
)
from workbench.bench.index.record_rates import record_rates

SMALL = IndexSetup(64, 4, 4_000)
TRACE = Path(__file__).resolve().parents[4] / "app" / "data" / "conversation_300.jsonl"
FLEET = TraceFleet(workers=3, chunks_per_worker=300, min_requests=300)


@pytest.fixture
def cached() -> CachedSequences:
    return make_sequences(SMALL)


@pytest.fixture(scope="module")
def trace() -> OperationBatch:
    return trace_operations(TRACE, FLEET)


def held(batches: list[OperationBatch]) -> dict[int, set[int]]:
    """The keys of each worker; removing what is not there, or storing it twice, is an error."""
    caches: dict[int, set[int]] = defaultdict(set)
    for batch in batches:
        for row in batch.rows:
            own = set(batch.keys[row["start"] : row["start"] + row["blocks"]].tolist())
            cache = caches[int(row["worker"])]
            if row["kind"] == STORED:
                cache |= own
            elif row["kind"] == REMOVED:
                assert own <= cache
                cache -= own
    return caches


def everything(cached: CachedSequences) -> OperationBatch:
    return cached.store_batch(np.arange(cached.sequence_count))


# --- workloads -----------------------------------------------------------------------------------


def test_sequences_share_their_beginnings_and_nothing_else(cached: CachedSequences) -> None:
    beginnings = {tuple(row[: cached.shared_blocks].tolist()) for row in cached.local}
    assert len(beginnings) <= 32
    ends = cached.local[:, cached.shared_blocks :]
    assert len(np.unique(ends)) == ends.size


def test_pairs_are_the_different_blocks_of_each_worker(cached: CachedSequences) -> None:
    assert cached.pairs == sum(map(len, held([everything(cached)]).values()))


def test_keys_are_those_of_the_prompts(cached: CachedSequences) -> None:
    secret = derive_secret(LOOPBACK_SECRET)
    assert np.array_equal(cached.keys[7], prompt_keys(cached.local[7], secret))


@pytest.mark.parametrize("change", ["removes", "exchanges", "single blocks", "holes"])
def test_updates_of_a_measurement_are_reverted(cached: CachedSequences, change: str) -> None:
    before = everything(cached)
    some, others = np.arange(10), np.arange(10, 20)
    first = cached.shared_blocks
    away = {
        "removes": lambda: [cached.remove_batch(some, first), cached.store_batch(some, first)],
        "exchanges": lambda: [
            cached.remove_batch(others, first),
            cached.exchange_batch(some, others, first),
            cached.exchange_batch(others, some, first),
            cached.store_batch(others, first),
        ],
        "single blocks": lambda: list(cached.decode_batches(some, 5)),
        "holes": lambda: list(cached.hole_batches(some)),
    }[change]()
    assert held([before, *away]) == held([before])
    assert held([before, away[0]]) != held([before])


def test_every_store_names_the_block_before_it(cached: CachedSequences) -> None:
    chained = {int(name) for name in cached.chain.reshape(-1)}
    filled = cached.hole_batches(np.arange(10))[1]
    for row in [*cached.store_batch(np.arange(3), 5).rows, *filled.rows]:
        assert int(row["parent"]) in chained
        assert int(row["parent"]) != int(cached.chain.reshape(-1)[row["start"]])


def test_prompts_are_cached_in_full_by_half_or_not_at_all(cached: CachedSequences) -> None:
    sent = queries_by_overlap(cached, np.arange(5))
    known = set(cached.local.reshape(-1).tolist())
    shares = {
        kind: [np.mean([block in known for block in row.tolist()]) for row in rows]
        for kind, rows in sent.items()
    }
    assert shares == {"full hit": [1.0] * 5, "half hit": [0.5] * 5, "miss": [0.0] * 5}


def test_trace_removes_only_stored_blocks_and_stores_nothing_twice(trace: OperationBatch) -> None:
    caches: dict[int, set[int]] = defaultdict(set)
    for row in trace.rows[trace.rows["kind"] != MATCH]:
        own = set(trace.keys[row["start"] : row["start"] + row["blocks"]].tolist())
        cache = caches[int(row["worker"])]
        if row["kind"] == STORED:
            assert not own & cache
            cache |= own
        else:
            assert own <= cache
            cache -= own
    assert sorted(caches) == list(range(FLEET.workers))


def test_trace_has_a_match_for_each_request_and_evictions(trace: OperationBatch) -> None:
    kinds = trace.rows["kind"]
    assert np.count_nonzero(kinds == MATCH) == FLEET.min_requests
    assert np.count_nonzero(kinds == REMOVED) > 20


def test_short_trace_is_served_in_copies_that_share_nothing(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    file.write_text(json.dumps(row))
    batch = trace_operations(file, TraceFleet(workers=1, chunks_per_worker=100, min_requests=3))
    assert np.count_nonzero(batch.rows["kind"] == STORED) == 3
    assert len(np.unique(batch.keys)) == 3 * 64


# --- sides ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crate() -> PeerCrate:
    try:
        return load_crate(lambda _: None, build=False)
    except PeerUnavailable as e:
        pytest.skip(f"no peer: {e}")


def agree(sides: dict[str, MeasuredIndex], cached: CachedSequences) -> AnswerComparison:
    answers = AnswerComparison()
    effort = Repetitions({cached.depth: 20}, rounds=1)
    course = IndexMeasurements(cached, lambda: sides, effort, ticks_per_us(), answers)
    for _ in course.figures():
        pass
    return answers


@pytest.mark.parametrize("workers", [4, 100])
def test_kvlane_answers_as_the_reference(workers: int) -> None:
    cached = make_sequences(SMALL._replace(workers=workers))
    answers = agree({OUR_INDEX: KernelIndex(workers), "reference": DictIndex()}, cached)
    assert answers.compared > 100
    assert answers.differing == 0


def test_kvlane_replays_a_trace_as_the_reference(trace: OperationBatch) -> None:
    answers = AnswerComparison()
    sides: dict[str, MeasuredIndex] = {
        OUR_INDEX: KernelIndex(FLEET.workers),
        "reference": DictIndex(),
    }
    figures = list(replay_trace(trace, sides, FLEET.workers, 1.0, answers))
    assert [figure.measure for figure in figures] == ["trace", "trace, matches"]
    assert (answers.differing, answers.compared > 50) == (0, True)


def test_differing_answers_are_counted(cached: CachedSequences) -> None:
    full, empty = KernelIndex(4), DictIndex()
    full.apply(everything(cached))
    answers = AnswerComparison()
    answers.compare([full, empty], cached.local[:5])
    assert (answers.compared, answers.differing) == (5, 5)


@pytest.mark.parametrize("structure", list(PeerStructure))
def test_peer_answers_as_the_reference(crate: PeerCrate, structure: PeerStructure) -> None:
    cached = make_sequences(SMALL, crate.chain_hashes)
    peer = CrateIndex(crate, structure, 4)
    answers = agree({OUR_INDEX: DictIndex(), peer.name: peer}, cached)
    assert answers.compared > 100
    assert answers.differing == 0


@pytest.mark.parametrize("structure", list(PeerStructure))
def test_peer_replays_a_trace_as_the_reference(crate: PeerCrate, structure: PeerStructure) -> None:
    batch = trace_operations(TRACE, FLEET, crate.chain_hashes)
    peer, answers = CrateIndex(crate, structure, FLEET.workers), AnswerComparison()
    sides: dict[str, MeasuredIndex] = {OUR_INDEX: DictIndex(), peer.name: peer}
    list(replay_trace(batch, sides, FLEET.workers, 1.0, answers))
    peer.close()
    assert (answers.differing, answers.compared > 50) == (0, True)


@pytest.mark.parametrize("block_size", [16, 64])
def test_peer_hashes_blocks_as_kvlane_does(crate: PeerCrate, block_size: int) -> None:
    tokens = np.arange(1000, dtype=np.uint32)
    local = crate.local_hashes(tokens, block_size)
    assert np.array_equal(local, local_hashes(tokens, block_size))
    assert np.array_equal(crate.chain_hashes(local[None, :])[0], sequence_hashes(local))


# --- records -------------------------------------------------------------------------------------


def test_records_are_measured_by_their_size() -> None:
    measured = list(record_rates([16, 64], blocks=2000))
    assert [one.setup.blocks for one in measured] == [16, 64]
    assert all(one.ours.median > 0 for one in measured)


# --- figures -------------------------------------------------------------------------------------


def test_latency_is_compared_with_the_structure_that_is_fastest() -> None:
    ticks = {
        OUR_INDEX: np.full(10, 2000, np.uint64),
        "tree": np.full(10, 9000, np.uint64),
        "concurrent": np.full(10, 8000, np.uint64),
    }
    one = latency_figure("match", SMALL, ticks, 1000.0, RatioTarget(3.0))
    assert (one.structure, one.ours.median, one.ratio) == ("concurrent", 2.0, 4.0)
    assert one.is_passed


def test_throughput_is_blocks_by_cpu_time_of_the_median_round() -> None:
    cpu_ns = {OUR_INDEX: [1000, 2000, 9000], "tree": [4000, 4000, 4000]}
    one = throughput_figure("store", SMALL, 20, cpu_ns, RatioTarget(3.0))
    assert (one.ours.median, one.peer, one.ratio) == (10.0, SampleSummary(5.0, 5.0), 2.0)
    assert not one.is_passed


def test_threshold_without_a_peer_is_not_met() -> None:
    one = throughput_figure("store", SMALL, 20, {OUR_INDEX: [1000]}, RatioTarget(0.0))
    assert one.row()["passed"] == "not compared"
    assert math.isnan(one.ratio)
    assert [each.passed for each in thresholds([one])] == [False]


def test_bar_is_that_of_the_worst_setup() -> None:
    def one(ours: float) -> IndexFigure:
        return IndexFigure(
            "match",
            SMALL,
            "us",
            SampleSummary(ours, 9.0),
            SampleSummary(6.0, 8.0),
            "t",
            RatioTarget(2, 1),
        )

    middle, tail = thresholds([one(1.0), one(2.0)])
    assert (middle.value, middle.passed) == (3.0, True)
    assert (tail.value, tail.passed) == (8 / 9, False)
