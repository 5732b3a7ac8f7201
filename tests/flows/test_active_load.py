"""Tests of the load of a running request: counted once, and given back once, however it ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import EngineOutput, GenerateContext
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.streams.codecs import decode
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.records import Finished, PrefillDone, Started
from kvlane.streams.request import Request
from kvlane.streams.topics import KV_EVENTS, LEDGER
from tests.harness.cluster_harness import (
    PROMPT,
    TOKENS,
    ClusterHarness,
    caching_engine,
    slow_engine,
)
from tests.harness.gateway_harness import CONTEXT, STEP_S
from tests.harness.memory_world import MemoryWorld, scenario_test


class Hesitant(EchoEngine):
    """Says something without a token before it says anything."""

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        for _ in range(3):
            await self._clock.sleep(1.0)
            yield EngineOutput()
        async for output in super().generate(request, context):
            yield output


@scenario_test
async def test_prefill_is_done_with_the_first_token_and_not_with_an_empty_output(
    world: MemoryWorld,
) -> None:
    cluster = await ClusterHarness.start(world, ())
    engine = Hesitant(world.clock, STEP_S, model="demo", context_length=CONTEXT)
    worker = await cluster.start_worker("w1", engine=engine)
    assert worker.epoch is not None
    place = WorkerRank("w1", worker.epoch)
    answer = cluster.complete_with(body={"max_tokens": 200})
    await world.wait_until(lambda: any(isinstance(r, Started) for r in _ledger(world)))
    await world.sleep(2)
    load = cluster.router._ledger.active_load.load(place)
    assert load.prefill_tokens == TOKENS, "two empty outputs came"
    await world.wait_until(lambda: any(isinstance(r, PrefillDone) for r in _ledger(world)))
    await world.sleep(0.1)
    load = cluster.router._ledger.active_load.load(place)
    assert (load.runs, load.prefill_tokens) == (1, 0)
    await answer.wait_done()


@pytest.mark.parametrize("way", ["end", "cancel", "leave", "death", "deadline"])
@scenario_test
async def test_load_of_a_request_is_released_once_for_every_ending(
    world: MemoryWorld, way: str
) -> None:
    cluster = await ClusterHarness.start(world, (), deadline_s=30)
    engine = caching_engine(world) if way == "end" else slow_engine(world)
    await cluster.start_worker("w1", engine=engine)
    answer = cluster.complete_with(body={"stream": True})
    await world.wait_until(lambda: len(cluster.decisions()) == 1)
    await world.sleep(1)
    (decision,) = cluster.decisions()
    if way != "end":
        assert not cluster.is_idle
    if way == "cancel":
        assert (await cluster.send("DELETE", f"/v1/streams/{decision.id}").wait_done()).status < 300
    elif way == "leave":
        answer.disconnect()
    elif way == "death":
        await cluster.kill("w1")
    await answer.task
    await world.sleep(40)
    assert cluster.is_idle
    assert not cluster.router._ledger.lane(0).unfinished
    assert not cluster.router._ledger.lane(1).unfinished


@scenario_test
async def test_two_ends_of_one_request_release_its_load_once(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ())
    await cluster.start_worker("w1", engine=slow_engine(world))
    first, second = cluster.complete_with(), cluster.complete_with()
    await world.wait_until(lambda: len(cluster.decisions()) == 2)
    one = next(d for d in cluster.decisions())
    await cluster.send("DELETE", f"/v1/streams/{one.id}").wait_done()
    await cluster.send("DELETE", f"/v1/streams/{one.id}").wait_done()
    await world.sleep(2)
    place = WorkerRank("w1", one.epoch)
    load = cluster.router._ledger.active_load.load(place)
    assert (load.runs, load.tokens) == (1, TOKENS)
    for answer in (first, second):
        answer.disconnect()
        await answer.task


@scenario_test
async def test_lost_worker_reports_fail_no_request(world: MemoryWorld) -> None:
    """Of the prefill's end, of the cache, and of the run's end, which is said until it stands."""
    cluster = await ClusterHarness.start(world, ())
    await cluster.start_worker("w1", engine=caching_engine(world))
    kept = [AppendFate.KEPT] * 2  # Assigned, Started
    world.faults.next_fates(LEDGER, *kept, AppendFate.LOST, AppendFate.LOST, AppendFate.KEPT)
    world.faults.next_fates(KV_EVENTS, AppendFate.LOST)
    answer = await cluster.complete_with().wait_done()
    assert answer.status == 200
    await world.sleep(5)
    kinds = [type(r) for r in _ledger(world)]
    assert kinds.count(PrefillDone) <= 1
    assert kinds.count(Finished) == 1
    assert cluster.is_idle
    assert (await cluster.wait_decision()).worker == "w1"


@scenario_test
async def test_cancel_wins_over_tokens_that_are_ready(world: MemoryWorld) -> None:
    """Tokens that an engine makes after its run was cancelled are not in the answer."""
    cluster = await ClusterHarness.start(world, ())
    await cluster.start_worker("w1")
    answer = cluster.complete_with(body={"stream": True, "max_tokens": 300, "prompt": PROMPT})
    await world.wait_until(lambda: len(answer.text) > 5)
    (decision,) = cluster.decisions()
    await cluster.send("DELETE", f"/v1/streams/{decision.id}").wait_done()
    shown = len(answer.text)
    await answer.task
    assert len(answer.text) <= shown + 3
    await world.wait_until(lambda: any(isinstance(r, Finished) for r in _ledger(world)))
    (finished,) = (r for r in _ledger(world) if isinstance(r, Finished))
    assert finished.code == "cancelled"
    assert finished.output_tokens < 300


def _ledger(world: MemoryWorld) -> list[object]:
    return [decode(record) for record in world.all_records(LEDGER)]
