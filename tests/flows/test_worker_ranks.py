"""A worker whose engine has several ranks, hands caches over, and refuses what makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.contract import BlocksListener, EngineOutput, InvalidRequest
from app.http.errors import failure_of
from indexer.engine_events import BlocksStored
from streams.records import Blocks, EngineConfig, PrefillDone, WorkerCard
from streams.topics import KV_EVENTS, LEDGER, REGISTRY
from tests.desks import TOKEN, Desk, Scripted
from tests.worlds import World, in_world

SIZE = 2


class Ranked(Scripted):
    """An engine of two ranks."""

    def listen(self, listener: BlocksListener) -> None:
        self.listener = listener

    async def start(self, worker_id: str) -> EngineConfig:
        return EngineConfig(model="m", kv_cache_block_size=SIZE, data_parallel_size=2)


async def ranked(world: World) -> tuple[Desk, Ranked]:
    desk, engine = Desk(world), Ranked(world, TOKEN, EngineOutput.stop())
    await desk.start(engine)
    return desk, engine


@in_world
async def test_the_card_says_how_many_ranks_there_are(world: World) -> None:
    desk, _ = await ranked(world)
    assert desk.said(REGISTRY, WorkerCard)[-1].ranks == 2


@in_world
async def test_each_rank_has_its_own_events_and_heartbeats_know_the_last_of_each(
    world: World,
) -> None:
    desk, engine = await ranked(world)
    engine.listener([BlocksStored([1], None, [7, 8], SIZE)], 1)
    engine.listener([BlocksStored([1, 2], None, [7, 8, 9, 9], SIZE)], 0)
    engine.listener([BlocksStored([2], 1, [5, 6], SIZE)], 1)
    await world.until(lambda: bool(desk.beats()) and desk.beats()[-1].last_event_ids == (1, 1))
    told = {0: 0, 1: 0}
    for blocks in desk.said(KV_EVENTS, Blocks):
        told[blocks.rank] += len(blocks.keys) // 8
    assert told == {0: 2, 1: 2}


@in_world
async def test_the_engine_is_told_which_rank_was_chosen(world: World) -> None:
    desk, engine = await ranked(world)
    desk.assign("a", rank=1)
    await desk.finished("a")
    desk.assign("b", rank=0)
    await desk.finished("b")
    assert [request.hints.dp_rank for request in engine.requests] == [1, None]


@in_world
async def test_what_a_prefill_hands_over_is_in_the_ledger(world: World) -> None:
    desk = Desk(world)
    first = EngineOutput(token_ids=(65,), finish_reason="length", transfer=b'{"where": 1}')
    await desk.start(Scripted(world, first))
    desk.assign()
    await desk.finished()
    (done,) = desk.lane(LEDGER, PrefillDone)
    assert done.handoff == b'{"where": 1}'


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_client_is_told_what_is_wrong_with_its_request(tokens: int) -> None:
    async def scenario(world: World) -> None:
        desk = Desk(world)
        script: list[Any] = [TOKEN] * tokens + [InvalidRequest("top_k: must be 1 or more")]
        await desk.start(Scripted(world, *script))
        desk.assign()
        finished = await desk.finished()
        assert (finished.code, finished.retryable) == ("error", False)
        error = failure_of(desk.chunks()[-1])
        assert error is not None
        assert (error.status, error.message) == (400, "top_k: must be 1 or more")

    in_world(scenario)()


@in_world
async def test_a_reason_of_any_length_is_cut(world: World) -> None:
    desk = Desk(world)
    await desk.start(Scripted(world, InvalidRequest("x" * 1_000_000)))
    desk.assign()
    await desk.finished()
    assert 100 < len(desk.chunks()[-1].invalid) < 10_000
