"""Tests of queries of end offsets: one request for all at the same time, and none that is too
old."""

from __future__ import annotations

import asyncio

from kvlane.app.lanes.shared_reads import EndOffsets
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.ports import Partition
from kvlane.streams.records import Ended
from kvlane.streams.topics import LEDGER, RESPONSES
from tests.harness.memory_world import MemoryWorld, scenario_test

LANE_0, LANE_1 = Partition(LEDGER, 0), Partition(LEDGER, 1)
RECORD = Ended(id="r", code="seen")


async def the_ends(world: MemoryWorld) -> EndOffsets:
    world.faults.slow["offsets"] = 1.0
    return EndOffsets(await world.connect(), ProcessContext("router", world.clock))


@scenario_test
async def test_partitions_of_a_topic_share_a_request(world: MemoryWorld) -> None:
    ends = await the_ends(world)
    world.append(LEDGER, 1, RECORD, RECORD)
    wanted = (LANE_0, LANE_1, LANE_1, Partition(RESPONSES, 0))
    assert await asyncio.gather(*map(ends.fetch, wanted)) == [0, 2, 2, 0]
    assert world.faults.sent.count("offsets") == 2


@scenario_test
async def test_query_gets_no_answer_to_an_earlier_one(world: MemoryWorld) -> None:
    ends = await the_ends(world)
    first = world.spawn(ends.fetch(LANE_0))
    await world.sleep(1.5)  # its answer is on the way
    world.append(LEDGER, 0, RECORD)
    second = world.spawn(ends.fetch(LANE_0))
    third = world.spawn(ends.fetch(LANE_1))
    await first
    assert world.faults.sent.count("offsets") == 1
    assert [await second, await third] == [1, 0]
    assert world.faults.sent.count("offsets") == 2


@scenario_test
async def test_outage_is_waited_out(world: MemoryWorld) -> None:
    ends = await the_ends(world)
    world.broker.available = False
    sending = world.spawn(ends.fetch(LANE_0))
    await world.sleep(10)
    world.broker.available = True
    assert await asyncio.wait_for(sending, 10) == 0
