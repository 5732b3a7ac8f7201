"""Tests of generated traces: the shape of each kind, and one trace for a seed."""

from __future__ import annotations

import pytest

from kvlane.app.simulation.synthetic_traces import (
    MAX_PROMPT_TOKENS,
    TRACE_KINDS,
    TraceSize,
    UnknownTraceKind,
    generate_trace,
)
from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS

SIZE = TraceSize(requests=800, rate=10.0, seed=3)
EVERY_KIND = pytest.mark.parametrize("kind", TRACE_KINDS)


@EVERY_KIND
def test_trace_follows_from_its_seed(kind: str) -> None:
    assert generate_trace(kind, SIZE) == generate_trace(kind, SIZE)
    assert generate_trace(kind, SIZE) != generate_trace(kind, SIZE._replace(seed=4))


@EVERY_KIND
def test_trace_has_the_given_number_of_requests_in_order_of_arrival(kind: str) -> None:
    rows = generate_trace(kind, SIZE)
    times = [row.timestamp for row in rows]
    assert len(rows) == SIZE.requests
    assert times == sorted(times)
    lasted_s = (times[-1] - times[0]) / 1000
    assert 0.4 * SIZE.rate < len(rows) / lasted_s < 1.6 * SIZE.rate


@EVERY_KIND
def test_chunk_ids_identify_prefixes(kind: str) -> None:
    before: dict[int, int | None] = {}
    for row in generate_trace(kind, SIZE):
        assert 0 < row.input_length < 2 * MAX_PROMPT_TOKENS
        assert row.output_length > 0
        assert len(row.hash_ids) == -(-row.input_length // CHUNK_TOKENS)
        previous = None
        for name in row.hash_ids:
            assert before.setdefault(name, previous) == previous
            previous = name


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("shared-prefixes", 0.7, 0.95), ("multi-turn", 0.5, 0.9), ("agent-tools", 0.85, 0.99)],
)
def test_kind_has_its_share_of_repeated_chunks(kind: str, least: float, most: float) -> None:
    seen: set[int] = set()
    known = total = 0
    for row in generate_trace(kind, SIZE):
        known += sum(CHUNK_TOKENS for name in row.full_chunks if name in seen)
        total += row.input_length
        seen |= set(row.full_chunks)
    assert least < known / total < most


def test_unknown_kind_is_refused_with_the_existing_ones() -> None:
    with pytest.raises(
        UnknownTraceKind, match="gen:x: one of gen:shared-prefixes, gen:offline, gen:multi"
    ):
        generate_trace("x", SIZE)
