"""What the index bench has both sides do, that they agree, and what it makes of their times."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from app.bench.index_alone import filled, records
from app.bench.index_figures import OURS, Aim, Figure, Samples, bars, latency, throughput
from app.bench.index_rounds import Answers, Course, Effort, replay
from app.bench.index_sides import Crate, NoPeer, Peer, Side, Structure, load
from app.bench.index_timing import Kernels, Reference, ticks_per_us
from app.bench.index_work import (
    MATCH,
    REMOVED,
    STORED,
    Batch,
    Sequences,
    Setting,
    Where,
    prompts,
    replayed,
    sequences,
)
from indexer.hashing import local_hashes, sequence_hashes
from indexer.keys import LOOPBACK_SECRET, derive, prompt_keys
from indexer.lives import Holder

SMALL = Where(64, 4, 4_000)
TRACE = Path(__file__).resolve().parents[2] / "app" / "data" / "conversation_300.jsonl"
FLEET = Setting(workers=3, chunks=300, requests=300)


@pytest.fixture
def cached() -> Sequences:
    return sequences(SMALL)


@pytest.fixture(scope="module")
def trace() -> Batch:
    return replayed(TRACE, FLEET)


def held(batches: list[Batch]) -> dict[int, set[int]]:
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


def everything(cached: Sequences) -> Batch:
    return cached.stores(np.arange(cached.count))


# --- workloads -----------------------------------------------------------------------------------


def test_sequences_share_their_beginnings_and_nothing_else(cached: Sequences) -> None:
    beginnings = {tuple(row[: cached.shared].tolist()) for row in cached.local}
    assert len(beginnings) <= 32
    ends = cached.local[:, cached.shared :]
    assert len(np.unique(ends)) == ends.size


def test_pairs_are_the_different_blocks_of_each_worker(cached: Sequences) -> None:
    assert cached.pairs == sum(map(len, held([everything(cached)]).values()))


def test_keys_are_those_of_the_prompts(cached: Sequences) -> None:
    secret = derive(LOOPBACK_SECRET)
    assert np.array_equal(cached.keys[7], prompt_keys(cached.local[7], secret))


@pytest.mark.parametrize("change", ["removes", "exchanges", "single blocks", "holes"])
def test_what_is_changed_is_changed_back(cached: Sequences, change: str) -> None:
    before = everything(cached)
    some, others = np.arange(10), np.arange(10, 20)
    first = cached.shared
    away = {
        "removes": lambda: [cached.removes(some, first), cached.stores(some, first)],
        "exchanges": lambda: [
            cached.removes(others, first),
            cached.exchanges(some, others, first),
            cached.exchanges(others, some, first),
            cached.stores(others, first),
        ],
        "single blocks": lambda: list(cached.single_blocks(some, 5)),
        "holes": lambda: list(cached.holes(some)),
    }[change]()
    assert held([before, *away]) == held([before])
    assert held([before, away[0]]) != held([before])


def test_every_store_names_the_block_before_it(cached: Sequences) -> None:
    chained = {int(name) for name in cached.chain.reshape(-1)}
    filled = cached.holes(np.arange(10))[1]
    for row in [*cached.stores(np.arange(3), 5).rows, *filled.rows]:
        assert int(row["parent"]) in chained
        assert int(row["parent"]) != int(cached.chain.reshape(-1)[row["start"]])


def test_prompts_are_cached_in_full_by_half_or_not_at_all(cached: Sequences) -> None:
    asked = prompts(cached, np.arange(5))
    known = set(cached.local.reshape(-1).tolist())
    shares = {
        kind: [np.mean([block in known for block in row.tolist()]) for row in rows]
        for kind, rows in asked.items()
    }
    assert shares == {"full hit": [1.0] * 5, "half hit": [0.5] * 5, "miss": [0.0] * 5}


def test_a_trace_removes_only_what_is_there_and_stores_nothing_twice(trace: Batch) -> None:
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


def test_a_trace_has_a_match_for_each_request_and_evictions(trace: Batch) -> None:
    kinds = trace.rows["kind"]
    assert np.count_nonzero(kinds == MATCH) == FLEET.requests
    assert np.count_nonzero(kinds == REMOVED) > 20


def test_a_short_trace_is_served_in_copies_that_share_nothing(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    file.write_text(json.dumps(row))
    batch = replayed(file, Setting(workers=1, chunks=100, requests=3))
    assert np.count_nonzero(batch.rows["kind"] == STORED) == 3
    assert len(np.unique(batch.keys)) == 3 * 64


# --- sides ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crate() -> Crate:
    try:
        return load(lambda _: None, build=False)
    except NoPeer as e:
        pytest.skip(f"no peer: {e}")


def agree(sides: dict[str, Side], cached: Sequences) -> Answers:
    answers = Answers()
    effort = Effort({cached.depth: 20}, rounds=1)
    course = Course(cached, lambda: sides, effort, ticks_per_us(), answers)
    for _ in course.measures():
        pass
    return answers


@pytest.mark.parametrize("workers", [4, 100])
def test_our_side_answers_as_the_reference(workers: int) -> None:
    cached = sequences(SMALL._replace(workers=workers))
    answers = agree({OURS: Kernels(workers), "reference": Reference()}, cached)
    assert answers.compared > 100
    assert answers.differing == 0


def test_our_side_replays_a_trace_as_the_reference(trace: Batch) -> None:
    answers = Answers()
    sides: dict[str, Side] = {OURS: Kernels(FLEET.workers), "reference": Reference()}
    figures = list(replay(trace, sides, FLEET.workers, 1.0, answers))
    assert [figure.measure for figure in figures] == ["trace", "trace, matches"]
    assert (answers.differing, answers.compared > 50) == (0, True)


def test_differing_answers_are_counted(cached: Sequences) -> None:
    full, empty = Kernels(4), Reference()
    full.run(everything(cached))
    answers = Answers()
    answers.compare([full, empty], cached.local[:5])
    assert (answers.compared, answers.differing) == (5, 5)


@pytest.mark.parametrize("structure", list(Structure))
def test_the_peer_answers_as_the_reference(crate: Crate, structure: Structure) -> None:
    cached = sequences(SMALL, crate.chained)
    peer = Peer(crate, structure, 4)
    answers = agree({OURS: Reference(), peer.name: peer}, cached)
    assert answers.compared > 100
    assert answers.differing == 0


@pytest.mark.parametrize("structure", list(Structure))
def test_the_peer_replays_a_trace_as_the_reference(crate: Crate, structure: Structure) -> None:
    batch = replayed(TRACE, FLEET, crate.chained)
    peer, answers = Peer(crate, structure, FLEET.workers), Answers()
    sides: dict[str, Side] = {OURS: Reference(), peer.name: peer}
    list(replay(batch, sides, FLEET.workers, 1.0, answers))
    peer.close()
    assert (answers.differing, answers.compared > 50) == (0, True)


@pytest.mark.parametrize("block_size", [16, 64])
def test_the_peer_hashes_blocks_as_we_do(crate: Crate, block_size: int) -> None:
    tokens = np.arange(1000, dtype=np.uint32)
    local = crate.local_hashes(tokens, block_size)
    assert np.array_equal(local, local_hashes(tokens, block_size))
    assert np.array_equal(crate.chained(local[None, :])[0], sequence_hashes(local))


# --- the class around the kernels -----------------------------------------------------------------


def test_a_filled_index_holds_every_sequence(cached: Sequences) -> None:
    index = filled(cached)
    assert sum(holding.blocks for holding in index.holdings().values()) == cached.pairs
    assert index.counters.refused_blocks == 0
    for number in range(20):
        overlap = index.match(cached.local[number])[Holder(str(number % 4), 0)]
        assert overlap.blocks == cached.depth


def test_records_are_measured_by_their_size() -> None:
    measured = list(records([16, 64], blocks=2000))
    assert [one.where.blocks for one in measured] == [16, 64]
    assert all(one.ours.middle > 0 for one in measured)


# --- figures -------------------------------------------------------------------------------------


def test_a_latency_is_compared_with_the_structure_that_is_fastest() -> None:
    ticks = {
        OURS: np.full(10, 2000, np.uint64),
        "tree": np.full(10, 9000, np.uint64),
        "concurrent": np.full(10, 8000, np.uint64),
    }
    one = latency("match", SMALL, ticks, 1000.0, Aim(3.0))
    assert (one.structure, one.ours.middle, one.ratio) == ("concurrent", 2.0, 4.0)
    assert one.is_met


def test_a_throughput_is_blocks_by_cpu_time_of_the_median_round() -> None:
    cpu_ns = {OURS: [1000, 2000, 9000], "tree": [4000, 4000, 4000]}
    one = throughput("store", SMALL, 20, cpu_ns, Aim(3.0))
    assert (one.ours.middle, one.peer, one.ratio) == (10.0, Samples(5.0, 5.0), 2.0)
    assert not one.is_met


def test_nothing_is_met_without_a_peer() -> None:
    one = throughput("store", SMALL, 20, {OURS: [1000]}, Aim(0.0))
    assert one.row()["met"] == "not compared"
    assert math.isnan(one.ratio)
    assert [bar.met for bar in bars([one])] == [False]


def test_a_bar_is_that_of_the_worst_setup() -> None:
    def one(ours: float) -> Figure:
        return Figure("match", SMALL, "us", Samples(ours, 9.0), Samples(6.0, 8.0), "t", Aim(2, 1))

    middle, tail = bars([one(1.0), one(2.0)])
    assert (middle.value, middle.met) == (3.0, True)
    assert (tail.value, tail.met) == (8 / 9, False)
