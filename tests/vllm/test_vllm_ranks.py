"""Tests of data-parallel ranks: each has its own cache, and events of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from kvlane.indexer.cache_events.event_normalizer import NormalizerCounters
from kvlane.streams.request import Hints
from tests.vllm.engines import RealEngine, answer, cached, make_request, outputs, settled, started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model: Path) -> AsyncIterator[RealEngine]:
    engine = await started(model, blocks=40, data_parallel_size=2)
    yield engine
    await engine.cleanup()


async def test_card_names_the_ranks_and_the_cache_of_each(pair: RealEngine) -> None:
    assert (pair.config.data_parallel_size, pair.config.total_kv_blocks) == (2, 40)


async def test_request_goes_to_its_rank_and_finds_the_cached_blocks_there(pair: RealEngine) -> None:
    tokens = [*range(100, 200)]
    on_one, on_zero = Hints(dp_rank=1), Hints()
    assert cached(await outputs(pair, make_request(tokens, hints=on_one))) == 0
    assert cached(await outputs(pair, make_request(tokens, hints=on_one))) == 96
    assert cached(await outputs(pair, make_request(tokens, hints=on_zero))) == 0
    assert cached(await outputs(pair, make_request(tokens, hints=on_zero))) == 96


async def test_events_carry_the_rank(pair: RealEngine) -> None:
    for rank, first in ((0, 300), (1, 500)):
        before = pair.bridge(rank).held_blocks, pair.bridge(1 - rank).held_blocks
        await answer(pair, make_request([*range(first, first + 64)], 1, hints=Hints(dp_rank=rank)))
        await settled(lambda b=before, r=rank: pair.bridge(r).held_blocks > b[0])  # type: ignore[misc]
        assert pair.bridge(1 - rank).held_blocks == before[1]
        assert pair.bridge(rank).counters == NormalizerCounters()


async def test_metrics_are_those_of_both_ranks(pair: RealEngine) -> None:
    requests = [make_request([7, 8, rank], 20, hints=Hints(dp_rank=rank)) for rank in (0, 1)]
    await asyncio.gather(*(answer(pair, each) for each in requests))
    figures = pair.stats()
    assert figures is not None
    assert (figures.running, figures.kv_total_blocks) == (0, 80)
    assert figures.steps >= 20
