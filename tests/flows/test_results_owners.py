"""Tests of two collectors that both believe to own a lane, on the log in memory."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest

import kvlane.app.collector as collector_process
from kvlane.streams.errors import RecordTooLarge
from kvlane.streams.memory.memory_writes import MemoryTransactionalWriter
from kvlane.streams.ports import TopicEntry
from kvlane.streams.request import ReplyAddress
from kvlane.streams.topics import RESPONSES, RESULTS
from tests.flows.test_results_replies import HOUR_MS, collector
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness
from workbench.testing.virtual_time import VirtualClock, VirtualLoop


@contextmanager
def group_of_its_own(name: str) -> Iterator[None]:
    """A collector that starts meanwhile gets all lanes, and no other one loses any: as where the
    coordinator has moved the lanes of a process that does not reach it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector_process, "GROUP", name)
        yield


@pytest.mark.parametrize("latency_s", [0.0, 0.02])
@scenario_test
async def test_two_collectors_that_own_all_lanes_write_each_result_once(
    world: MemoryWorld, latency_s: float
) -> None:
    world.faults.slow["append"], world.faults.slow["poll"] = latency_s, latency_s / 2
    world.broker.create_topic("replies", 1, HOUR_MS)
    results = await collector(world)
    with group_of_its_own("others"):
        await results.start("c2")
    rng = random.Random(latency_s)

    async def converse(name: str) -> None:
        await world.sleep(30 * rng.random())
        results.ask(name, reply=ReplyAddress(topic="replies"))
        await world.sleep(3 * rng.random())
        results.answer(name, "a", "b", ".")

    names = [f"r{number}" for number in range(100)]
    for talk in [world.spawn(converse(name)) for name in names]:
        await talk
    await world.sleep(60)
    written = Counter(result.id for result in results.results())
    assert written == Counter(names)
    assert Counter(r.key for r in world.records("replies", 0)) == Counter(map(str.encode, names))


@scenario_test
async def test_results_written_by_another_owner_of_unread_requests_are_not_written_again(
    world: MemoryWorld,
) -> None:
    """This collector reads requests late: the other one has answered them long before."""
    results = await collector(world)
    paused = results.running["c1"][2]._requests
    for claim in paused._claims.values():
        paused.pause(claim)
    with group_of_its_own("others"):
        await results.start("c2")
    names = [f"r{number}" for number in range(20)]
    for name in names:
        results.ask(name)
        results.answer(name, "x")
    await results.wait_results(20)
    await world.sleep(400)
    for claim in paused._claims.values():
        paused.resume(claim)
    for name in ("s1", "s2", "s3", "s4"):
        results.ask(name)
        results.answer(name, "x")
    await results.wait_results(24)


@scenario_test
async def test_transaction_refused_for_its_size_lets_nothing_be_written_twice(
    world: MemoryWorld,
) -> None:
    """The writer is opened again after it, in the middle of the other one's writing."""
    write = MemoryTransactionalWriter.write
    calls = count()

    async def refuse_some(writer: MemoryTransactionalWriter, entries: Sequence[TopicEntry]) -> None:
        if writer._connection.client_id == "c1" and next(calls) % 2 == 0:
            await world.sleep(0.5)  # the other one writes the same results
            writer._epoch = None
            raise RecordTooLarge("results")
        await write(writer, entries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryTransactionalWriter, "write", refuse_some)
        results = await collector(world)
        with group_of_its_own("others"):
            await results.start("c2")
        for number in range(40):
            results.ask(f"r{number}")
            results.answer(f"r{number}", "x")
            if number % 2:
                await world.sleep(0.7)
        await world.sleep(30)
        await results.wait_results(40)


# --- take-over ------------------------------------------------------------------------------------


@scenario_test
async def test_result_written_just_before_the_fence_is_not_written_again(
    world: MemoryWorld,
) -> None:
    """The look for results comes after the fence: until then the former owner may write."""
    results = await collector(world)
    names = [f"r{number}" for number in range(4)]
    for name in names:
        results.ask(name)
    open_writer = MemoryTransactionalWriter.open

    async def open_late(writer: MemoryTransactionalWriter) -> None:
        if writer._connection.client_id == "c2" and not world.all_records(RESULTS):
            for name in names:
                results.answer(name, "x")
            await results.wait_results(4)
        await open_writer(writer)

    with pytest.MonkeyPatch.context() as patch, group_of_its_own("others"):
        patch.setattr(MemoryTransactionalWriter, "open", open_late)
        await results.start("c2")
        await world.sleep(60)
        assert Counter(result.id for result in results.results()) == Counter(names)


@pytest.mark.parametrize("topic", [RESULTS, RESPONSES])
@pytest.mark.parametrize("ahead_s", [-50, 50])
@scenario_test
async def test_clocks_of_brokers_that_differ_lose_and_double_no_result(
    world: MemoryWorld, topic: str, ahead_s: int
) -> None:
    clock = VirtualClock(asyncio.get_running_loop(), ahead_ms=1000 * ahead_s)
    for lane in range(world.lanes):
        world.broker.set_leader_clock(topic, lane, clock)
    results = await collector(world)
    world.faults.slow["commit"] = 1000.0  # the next owner begins before the first request
    await world.sleep(100)  # older records than the margin are not read
    for name in ("a", "b", "c"):
        results.ask(name)
        results.answer(name, "x")
    await results.wait_results(3)
    for name in ("d", "e", "f"):
        results.ask(name)
        results.answer(name, "y", end=None)
    await results.kill()
    world.faults.slow.clear()
    await results.start("c2")
    for name in ("d", "e", "f"):
        results.answer(name, "z", seq=1, index=1)
    found = await results.wait_results(6)
    texts = {r.id: (r.body or {})["choices"][0]["text"] for r in found}
    assert texts == dict.fromkeys("abc", "x") | dict.fromkeys("def", "yz")


@partial(scenario_test, lanes=1)
async def test_collector_without_lanes_seldom_wakes_up(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    await results.start("owner")
    async with asyncio.timeout(60):
        await results.start("idle")
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    begun = loop.steps
    await world.sleep(60)
    assert (loop.steps - begun) / 60 < 100, "callbacks a second of both"
