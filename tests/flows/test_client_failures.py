"""Tests of a client beside failing brokers, logs and records."""

from __future__ import annotations

import pytest

from kvlane.streams.client import Client
from kvlane.streams.codecs import encode
from kvlane.streams.errors import BrokerUnavailable, LogClosed, NewerRecord, PositionLost
from kvlane.streams.ports import Entry
from kvlane.streams.prompt import Prompt
from kvlane.streams.request import Request
from kvlane.streams.topics import PROMPTS, RESPONSES, lane_of
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker, begin_reply, connect, in_lane, publish, text


@scenario_test
async def test_outage_is_waited_out(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.write("he")
    reading = world.spawn(client.result(worker.id))
    publishing = world.spawn(client.publish(Prompt(id="during"), timeout_s=60))
    world.broker.available = False
    await world.sleep(20)
    assert not reading.done()
    world.broker.available = True
    worker.write("llo", "stop")
    assert (await reading).text == "hello"
    await publishing
    assert world.records(PROMPTS, key="during")


@scenario_test
async def test_publishing_during_an_outage_fails_at_its_deadline(world: MemoryWorld) -> None:
    client = await connect(world)
    world.broker.available = False
    with pytest.raises(BrokerUnavailable):
        await client.publish(Prompt(id="job-17"), timeout_s=5)
    assert world.clock.now() <= 7


@scenario_test
async def test_reading_during_an_outage_fails_at_its_deadline(world: MemoryWorld) -> None:
    client = await connect(world)
    world.broker.available = False
    with pytest.raises(BrokerUnavailable):
        await client.result("job-17", timeout_s=5)
    assert world.clock.now() <= 7


@scenario_test
async def test_lane_that_lost_records_fails_its_streams_and_no_others(world: MemoryWorld) -> None:
    client = await connect(world)
    lost, other, again = (
        Worker(world, in_lane(*where)) for where in ((0, "lost"), (1, "other"), (0, "again"))
    )
    for worker in (lost, other):
        await publish(client, worker.id)
    readings = [world.spawn(client.result(worker.id)) for worker in (lost, other)]
    await world.sleep(1)
    world.broker.available = False
    lost.write("he")
    lost.write("llo", "stop")
    world.broker.delete_records(RESPONSES, lane_of(lost.id, 2), 1)
    world.broker.available = True
    with pytest.raises(PositionLost):
        await readings[0]
    other.write("hello", "stop")
    assert (await readings[1]).text == "hello"
    await publish(client, again.id)
    again.write("hello", "stop")
    assert (await client.result(again.id)).text == "hello"


@scenario_test
async def test_record_for_newer_readers_ends_its_stream_with_a_clear_error(
    world: MemoryWorld,
) -> None:
    client = await connect(world)
    worker, other = Worker(world, await publish(client)), Worker(world, await publish(client))
    worker.write("he")
    shiny = Entry(worker.id.encode(), b"{}", (("t", b"Shiny"), ("r", b"2")))
    world.append_raw(RESPONSES, lane_of(worker.id, world.lanes), shiny)
    stream = client.stream(worker.id)
    assert text([await anext(stream)]) == "he"
    with pytest.raises(NewerRecord, match="record version 2"):
        await anext(stream)
    other.write("hello", "stop")
    assert (await client.result(other.id)).text == "hello"


@scenario_test
async def test_malformed_records_are_skipped_and_counted(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    reply = client._unclaimed[worker.id]
    lane = lane_of(worker.id, world.lanes)
    cancel = encode(Request(id=worker.id), worker.id)  # a type that has no business here
    for junk in (
        Entry(worker.id.encode(), b"{", (("t", b"Chunk"),)),
        Entry(worker.id.encode(), None),
        cancel,
        Entry(None, b"{}", (("t", b"Chunk"),)),
        Entry(worker.id.encode(), b"{}", (("t", b"Shiny"),)),
        Entry(worker.id.encode(), b"{}", (("t", None),)),
    ):
        world.append_raw(RESPONSES, lane, junk)
    worker.write("hello", "stop")
    assert (await client.result(worker.id)).text == "hello"
    assert reply.malformed == 5


@scenario_test
async def test_closing_ends_open_streams(world: MemoryWorld) -> None:
    client = await connect(world)
    reading = world.spawn(client.result(await publish(client)))
    await world.sleep(1)
    await client.close()
    with pytest.raises(LogClosed):
        await reading
    with pytest.raises(LogClosed):
        await publish(client)
    await client.close()


@scenario_test
async def test_log_that_is_closed_by_its_owner_ends_open_streams(world: MemoryWorld) -> None:
    log = await world.connect()
    client = Client(log, world.clock)
    await client.start()
    reading = world.spawn(client.result(await publish(client)))
    await world.sleep(1)
    await log.close()
    with pytest.raises(LogClosed):
        await reading
    with pytest.raises(LogClosed):
        await client.result("job-17")
    await client.close()


@scenario_test
async def test_client_is_closed_at_the_end_of_its_context(world: MemoryWorld) -> None:
    async with Client(await world.connect(), world.clock) as client:
        worker = Worker(world, await publish(client))
        worker.write("hello", "stop")
        assert (await client.result(worker.id)).text == "hello"
    with pytest.raises(LogClosed):
        await client.result("job-17")


@scenario_test
async def test_client_that_was_not_started_raises_its_error(world: MemoryWorld) -> None:
    client = Client(await world.connect(), world.clock)
    with pytest.raises(LogClosed, match="not started"):
        await client.publish(Prompt(id="job-17"))
