"""Tests of prompts that count as cached where they were sent."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlane.app.routing.state import routed_prefixes
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.routed_prefixes import TIME_TO_LIVE_MS, RoutedPrefixes
from kvlane.indexer.block_hashes import derive_secret
from kvlane.streams.records import Assigned, Finished, LogRecord, PrefillDone, RequestOffset, RunKey

BLOCKS = 200
NOW_MS = 50_000


def prompt(blocks: int = BLOCKS, shared: int = BLOCKS) -> NDArray[np.uint64]:
    """Local hashes, of which the first `shared` are those of all prompts."""
    hashes = np.arange(1, blocks + 1, dtype=np.uint64)
    hashes[shared:] += np.uint64(1000 * (shared + 1))
    return hashes


def new_routed(*publishing: str) -> RoutedPrefixes:
    caches = KvIndexView(derive_secret(b"test"))
    caches.publishing.update(publishing)
    routed = RoutedPrefixes(caches)
    compute(routed, "another", cached=1)
    return routed


def run(name: str, worker: str = "w1") -> dict[str, Any]:
    return {"id": name, "attempt": 0, "phase": "aggregated", "worker": worker, "epoch": 3}


def assign(
    routed: RoutedPrefixes, name: str = "a", worker: str = "w1",
    local: NDArray[np.uint64] | None = None, at_ms: int = NOW_MS, **over: Any,
) -> None:  # fmt: skip
    marks = routed.marks_of(prompt() if local is None else local)
    origin = RequestOffset(topic="requests", partition=0, offset=0)
    record = Assigned(
        **run(name, worker), origin=origin, responses_from=0, deadline_ms=0, prefix_marks=marks,
        **over,
    )  # fmt: skip
    routed.on_record(LogRecord(0, at_ms, record))


def compute(routed: RoutedPrefixes, name: str = "a", worker: str = "w1", cached: int = 0) -> None:
    done = PrefillDone(**run(name, worker), run=0, cached_tokens=cached)
    routed.on_record(LogRecord(0, NOW_MS, done))


def workers(routed: RoutedPrefixes, now_ms: int = NOW_MS) -> set[str]:
    return {place.worker for place, _ in routed.find(prompt(), now_ms)}


def test_prompt_counts_from_its_decision_until_its_first_token() -> None:
    routed = new_routed("w1")
    assert not workers(routed)
    assign(routed)
    assert workers(routed, NOW_MS + TIME_TO_LIVE_MS - 1) == {"w1"}
    compute(routed)
    assert not workers(routed), "the index has its blocks, or they are evicted"
    assert not len(routed)


def test_cache_without_events_keeps_a_prompt_for_its_time_to_live() -> None:
    routed = new_routed("w2")
    assign(routed)
    compute(routed)
    assert workers(routed, NOW_MS + TIME_TO_LIVE_MS - 1) == {"w1"}
    assert not workers(routed, NOW_MS + TIME_TO_LIVE_MS)
    routed._caches.publishing.add("w1")
    assert not workers(routed), "the index has its cache"


def test_run_without_a_first_token_leaves_no_estimate() -> None:
    routed = new_routed()
    assign(routed, "a")
    assign(routed, "b")
    routed.on_record(LogRecord(0, NOW_MS, Finished(**run("a"), code="worker_full")))
    assert workers(routed) == {"w1"}, "the other one is under way"
    routed.on_record(LogRecord(0, NOW_MS, Finished(**run("b"), code="broken")))
    assert not workers(routed)
    assert not len(routed)


def test_unwritten_decision_leaves_no_estimate() -> None:
    routed, place = new_routed(), WorkerRank("w1", 3, 0)
    for name in ("a", "b"):
        key = RunKey(name, 0, "aggregated")
        routed.add(key, place, routed.marks_of(prompt()), NOW_MS)
        assert workers(routed) == {"w1"}
        if name == "b":
            assign(routed, name)
        routed.discard_unread(key)
        assert workers(routed) == ({"w1"} if name == "b" else set())


@given(st.integers(0, BLOCKS), st.integers(1, 2 * BLOCKS))
def test_common_beginning_is_found_to_an_eighth_of_an_octave(shared: int, blocks: int) -> None:
    routed = new_routed()
    assign(routed, local=prompt())
    found = dict(routed.find(prompt(blocks, shared), NOW_MS))
    common = min(shared, blocks)
    depth = found.get(WorkerRank("w1", 3, 0), 0)
    assert common / 2 ** (1 / 8) - 1 < depth <= common


def test_engine_without_the_estimated_hits_is_not_estimated() -> None:
    routed = new_routed()
    for n in range(6):
        assert workers(routed) == ({"w1"} if n else set())
        assign(routed, f"{n}", cached_tokens_predicted=100, params={"estimated_tokens": 80.0})
        compute(routed, f"{n}", cached=20)
    assert not workers(routed), "only those that the index had were hits"
    assign(routed, "later", at_ms=NOW_MS + TIME_TO_LIVE_MS + 1)
    assert workers(routed, NOW_MS + TIME_TO_LIVE_MS + 1) == {"w1"}, "it is tried again"


def test_engines_without_events_and_hits_are_not_estimated() -> None:
    caches = KvIndexView(derive_secret(b"test"))
    routed = RoutedPrefixes(caches)
    for n in range(6):
        assign(routed, f"{n}")
        assert not workers(routed)
        compute(routed, f"{n}")
    compute(routed, "another", "w7", cached=16)
    assert workers(routed) == {"w1"}, "it may be the same engine"


def test_engine_with_the_estimated_hits_stays_estimated() -> None:
    routed = new_routed()
    for n in range(50):
        assign(routed, f"{n}", cached_tokens_predicted=100, params={"estimated_tokens": 80.0})
        compute(routed, f"{n}", cached=90)
    assert workers(routed) == {"w1"}


def test_number_of_marks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    routed = new_routed("w2")
    assign(routed, "first")
    monkeypatch.setattr(routed_prefixes, "MAX_MARKS", 5 * len(routed))
    for n in range(20):
        assign(routed, f"{n}", "w2")
        if n % 2:
            compute(routed, f"{n}", "w2")
    assert len(routed) <= routed_prefixes.MAX_MARKS
    assert workers(routed) == {"w2"}


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_routers_that_read_the_same_records_have_the_same_estimates(seed: int) -> None:
    rng = Random(seed)
    lanes: list[list[LogRecord]] = []
    source = new_routed()
    for n in range(12):
        worker, shared = f"w{rng.randrange(3)}", rng.randrange(BLOCKS)
        marks = source.marks_of(prompt(BLOCKS, shared))
        begun: Any = Assigned(
            **run(f"{n}", worker), origin=RequestOffset(topic="requests", partition=0, offset=0),
            responses_from=0, deadline_ms=0, prefix_marks=marks,
        )  # fmt: skip
        done = PrefillDone(**run(f"{n}", worker), run=0)
        end = Finished(**run(f"{n}", worker), code="stop")
        kept = [begun, *([done] if rng.random() < 0.6 else []), *([end] if n % 2 else [])]
        lanes.append([LogRecord(0, NOW_MS + n, record) for record in kept])
    found = []
    for _ in range(2):
        routed, left = new_routed("w0"), [[*lane] for lane in lanes]
        while left := [lane for lane in left if lane]:
            routed.on_record(rng.choice(left).pop(0))
        prompts = [prompt(BLOCKS, shared) for shared in range(1, BLOCKS, 9)]
        found.append([sorted(routed.find(local, NOW_MS + 100)) for local in prompts])
    assert found[0] == found[1]
