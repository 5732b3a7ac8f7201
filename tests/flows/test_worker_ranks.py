"""Tests of a worker whose engine has several ranks, and refuses inconsistent ones."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.engine.interface import EngineOutput, InvalidRequest, KvEventListener
from kvlane.app.http.api_errors import error_of_piece
from kvlane.indexer.cache_events.engine_events import BlocksStored
from kvlane.streams.records import Blocks, EngineConfig, WorkerCard
from kvlane.streams.topics import KV_EVENTS, REGISTRY
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import TOKEN, ScriptedEngine, WorkerHarness

SIZE = 2


class Ranked(ScriptedEngine):
    """An engine of two ranks."""

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self.listener = listener

    async def start(self, worker_id: str) -> EngineConfig:
        return EngineConfig(model="m", kv_cache_block_size=SIZE, data_parallel_size=2)


async def ranked(world: MemoryWorld) -> tuple[WorkerHarness, Ranked]:
    harness, engine = WorkerHarness(world), Ranked(world, TOKEN, EngineOutput.stop())
    await harness.start(engine)
    return harness, engine


@scenario_test
async def test_card_has_the_number_of_ranks(world: MemoryWorld) -> None:
    harness, _ = await ranked(world)
    assert harness.records_of(REGISTRY, WorkerCard)[-1].ranks == 2


@scenario_test
async def test_each_rank_has_its_own_events_and_heartbeats_have_the_last_of_each(
    world: MemoryWorld,
) -> None:
    harness, engine = await ranked(world)
    engine.listener([BlocksStored([1], None, [7, 8], SIZE)], 1)
    engine.listener([BlocksStored([1, 2], None, [7, 8, 9, 9], SIZE)], 0)
    engine.listener([BlocksStored([2], 1, [5, 6], SIZE)], 1)
    await world.wait_until(
        lambda: bool(harness.heartbeats()) and harness.heartbeats()[-1].last_event_ids == (1, 1)
    )
    got = {0: 0, 1: 0}
    for blocks in harness.records_of(KV_EVENTS, Blocks):
        got[blocks.rank] += len(blocks.keys) // 8
    assert got == {0: 2, 1: 2}


@scenario_test
async def test_engine_receives_the_chosen_rank(world: MemoryWorld) -> None:
    harness, engine = await ranked(world)
    harness.assign("a", rank=1)
    await harness.wait_finished("a")
    harness.assign("b", rank=0)
    await harness.wait_finished("b")
    assert [request.hints.dp_rank for request in engine.requests] == [1, None]


@pytest.mark.parametrize("tokens", [0, 1])
def test_client_receives_the_error_of_its_request(tokens: int) -> None:
    async def scenario(world: MemoryWorld) -> None:
        harness = WorkerHarness(world)
        script: list[Any] = [TOKEN] * tokens + [InvalidRequest("top_k: must be 1 or more")]
        await harness.start(ScriptedEngine(world, *script))
        harness.assign()
        finished = await harness.wait_finished()
        assert (finished.code, finished.retryable) == ("error", False)
        error = error_of_piece(harness.chunks()[-1])
        assert error is not None
        assert (error.status, error.message) == (400, "top_k: must be 1 or more")

    scenario_test(scenario)()


@scenario_test
async def test_long_reason_is_truncated(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(
        world, ScriptedEngine(world, InvalidRequest("x" * 1_000_000))
    )
    harness.assign()
    await harness.wait_finished()
    assert 100 < len(harness.chunks()[-1].invalid) < 10_000
