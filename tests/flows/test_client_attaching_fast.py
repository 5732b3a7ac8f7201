"""Tests of attaching in a long lane, while other readers attach there too, in virtual time."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest

from kvlane.streams.client import Client
from kvlane.streams.codecs import encode
from kvlane.streams.errors import NotFound, PositionLost
from kvlane.streams.memory.memory_log import MemoryReader
from kvlane.streams.ports import Batches, Partition
from kvlane.streams.records import Chunk
from kvlane.streams.responses import reply_lanes
from kvlane.streams.responses.reply_reader import CLOCK_MARGIN_MS, ReplyReader
from kvlane.streams.topics import RESPONSES, lane_of
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker, connect, in_lane, read, text

DAY_S = 24 * 3600
RECORDS = 20_000
POLL_S = 0.05
PASS_S = RECORDS / reply_lanes.PASS_RECORDS * POLL_S
"""How long it takes to read the lane once."""


def fill(world: MemoryWorld, lane: int = 0, records: int = RECORDS) -> None:
    """Records of others, which are read at the same speed by every reader."""
    stranger = encode(Chunk(id="other", attempt=9, run="1", seq=1, index=1, text="x"), "other")
    world.append_raw(RESPONSES, lane, *[stranger] * records)
    world.faults.slow["poll"] = POLL_S


async def first_text_s(world: MemoryWorld, replies: ReplyReader, request_id: str) -> float:
    began = world.clock.now()
    reply = await replies.attach(request_id, begun=True)
    try:
        await reply.next_pieces(60.0)
        return world.clock.now() - began
    finally:
        replies.detach(reply)


@partial(scenario_test, lanes=1)
async def test_attaching_does_not_delay_other_streams(world: MemoryWorld) -> None:
    client = await connect(world)
    fill(world)
    Worker(world, "a").write("hello")
    waits = []
    for _ in range(100):
        waits.append(world.spawn(first_text_s(world, client._listening(), "a")))
        await world.sleep(PASS_S / 20)
    assert max([await wait for wait in waits]) < 2 * PASS_S + 0.5


@partial(scenario_test, lanes=1)
async def test_recent_stream_does_not_wait_for_an_old_one(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_lanes, "FAR_OFFSETS", RECORDS // 2)
    client = await connect(world)
    fill(world)
    await world.sleep(2 * CLOCK_MARGIN_MS / 1000)
    recent = Worker(world, client.new_request_id())
    recent.write("hello")
    fill(world, records=1000)
    far = [world.spawn(client.result(f"old-{n}")) for n in range(3)]
    await world.sleep(PASS_S / 4)
    assert await first_text_s(world, client._listening(), recent.id) < PASS_S / 4
    assert not any(reading.done() for reading in far)


@partial(scenario_test, lanes=5)
async def test_passes_over_old_records_are_bounded_and_cover_all_lanes(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_lanes, "FAR_OFFSETS", RECORDS // 2)
    client = await connect(world)
    ids = [next(i for i in map(str, range(1000)) if lane_of(i, 5) == n) for n in range(5)]
    for lane, request_id in enumerate(ids):
        fill(world, lane)
        Worker(world, request_id).write("hello", "stop")
    reading = [world.spawn(read(client, request_id)) for request_id in ids]
    await world.sleep(PASS_S / 2)
    assert len(client._listening()._history.active_passes) == reply_lanes.MAX_FAR_PASSES
    assert [text(await pieces) for pieces in reading] == ["hello"] * 5


@scenario_test
async def test_unreadable_lane_does_not_block_others(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_lanes, "MAX_PASSES", 1)
    hanging = Partition(RESPONSES, 0)
    answered = MemoryReader.poll

    async def poll(reader: MemoryReader, timeout_s: float, max_records: int) -> Batches:
        if hanging in reader.cursor.positions:
            await reader._log.broker.clock.sleep(timeout_s)
            return {}
        return await answered(reader, timeout_s, max_records)

    client = await connect(world)
    Worker(world, in_lane(0, "a")).write("hello", "stop")
    Worker(world, in_lane(1, "b")).write("hello", "stop")
    with monkeypatch.context() as leaderless:
        leaderless.setattr(MemoryReader, "poll", poll)
        first = world.spawn(read(client, in_lane(0, "a")))
        await world.sleep(1)
        began = world.clock.now()
        assert text(await read(client, in_lane(1, "b"))) == "hello"
        assert world.clock.now() - began < reply_lanes.STALL_TIMEOUT_S + 1
    assert text(await first) == "hello"


@partial(scenario_test, lanes=1)
async def test_stream_that_is_attached_to_while_its_lane_is_read_is_found(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader passes over records of other keys long before its poll comes back."""
    read_at_once = MemoryReader.poll

    async def poll(reader: MemoryReader, timeout_s: float, max_records: int) -> Batches:
        batches = await read_at_once(reader, timeout_s, max_records)
        await reader._log.broker.clock.sleep(POLL_S)
        return batches

    client = await connect(world)
    fill(world, records=100)
    await world.sleep(2 * CLOCK_MARGIN_MS / 1000)
    worker = Worker(world, client.new_request_id())
    worker.write("hello", "stop")
    fill(world, records=5 * reply_lanes.PASS_RECORDS)
    monkeypatch.setattr(MemoryReader, "poll", poll)
    first = world.spawn(client.result("other", timeout_s=5))
    await world.sleep(1.5 * POLL_S)  # the first poll has passed over it
    assert (await client.result(worker.id, timeout_s=5)).text == "hello"
    first.cancel()


@scenario_test
async def test_stream_is_found_though_the_log_was_cut_while_it_waited(world: MemoryWorld) -> None:
    client = await connect(world)
    fill(world)
    Worker(world, in_lane(0, "a")).write("hello", "stop")
    reading = world.spawn(read(client, in_lane(0, "a")))
    await world.sleep(2 * POLL_S)
    world.broker.delete_records(RESPONSES, 0, RECORDS // 2)
    assert text(await reading) == "hello"


@scenario_test
async def test_stream_truncated_during_a_read_raises_its_error(world: MemoryWorld) -> None:
    client = await connect(world)
    worker = Worker(world, in_lane(0, "a"))
    worker.write("he")
    fill(world)
    worker.write("llo", "stop")
    reading = world.spawn(read(client, worker.id))
    await world.sleep(3 * POLL_S)
    world.broker.delete_records(RESPONSES, 0, RECORDS + 1)
    with pytest.raises(PositionLost):
        await reading


@scenario_test
async def test_id_too_old_to_begin_is_unknown_to_a_whole_log(world: MemoryWorld) -> None:
    client = await connect(world)
    request_id = client.new_request_id()
    await world.sleep(8 * DAY_S)
    began = world.clock.now()
    with pytest.raises(NotFound, match=request_id):
        await read(client, request_id)
    assert world.clock.now() - began < 1.0


@scenario_test
async def test_detached_reply_is_freed(world: MemoryWorld) -> None:
    client: Client = await connect(world)
    replies = client._listening()
    fill(world)
    left = []
    for _ in range(100):
        reply = await replies.attach("other")
        await world.sleep(POLL_S / 3)
        replies.detach(reply)
        left.append(weakref.ref(reply))
    await world.sleep(2 * PASS_S)
    gc.collect()
    # Tasks that wait hold what they had in hand last.
    assert sum(ref() is not None for ref in left) <= 1 + len(replies._readers)
