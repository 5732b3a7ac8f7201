"""Tests of attaching to requests that were published elsewhere, earlier, or before a restart."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.audit.unknown_ids import is_published
from kvlane.streams import client as module
from kvlane.streams.client import Client
from kvlane.streams.codecs import encode
from kvlane.streams.errors import AppendFailed, BrokerUnavailable, PositionLost
from kvlane.streams.ids import TenantTag
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Chunk, End, Fence
from kvlane.streams.responses.reply_reader import (
    CLOCK_MARGIN_MS,
    LOOK_BACK_S,
    MAX_REQUEST_LIFETIME_MS,
)
from kvlane.streams.topics import PROMPTS, RESPONSES, lane_of
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker, begin_reply, connect, in_lane, publish, read, text
from workbench.testing.virtual_time import VirtualClock


@scenario_test
async def test_stream_published_elsewhere_is_read_from_its_beginning(world: MemoryWorld) -> None:
    publisher, client = await connect(world, "one"), await connect(world, "two")
    worker = Worker(world, await publish(publisher))
    worker.write("he")
    await world.sleep(20)
    reading = world.spawn(read(client, worker.id))
    await world.sleep(1)
    worker.write("llo", "stop")
    assert text(await reading) == "hello"


@pytest.mark.parametrize("request_id", ["job-17", "0190a8c4-0000-7000-8000-000000000001"])
@scenario_test
async def test_finished_stream_is_read_whatever_its_id(world: MemoryWorld, request_id: str) -> None:
    Worker(world, request_id).write("hello", "stop")
    await world.sleep(1800)
    client = await connect(world)
    assert (await client.result(request_id, timeout_s=5)).text == "hello"


@scenario_test
async def test_stream_may_be_awaited_before_it_begins(world: MemoryWorld) -> None:
    client = await connect(world)
    reading = world.spawn(client.result("job-17"))
    await world.sleep(5)
    Worker(world, "job-17").write("hello", "stop")
    assert (await reading).text == "hello"


@scenario_test
async def test_two_readers_get_the_same_text(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.write("he")
    first = world.spawn(read(client, worker.id))
    await world.sleep(1)
    second = world.spawn(read(client, worker.id))
    await world.sleep(1)
    worker.write("llo", "stop")
    assert await first == await second
    assert text(await first) == "hello"


@scenario_test
async def test_attached_stream_continues_with_the_live_reader(world: MemoryWorld) -> None:
    client = await connect(world)
    worker = Worker(world, "job-17")
    worker.write("he")
    reading = world.spawn(client.result("job-17"))
    replies = client._listening()
    await world.wait_until(lambda: bool(replies._live.all_replies()))
    await world.wait_until(lambda: not replies._history.all_replies())
    worker.write("llo", "stop")
    assert (await reading).text == "hello"


def backlog(world: MemoryWorld, lane: int, records: int = 7000) -> None:
    """Records of others, for several polls that take their time."""
    stranger = encode(Fence(id="other", attempt=1), "other")
    world.append_raw(RESPONSES, lane, *[stranger] * records)
    world.faults.slow["poll"] = 0.3


async def id_of_a_clock_that_is_ahead(world: MemoryWorld) -> str:
    ahead = VirtualClock(world.clock._loop, ahead_ms=2 * CLOCK_MARGIN_MS)
    return Client(await world.connect("ahead"), ahead).new_request_id()


@scenario_test
async def test_attached_stream_continues_after_the_live_reader_left_its_lane(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlane.streams.responses.reply_reader.IDLE_LANE_TTL_S", 0.0)
    client = await connect(world)
    worker = Worker(world, "job-17")
    worker.write("he")
    backlog(world, lane_of("job-17", world.lanes))
    reading = world.spawn(client.result("job-17"))
    replies = client._listening()
    await world.wait_until(lambda: bool(replies._history.active_passes))
    await world.wait_until(lambda: not replies._live.lanes)
    await world.wait_until(lambda: bool(replies._live.lanes))
    worker.write("llo", "stop")
    assert (await reading).text == "hello"


@scenario_test
async def test_stream_abandoned_before_its_first_read_leaves_nothing_behind(
    world: MemoryWorld,
) -> None:
    client = await connect(world)
    replies = client._listening()
    lane = lane_of("job-17", world.lanes)
    backlog(world, lane)
    first = await replies.attach("job-17")
    await world.wait_until(
        lambda: any(p.position > 0 for p in replies._history.active_passes.values())
    )
    second = await replies.attach("job-17", begun=True)
    replies.detach(second)
    await world.wait_until(lambda: not replies._history.active_passes)
    assert replies._live.all_replies() == [first]


@scenario_test
async def test_attaching_in_a_busy_lane_misses_and_repeats_nothing(world: MemoryWorld) -> None:
    """Others write into the lane all the time while several streams attach one after the other."""
    client = await connect(world)
    workers = [Worker(world, f"job-{n}") for n in range(30)]
    reading = []
    for k in range(40):
        for worker in workers:
            worker.write(f"{k} ", "stop" if k == 39 else None)
        if k < len(workers):
            reading.append(world.spawn(client.result(workers[k].id)))
        await world.sleep(0.003)
    answers = await asyncio.gather(*reading)
    assert {a.text for a in answers} == {"".join(f"{k} " for k in range(40))}


@scenario_test
async def test_restarted_client_publishes_again_and_reads_the_whole_answer(
    world: MemoryWorld,
) -> None:
    first = await connect(world, "one")
    worker = Worker(world, await publish(first))
    worker.write("he")
    await first.close()
    again = await connect(world, "two")
    await again.publish(Prompt(id=worker.id), subscribe=False)
    worker.write("llo", "stop")
    assert text(await read(again, worker.id)) == "hello"


@scenario_test
async def test_failed_publish_that_was_answered_all_the_same_loses_nothing(
    world: MemoryWorld,
) -> None:
    client = await connect(world)
    world.faults.next_fates(PROMPTS, *[AppendFate.UNREPORTED] * 100)
    with pytest.raises(AppendFailed):
        await client.publish(Prompt(id="job-17"), timeout_s=1)
    worker = Worker(world, "job-17")
    worker.write("he")
    await world.sleep(1)
    world.faults.fates.clear()
    await client.publish(Prompt(id="job-17"))
    worker.write("llo", "stop")
    assert text(await read(client, "job-17")) == "hello"


@scenario_test
async def test_reading_starts_at_the_received_position(world: MemoryWorld) -> None:
    client = await connect(world)
    worker = Worker(world, "job-17")
    pieces = [worker.write("he"), worker.write("ll"), worker.write("o", "stop")]
    assert await read(client, "job-17", from_token=2) == pieces[1:]
    assert await read(client, "job-17", from_token=3) == pieces[1:]  # in the middle of a piece
    assert await read(client, "job-17", from_token=4) == pieces[2:]


@scenario_test
async def test_client_with_the_whole_text_gets_the_end_only(world: MemoryWorld) -> None:
    client = await connect(world)
    worker = Worker(world, "job-17")
    worker.write("hello", "stop")
    (piece,) = await read(client, "job-17", from_token=5)
    assert isinstance(piece, Chunk)
    assert (piece.text, piece.token_ids, piece.index) == ("", (), 5)
    assert piece.finish_reason == "stop"


@scenario_test
async def test_id_from_a_clock_that_is_ahead_is_found_all_the_same(world: MemoryWorld) -> None:
    request_id = await id_of_a_clock_that_is_ahead(world)
    worker = Worker(world, request_id)
    worker.write("he")
    await world.sleep(1.2 * CLOCK_MARGIN_MS / 1000)
    worker.write("ll")  # what its id makes us look for first
    await world.sleep(1)
    client = await connect(world)
    reading = world.spawn(client.result(request_id))
    await world.sleep(1)
    worker.write("o", "stop")
    assert (await reading).text == "hello"


@scenario_test
async def test_finished_stream_of_a_clock_that_is_ahead_is_found_in_a_quiet_lane(
    world: MemoryWorld,
) -> None:
    request_id = await id_of_a_clock_that_is_ahead(world)
    Worker(world, request_id).write("hello", "stop")
    client = await connect(world)
    assert (await client.result(request_id, timeout_s=5)).text == "hello"


@scenario_test
async def test_stream_without_its_first_records_raises_its_error(world: MemoryWorld) -> None:
    worker = Worker(world, "job-17")
    worker.write("he")
    worker.write("ll")
    world.broker.delete_records(RESPONSES, lane_of("job-17", world.lanes), 1)
    client = await connect(world)
    with pytest.raises(PositionLost):
        await read(client, "job-17")


@scenario_test
async def test_stream_without_its_last_fence_raises_its_error(world: MemoryWorld) -> None:
    worker = Worker(world, "job-17")
    worker.write("he")
    worker.append(Fence(id="job-17", attempt=1))
    Worker(world, "job-17", attempt=1, index=2).write("llo", "stop")
    world.broker.delete_records(RESPONSES, lane_of("job-17", world.lanes), 2)
    client = await connect(world)
    with pytest.raises(PositionLost):
        await read(client, "job-17")


@pytest.mark.parametrize("kept", ["first Chunk", "late Chunk", "last Fence"])
@scenario_test
async def test_late_chunk_is_no_beginning_where_the_fence_before_it_was_deleted(
    world: MemoryWorld, kept: str
) -> None:
    abandoned, worker = Worker(world, "job-17"), Worker(world, "job-17", attempt=1)
    worker.append(Fence(id="job-17", attempt=1))
    if kept == "first Chunk":
        worker.write("h")
    abandoned.write("x")
    if kept != "last Fence":
        worker.write("el")
    worker.append(Fence(id="job-17", attempt=2))
    Worker(world, "job-17", attempt=2, index=3).write("lo", "stop")
    cut(world, "job-17", 1)
    client = await connect(world)
    for from_token in (0, 1):
        with pytest.raises(PositionLost):
            await read(client, "job-17", from_token)


@scenario_test
async def test_stream_that_moved_is_found_although_its_clock_is_ahead(world: MemoryWorld) -> None:
    request_id = await id_of_a_clock_that_is_ahead(world)
    worker = Worker(world, request_id)
    worker.write("he")
    worker.append(Fence(id=request_id, attempt=1))
    await world.sleep(1.2 * CLOCK_MARGIN_MS / 1000)
    Worker(world, request_id, attempt=1, index=2).write("llo", "stop")
    client = await connect(world)
    assert (await client.result(request_id, timeout_s=5)).text == "hello"


@pytest.mark.parametrize("others", [0, 1, 7000])
@scenario_test
async def test_resuming_client_gets_position_lost_for_a_deleted_stream(
    world: MemoryWorld, others: int
) -> None:
    client = await connect(world)
    worker = Worker(world, client.new_request_id())
    worker.write("he")
    worker.write("llo", "stop")
    lane = lane_of(worker.id, world.lanes)
    world.broker.delete_records(RESPONSES, lane, 2)
    backlog(world, lane, others)
    with pytest.raises(PositionLost):
        await read(client, worker.id, from_token=2)


@scenario_test
async def test_new_client_waits_for_the_first_chunk_in_a_truncated_lane(world: MemoryWorld) -> None:
    client = await connect(world)
    worker = Worker(world, client.new_request_id())
    lane = lane_of(worker.id, world.lanes)
    backlog(world, lane, 3)
    world.broker.delete_records(RESPONSES, lane, 2)
    reading = world.spawn(read(client, worker.id))
    await world.sleep(60)
    worker.write("hello", "stop")
    assert text(await reading) == "hello"


@scenario_test
async def test_unread_records_do_not_count_as_deleted(world: MemoryWorld) -> None:
    client = await connect(world)
    worker = Worker(world, "job-17")
    lane = lane_of("job-17", world.lanes)
    backlog(world, lane)
    world.broker.delete_records(RESPONSES, lane, 2)
    worker.write("he")
    first = world.spawn(read(client, "job-17", from_token=2))
    await world.sleep(0.1)
    second = world.spawn(read(client, "job-17", from_token=2))
    await world.sleep(10)
    worker.write("llo", "stop")
    assert text(await first) == text(await second) == "llo"


@scenario_test
async def test_resuming_client_finds_a_stream_with_an_id_from_a_fast_clock(
    world: MemoryWorld,
) -> None:
    request_id = await id_of_a_clock_that_is_ahead(world)
    Worker(world, request_id).write("hello", "stop")
    await world.sleep(1.2 * CLOCK_MARGIN_MS / 1000)
    backlog(world, lane_of(request_id, world.lanes), 1)
    client = await connect(world)
    (piece,) = await read(client, request_id, from_token=5)
    assert isinstance(piece, Chunk)
    assert piece.finish_reason == "stop"


@scenario_test
async def test_resuming_client_gets_position_lost_for_an_id_from_a_fast_clock(
    world: MemoryWorld,
) -> None:
    request_id = await id_of_a_clock_that_is_ahead(world)
    Worker(world, request_id).write("hello", "stop")
    lane = lane_of(request_id, world.lanes)
    backlog(world, lane, 2)
    world.broker.delete_records(RESPONSES, lane, 1)
    await world.sleep(1.2 * CLOCK_MARGIN_MS / 1000)
    backlog(world, lane, 1)
    client = await connect(world)
    with pytest.raises(PositionLost):
        await read(client, request_id, from_token=2)


@scenario_test
async def test_oldest_of_too_many_unclaimed_replies_are_read_from_the_log(
    world: MemoryWorld,
) -> None:
    client = await connect(world)
    first = Worker(world, await publish(client))
    first.write("he")
    for _ in range(module.MAX_UNCLAIMED_REPLIES):
        await publish(client)
    assert len(client._unclaimed) == module.MAX_UNCLAIMED_REPLIES
    assert first.id not in client._unclaimed
    first.write("llo", "stop")
    assert (await client.result(first.id)).text == "hello"


# --- ends without a beginning --------------------------------------------------------------------


def cut(world: MemoryWorld, request_id: str, before: int) -> None:
    world.broker.delete_records(RESPONSES, lane_of(request_id, world.lanes), before)


@scenario_test
async def test_end_with_deleted_text_raises_position_lost(world: MemoryWorld) -> None:
    worker = Worker(world, "job-17")
    worker.write("hello")
    worker.append(End(id="job-17", code="deadline"))
    cut(world, "job-17", 1)
    client = await connect(world)
    with pytest.raises(PositionLost):
        await read(client, "job-17")


@scenario_test
async def test_end_whose_text_and_fence_were_deleted_is_not_either(world: MemoryWorld) -> None:
    worker = Worker(world, "job-17")
    worker.write("hello")
    worker.append(Fence(id="job-17", attempt=1))
    worker.append(End(id="job-17", code="length"))
    cut(world, "job-17", 1)
    client = await connect(world)
    with pytest.raises(PositionLost):
        await read(client, "job-17")


@scenario_test
async def test_end_without_text_is_delivered_while_its_lifetime_is_in_the_log(
    world: MemoryWorld,
) -> None:
    lane = lane_of("job-17", world.lanes)
    backlog(world, lane, 2)
    await world.sleep(1.0)
    cut(world, "job-17", 1)
    await world.sleep(MAX_REQUEST_LIFETIME_MS / 1000)
    backlog(world, lane, 1)
    Worker(world, "job-17").append(End(id="job-17", code="deadline"))
    client = await connect(world)
    (end,) = await read(client, "job-17")
    assert isinstance(end, End)
    assert end.code == "deadline"


@pytest.mark.parametrize("code", ["refused", "invalid", "too_large", "queue_full"])
@scenario_test
async def test_refusal_is_delivered_for_any_truncation(world: MemoryWorld, code: Any) -> None:
    backlog(world, lane_of("job-17", world.lanes), 2)
    cut(world, "job-17", 1)
    Worker(world, "job-17").append(End(id="job-17", code=code))
    client = await connect(world)
    assert [piece.code for piece in await read(client, "job-17")] == [code]  # type: ignore[union-attr]


@scenario_test
async def test_end_is_delivered_for_an_id_younger_than_the_truncation(world: MemoryWorld) -> None:
    client = await connect(world)
    request_id = client.new_request_id()
    lane = lane_of(request_id, world.lanes)
    backlog(world, lane, 2)
    cut(world, request_id, 1)
    await world.sleep(2 * CLOCK_MARGIN_MS / 1000)
    younger = next(i for i in iter(client.new_request_id, "") if lane_of(i, world.lanes) == lane)
    Worker(world, younger).append(End(id=younger, code="deadline"))
    (end,) = await read(client, younger)
    assert isinstance(end, End)


@scenario_test
async def test_resuming_client_gets_no_end_without_the_remaining_text(world: MemoryWorld) -> None:
    client = await connect(world)
    worker = Worker(world, client.new_request_id())
    worker.write("he")
    worker.write("llo")
    worker.append(End(id=worker.id, code="deadline"))
    cut(world, worker.id, 2)
    with pytest.raises(PositionLost):
        await read(client, worker.id, from_token=2)


@scenario_test
async def test_unresponsive_broker_fails_only_streams_that_need_offsets(world: MemoryWorld) -> None:
    client = await connect(world)
    other = Worker(world, in_lane(1 - lane_of("job-17", 2), "job"))
    reading = world.spawn(read(client, other.id))
    worker = Worker(world, "job-17")
    worker.write("hello")
    cut(world, "job-17", 1)
    waiting = world.spawn(read(client, "job-17"))
    await world.sleep(1.0)
    world.faults.unanswered = {"offsets"}
    worker.append(End(id="job-17", code="deadline"))
    with pytest.raises(BrokerUnavailable):
        await waiting
    other.write("fine", "stop")
    assert text(await reading) == "fine"


# --- streams that are gone altogether ------------------------------------------------------------


@pytest.mark.parametrize("others", [1, 7000])
@scenario_test
async def test_deleted_stream_is_not_awaited(world: MemoryWorld, others: int) -> None:
    client = await connect(world)
    worker = Worker(world, client.new_request_id())
    worker.write("hello", "stop")
    cut(world, worker.id, 1)
    await world.sleep(8 * 24 * 3600)  # longer than the topic `batch` keeps prompts
    backlog(world, lane_of(worker.id, world.lanes), others)
    began = world.clock.now()
    with pytest.raises(PositionLost):
        await read(client, worker.id)
    assert world.clock.now() - began < 5.0


@scenario_test
async def test_deleted_stream_of_a_gateway_is_not_awaited_as_long_as_prompts_may_wait(
    world: MemoryWorld,
) -> None:
    client = await connect(world)
    request_id = TenantTag(b"secret").tagged(client.new_request_id(), "")
    Worker(world, request_id).write("hello", "stop")
    cut(world, request_id, 1)
    await world.sleep(MAX_REQUEST_LIFETIME_MS / 1000 + 2 * CLOCK_MARGIN_MS / 1000)
    with pytest.raises(PositionLost):
        await read(client, request_id)


@scenario_test
async def test_prompt_that_waits_for_a_day_is_answered(world: MemoryWorld) -> None:
    client = await connect(world)
    worker = Worker(world, client.new_request_id())
    backlog(world, lane_of(worker.id, world.lanes), 2)
    cut(world, worker.id, 1)
    await world.sleep(23 * 3600)
    reading = world.spawn(read(client, worker.id))
    await world.sleep(60)
    worker.write("hello", "stop")
    assert text(await reading) == "hello"


@scenario_test
async def test_end_without_text_is_delivered_for_an_old_id(world: MemoryWorld) -> None:
    client = await connect(world)
    request_id = TenantTag(b"secret").tagged(client.new_request_id(), "")
    Worker(world, request_id).append(End(id=request_id, code="deadline"))
    await world.sleep(MAX_REQUEST_LIFETIME_MS / 1000 + 2 * CLOCK_MARGIN_MS / 1000)
    (end,) = await read(client, request_id)
    assert isinstance(end, End)


# --- ids of clocks that are ahead, in lanes with records of others --------------------------------


async def write_ahead_of_its_id(
    world: MemoryWorld, *records: str | Fence | End, gap_s: float = 0.0
) -> str:
    """A reply that begins before the offset at which the time in its id is looked for.

    `gap_s`: time between its first record and the others.
    """
    request_id = await id_of_a_clock_that_is_ahead(world)
    worker = Worker(world, request_id)
    stranger = Worker(world, in_lane_of(world, request_id))
    stranger.write("before")
    for number, record in enumerate(records):
        if number == 1:
            await world.sleep(gap_s)
        if isinstance(record, str):
            worker.write(record, "stop" if number == len(records) - 1 else None)
        else:
            worker.append(replace(record, id=request_id))
            if isinstance(record, Fence):
                worker = Worker(world, request_id, record.attempt, worker.index)
    await world.sleep(1.2 * CLOCK_MARGIN_MS / 1000)
    stranger.write("after")
    return request_id


def in_lane_of(world: MemoryWorld, request_id: str) -> str:
    lane = lane_of(request_id, world.lanes)
    return next(i for i in map("other-{}".format, range(99)) if lane_of(i, world.lanes) == lane)


@scenario_test
async def test_end_far_behind_its_text_does_not_hide_the_text(world: MemoryWorld) -> None:
    request_id = await write_ahead_of_its_id(
        world, "hello", End(id="", code="deadline"), gap_s=1.2 * CLOCK_MARGIN_MS / 1000
    )
    pieces = await read(await connect(world), request_id)
    assert text(pieces) == "hello"
    assert isinstance(pieces[-1], End)


@scenario_test
async def test_fence_and_end_far_behind_the_text_do_not_hide_it_either(world: MemoryWorld) -> None:
    fence = Fence(id="", attempt=1)
    end = End(id="", code="lost")
    gap_s = 1.2 * CLOCK_MARGIN_MS / 1000
    request_id = await write_ahead_of_its_id(world, "hello", fence, end, gap_s=gap_s)
    assert text(await read(await connect(world), request_id)) == "hello"


@scenario_test
async def test_end_without_any_text_is_delivered_for_an_id_of_any_clock(world: MemoryWorld) -> None:
    client = await connect(world)
    for code in ("all_busy", "queue_full"):
        request_id = await write_ahead_of_its_id(world, End(id="", code=code))
        (end,) = await read(client, request_id)
        assert isinstance(end, End)
        assert end.code == code


@scenario_test
async def test_whole_reply_before_the_time_in_its_id_is_found(world: MemoryWorld) -> None:
    request_id = await write_ahead_of_its_id(world, "hel", "lo")
    client = await connect(world)
    assert (await client.result(request_id, timeout_s=2 * LOOK_BACK_S)).text == "hello"


@scenario_test
async def test_reply_that_waits_is_looked_for_before_the_time_in_its_id_once(
    world: MemoryWorld,
) -> None:
    client = await connect(world)
    for lane in range(world.lanes):
        Worker(world, in_lane(lane, "other")).write("before")
    await world.sleep(2 * CLOCK_MARGIN_MS / 1000)
    request_id = client.new_request_id()
    Worker(world, in_lane_of(world, request_id)).write("now")
    reading = world.spawn(client.result(request_id))
    replies = client._listening()
    await world.sleep(3 * LOOK_BACK_S)
    (reply,) = replies._live.all_replies()
    assert reply.start == 0
    Worker(world, request_id).write("hello", "stop")
    assert (await reading).text == "hello"


@scenario_test
async def test_prompt_before_the_time_in_its_id_counts_as_published(world: MemoryWorld) -> None:
    """`kvlane follow` ends at once for an id that was not published."""
    request_id = await id_of_a_clock_that_is_ahead(world)
    client = await connect(world)
    await client.publish(Prompt(id=request_id), subscribe=False)
    await world.sleep(1.2 * CLOCK_MARGIN_MS / 1000)
    for _ in range(8):  # in every partition of `prompts`
        await client.publish(Prompt(id=client.new_request_id()), subscribe=False)
    log = await world.connect("follow")
    assert await is_published(log, world.clock, request_id, within_s=5)
    assert not await is_published(log, world.clock, "another", within_s=5)
