"""Tests of a program that publishes requests and reads their replies, on the log in memory."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from kvlane.app.commands.request_commands import write_stream
from kvlane.streams.client import ReplyResult
from kvlane.streams.errors import AppendFailed, RecordTooLarge
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Chunk, DryRunResult, End, Fence, Usage
from kvlane.streams.responses.reply_reader import IDLE_LANE_TTL_S
from kvlane.streams.responses.reply_stream import MAX_PENDING_PIECES
from kvlane.streams.topics import BATCH, PROMPTS, RESPONSES, lane_of
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker, begin_reply, connect, publish, read, text

# --- publishing -----------------------------------------------------------------------------------


@scenario_test
async def test_prompt_is_in_the_log_when_publish_returns(world: MemoryWorld) -> None:
    client = await connect(world)
    prompt = Prompt(id="job-17", kind="tokens", body={"token_ids": [104, 258]}, deadline_s=30)
    assert await client.publish(prompt) == "job-17"
    (record,) = world.records(PROMPTS, key="job-17")
    assert record.key == b"job-17"
    assert Prompt.model_validate_json(record.value or b"") == prompt


@scenario_test
async def test_unacknowledged_prompt_is_published_again(world: MemoryWorld) -> None:
    client = await connect(world)
    world.faults.next_fates(PROMPTS, AppendFate.LOST, AppendFate.UNREPORTED)
    await publish(client, "job-17")
    assert len(world.records(PROMPTS, key="job-17")) == 2


@scenario_test
async def test_publishing_fails_at_its_deadline(world: MemoryWorld) -> None:
    client = await connect(world)
    await publish(client, "warm")
    world.faults.next_fates(PROMPTS, *[AppendFate.LOST] * 1000)
    before = world.clock.now()
    with pytest.raises(AppendFailed):
        await client.publish(Prompt(id="warm"), timeout_s=5)
    assert 5 <= world.clock.now() - before < 7


@scenario_test
async def test_prompt_that_is_too_large_is_refused_at_once(world: MemoryWorld) -> None:
    client = await connect(world)
    with pytest.raises(RecordTooLarge):
        await client.publish(Prompt(id="a", body={"prompt": "x" * 9_000_000}))


@scenario_test
async def test_cancel_follows_its_prompt_on_the_same_partition(world: MemoryWorld) -> None:
    client = await connect(world)
    await publish(client, "job-17")
    await client.cancel("job-17")
    prompt, cancel = world.records(PROMPTS, key="job-17")
    assert Prompt.model_validate_json(prompt.value or b"").kind == "chat"
    assert Prompt.model_validate_json(cancel.value or b"") == Prompt(id="job-17", kind="cancel")


@scenario_test
async def test_cancel_of_a_batch_prompt_is_behind_it_and_in_prompts(world: MemoryWorld) -> None:
    client = await connect(world)
    await client.publish(Prompt(id="job-17", service_class="batch"), subscribe=False)
    await client.cancel("job-17", service_class="batch")
    cancel = Prompt(id="job-17", kind="cancel")
    prompt, last = (
        Prompt.model_validate_json(r.value or b"") for r in world.records(BATCH, key="job-17")
    )
    assert (prompt.kind, last) == ("chat", cancel)
    [other] = world.records(PROMPTS, key="job-17")
    assert Prompt.model_validate_json(other.value or b"") == cancel


@scenario_test
async def test_ids_rise(world: MemoryWorld) -> None:
    client = await connect(world)
    ids = [client.new_request_id() for _ in range(100)]
    assert ids == sorted(set(ids))


# --- reading --------------------------------------------------------------------------------------


@scenario_test
async def test_stream_gives_every_piece_to_the_end(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    reading = world.spawn(read(client, worker.id))
    written = []
    for part, reason in (("he", None), ("ll", None), ("o", "stop")):
        written.append(worker.write(part, reason))
        await world.sleep(0.1)
    assert await reading == written


@scenario_test
async def test_piece_is_delivered_as_soon_as_it_is_written(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    async with aclosing(client.stream(worker.id)) as stream:
        before = world.clock.now()
        worker.write("he")
        await anext(stream)
        assert world.clock.now() == before


@scenario_test
async def test_stream_after_publish_misses_no_records(world: MemoryWorld) -> None:
    client = await connect(world)
    request_id = await publish(client)
    Worker(world, request_id).write("hello", "stop")
    await world.sleep(120)
    assert text(await read(client, request_id)) == "hello"


@scenario_test
async def test_reply_that_starts_before_publish_returns_is_whole(world: MemoryWorld) -> None:
    """The broker is slow to acknowledge; the worker is not slow to answer."""
    client = await connect(world)
    world.faults.slow["append"] = 2.0
    publishing = world.spawn(publish(client, "job-17"))
    await world.wait_until(lambda: bool(world.records(PROMPTS, key="job-17")))
    worker = Worker(world, "job-17")
    worker.write("hel")
    await world.sleep(1)
    worker.write("lo", "stop")
    await publishing
    assert text(await read(client, "job-17")) == "hello"


@scenario_test
async def test_many_streams_at_once_do_not_mix(world: MemoryWorld) -> None:
    client = await connect(world)
    ids = [await publish(client) for _ in range(200)]
    reading = [world.spawn(client.result(request_id)) for request_id in ids]
    workers = [Worker(world, request_id) for request_id in ids]
    for k in range(5):
        for number, worker in enumerate(workers):
            worker.write(f"{number}.{k} ", "stop" if k == 4 else None)
        await world.sleep(0.01)
    answers = await asyncio.gather(*reading)
    assert [a.text for a in answers] == [
        "".join(f"{number}.{k} " for k in range(5)) for number in range(200)
    ]


@scenario_test
async def test_fail_over_shows_each_token_once(world: MemoryWorld) -> None:
    client = await connect(world)
    request_id = await publish(client)
    first = Worker(world, request_id)
    first.write("he")
    first.append(Fence(id=request_id, attempt=1))
    first.write("XX", "stop")
    Worker(world, request_id, attempt=1, index=2).write("llo", "stop")
    assert text(await read(client, request_id)) == "hello"


@scenario_test
async def test_end_is_the_last_piece(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.write("he")
    end = End(id=worker.id, code="deadline", message="too slow")
    worker.append(end)
    assert (await read(client, worker.id))[1:] == [end]


@scenario_test
async def test_only_lanes_in_use_are_read(world: MemoryWorld) -> None:
    client = await connect(world)
    replies = client._listening()
    assert not replies._live.lanes
    request_id = await publish(client)
    assert set(replies._live.lanes) == {lane_of(request_id, world.lanes)}


@scenario_test
async def test_lane_is_left_some_time_after_its_last_stream(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.write("hello", "stop")
    await client.result(worker.id)
    lanes = client._listening()._live.lanes
    await world.sleep(IDLE_LANE_TTL_S - 1)
    assert lanes
    await world.sleep(2)
    assert not lanes
    again = Worker(world, await publish(client))
    again.write("hello", "stop")
    assert (await client.result(again.id)).text == "hello"


@scenario_test
async def test_closed_stream_releases_its_state(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.write("he")
    async with aclosing(client.stream(worker.id)) as stream:
        await anext(stream)
    assert not client._unclaimed
    assert not client._listening()._live.all_replies()


@scenario_test
async def test_abandoned_stream_can_be_resumed(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.write("he")
    async with aclosing(client.stream(worker.id)) as stream:
        await anext(stream)
    worker.write("ll")
    worker.write("o", "stop")
    assert text(await read(client, worker.id, from_token=2)) == "llo"


# --- results --------------------------------------------------------------------------------------


@scenario_test
async def test_result_is_the_whole_answer(world: MemoryWorld) -> None:
    client = await connect(world)
    request_id = await publish(client)
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    chunk = Chunk(id=request_id, attempt=0, run="1", seq=0, index=0, token_ids=(104,), text="h")
    last = Chunk(
        id=request_id,
        attempt=0,
        run="1",
        seq=1,
        index=1,
        token_ids=(105,),
        text="i",
        finish_reason="length",
        usage=usage,
    )
    lane = lane_of(request_id, world.lanes)
    world.append(RESPONSES, lane, chunk, last, key=request_id)
    assert await client.result(request_id) == ReplyResult("hi", (104, 105), "length", usage=usage)


@scenario_test
async def test_result_has_the_code_of_an_end_by_a_router(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.write("he")
    worker.append(End(id=worker.id, code="queue_full", message="32 wait", retry_after_s=1.5))
    assert await client.result(worker.id) == ReplyResult(
        "he", (104, 101), None, "queue_full", "32 wait", 1.5
    )


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (ReplyResult("a", (1,), "stop"), None),
        (ReplyResult("a", (1,), "tool_calls"), None),
        (ReplyResult("a", (1,), "stop", "stop"), None),
        (ReplyResult("", (), None, "queue_full", "32 wait"), "queue_full: 32 wait"),
        (ReplyResult("a", (1,), "cancelled"), "cancelled"),
        (ReplyResult("", (), "error", message="n is 0"), "error: n is 0"),
        (ReplyResult("", (), "error"), "error"),
    ],
)
def test_reply_that_is_not_whole_has_an_error(reply: ReplyResult, error: str | None) -> None:
    assert reply.error == error


@scenario_test
async def test_dry_run_returns_the_selected_worker(world: MemoryWorld) -> None:
    client = await connect(world)
    placed = DryRunResult(worker_id="w1", dp_rank=1, token_ids=(104, 258))
    for name in ("a", "b"):
        worker = Worker(world, await publish(client, name))
        worker.append(End(id=worker.id, code="stop", placed=placed))
    assert (await client.result("a")).placed == placed
    got: list[str] = []
    assert await write_stream(client, "b", got.append, timeout_s=5) == ""
    assert got == ["w1 1"]


@scenario_test
async def test_refusal_of_an_engine_is_written_with_its_reason(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.append(
        Chunk(
            id=worker.id, attempt=0, run="1", seq=0, index=0, finish_reason="error",
            invalid="stop: too many",
        )
    )  # fmt: skip
    assert await write_stream(client, worker.id, print, timeout_s=5) == "error: stop: too many"
    assert (await client.result(worker.id)).error == "error: stop: too many"


@scenario_test
async def test_answer_whose_last_chunk_was_lost_ends_normally(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.write("he")
    worker.append(End(id=worker.id, code="stop", usage=Usage(completion_tokens=2)))
    answer = await client.result(worker.id)
    assert (answer.text, answer.finish_reason) == ("he", "stop")
    assert answer.usage == Usage(completion_tokens=2)


@scenario_test
async def test_waiting_ends_at_its_deadline_and_can_be_resumed(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    worker.write("he")
    with pytest.raises(TimeoutError, match=r"no end within 30 s, 2 tokens"):
        await client.result(worker.id, timeout_s=30)
    worker.write("llo", "stop")
    assert (await client.result(worker.id, timeout_s=30)).text == "hello"


# --- a slow consumer ------------------------------------------------------------------------------


@scenario_test
async def test_slow_consumer_gets_all_the_text_in_fewer_pieces(world: MemoryWorld) -> None:
    client = await connect(world)
    slow, quick = Worker(world, await publish(client)), Worker(world, await publish(client))
    async with aclosing(client.stream(slow.id)) as stream:
        slow.write("a")
        pieces = [await anext(stream)]
        expected = "a"
        for number in range(20 * MAX_PENDING_PIECES):
            expected += slow.write(f"{number} ").text
        quick.write("hello", "stop")
        assert (await client.result(quick.id, timeout_s=1)).text == "hello"
        slow.write("end", "stop")
        await world.sleep(1)
        pieces += [piece async for piece in stream]
    assert text(pieces) == expected + "end"
    assert len(pieces) <= MAX_PENDING_PIECES + 1
    assert isinstance(pieces[-1], Chunk)
    assert pieces[-1].finish_reason == "stop"


@scenario_test
async def test_joined_pieces_follow_each_other_without_a_gap(world: MemoryWorld) -> None:
    client, worker = await begin_reply(world)
    for number in range(3 * MAX_PENDING_PIECES):
        worker.write(f"{number} ")
    worker.append(End(id=worker.id, code="deadline"))
    await world.sleep(1)
    index = 0
    for piece in (await read(client, worker.id))[:-1]:
        assert isinstance(piece, Chunk)
        assert piece.index == index
        index += len(piece.token_ids)
        assert piece.chars == index
    assert index == worker.index
