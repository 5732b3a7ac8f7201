"""Tests of the one reply reader of a process, on the log in memory."""

from __future__ import annotations

import pytest

from kvlane.streams.errors import BrokerUnavailable, LogClosed
from kvlane.streams.records import Chunk
from kvlane.streams.responses.reply_reader import IDLE_LANE_TTL_S, ReplyReader
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker, in_lane


async def replies_of(world: MemoryWorld) -> ReplyReader:
    replies = ReplyReader(await world.connect(), world.clock, world.lanes)
    replies.start()
    return replies


@scenario_test
async def test_retained_lane_is_read_without_subscribers(world: MemoryWorld) -> None:
    replies = await replies_of(world)
    await replies.pin([0])
    await world.sleep(10 * IDLE_LANE_TTL_S)
    assert list(replies._live.lanes) == [0]


@scenario_test
async def test_lane_that_is_not_kept_is_dropped(world: MemoryWorld) -> None:
    replies = await replies_of(world)
    await replies.pin([0])
    reply = await replies.subscribe(in_lane(1, "a"))
    assert list(replies._live.lanes) == [0, 1]
    replies.detach(reply)
    await world.sleep(2 * IDLE_LANE_TTL_S)
    assert list(replies._live.lanes) == [0]


@scenario_test
async def test_reply_in_a_kept_lane_needs_no_broker_query(world: MemoryWorld) -> None:
    replies = await replies_of(world)
    await replies.pin([0, 1])
    world.faults.unanswered.add("offsets")
    reply = await replies.subscribe(in_lane(0, "a"))
    Worker(world, reply.request_id).write("hello", "stop")
    piece = await reply.next_piece(1.0)
    assert isinstance(piece, Chunk)
    assert piece.text == "hello"


@scenario_test
async def test_retaining_a_lane_raises_when_the_broker_does_not_answer(world: MemoryWorld) -> None:
    replies = await replies_of(world)
    world.faults.unanswered.add("offsets")
    with pytest.raises(BrokerUnavailable):
        await replies.pin([0])


@scenario_test
async def test_failure_of_a_reader_is_reported_to_its_watch(world: MemoryWorld) -> None:
    log = await world.connect()
    replies = ReplyReader(log, world.clock, world.lanes)
    replies.start()
    await replies.pin([0])
    watch = world.spawn(replies.wait_until_failed())
    await world.sleep(1)
    assert not watch.done()
    await log.close()
    with pytest.raises(LogClosed):
        await watch
