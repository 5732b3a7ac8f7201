"""The one reader of a process that lives by it, on the log in memory."""

from __future__ import annotations

import pytest

from streams.errors import BrokerUnavailable, LogClosed
from streams.records import Chunk
from streams.replies import LINGER_S, Replies
from tests.listening import Worker, in_lane
from tests.worlds import World, in_world


async def replies_of(world: World) -> Replies:
    replies = Replies(await world.connect(), world.clock, world.lanes)
    replies.start()
    return replies


@in_world
async def test_a_kept_lane_is_read_on_however_long_nobody_listens(world: World) -> None:
    replies = await replies_of(world)
    await replies.keep([0])
    await world.sleep(10 * LINGER_S)
    assert list(replies._live.lanes) == [0]


@in_world
async def test_a_lane_that_is_not_kept_is_dropped(world: World) -> None:
    replies = await replies_of(world)
    await replies.keep([0])
    reply = await replies.from_now(in_lane(1, "a"))
    assert list(replies._live.lanes) == [0, 1]
    replies.leave(reply)
    await world.sleep(2 * LINGER_S)
    assert list(replies._live.lanes) == [0]


@in_world
async def test_a_reply_in_a_kept_lane_needs_no_question_to_the_broker(world: World) -> None:
    replies = await replies_of(world)
    await replies.keep([0, 1])
    world.faults.unanswered.add("offsets")
    reply = await replies.from_now(in_lane(0, "a"))
    Worker(world, reply.request_id).write("hello", "stop")
    piece = await reply.next(1.0)
    assert isinstance(piece, Chunk)
    assert piece.text == "hello"


@in_world
async def test_keeping_says_when_the_broker_does_not_answer(world: World) -> None:
    replies = await replies_of(world)
    world.faults.unanswered.add("offsets")
    with pytest.raises(BrokerUnavailable):
        await replies.keep([0])


@in_world
async def test_a_reader_that_fails_is_seen_by_its_watch(world: World) -> None:
    log = await world.connect()
    replies = Replies(log, world.clock, world.lanes)
    replies.start()
    await replies.keep([0])
    watch = world.spawn(replies.watch())
    await world.sleep(1)
    assert not watch.done()
    await log.close()
    with pytest.raises(LogClosed):
        await watch
