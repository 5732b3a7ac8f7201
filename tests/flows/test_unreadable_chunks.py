"""Tests of chunks that no reader can decode: they end their reply for all readers alike, and no
other."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from kvlane.app.lanes.shared_reads import SharedScanner
from kvlane.streams.codecs import encode
from kvlane.streams.ports import Entry, Unreadable
from kvlane.streams.records import Chunk, End, Fence
from kvlane.streams.request import Request, ResultOptions
from kvlane.streams.responses.reply_stream import Reply
from kvlane.streams.topics import DEAD_LETTERS, REQUESTS, RESPONSES, lane_of
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness
from tests.reply_harness import Worker, connect, in_lane, publish, read, text

NAME = "job-17"
ODD_FIELDS: dict[str, dict[str, Any]] = {
    "token ids": {"token_ids": [None]},
    "text": {"text": 7},
    "log probabilities": {"token_ids": [5], "log_probs": [[[5, "likely"]]]},
    "finish reason": {"finish_reason": ["stop"]},
    "usage": {"finish_reason": "stop", "usage": {"prompt_tokens": None}},
    "data": {"data": [{"at": None}]},
}


def odd(name: str = NAME, **fields: Any) -> Entry:
    """A Chunk with fields of another type."""
    place = {"attempt": 0, "run": "10", "seq": 0, "index": 0}
    value = {"t": "Chunk", "id": name} | place | {"text": 7} | fields
    return Entry(name.encode(), json.dumps(value).encode(), (("t", b"Chunk"),))


def cut(chunk: Entry, after: bytes) -> Entry:
    """A Chunk whose value ends in the middle."""
    assert chunk.value is not None
    return chunk._replace(value=chunk.value[: chunk.value.index(after) + len(after)])


def append(world: MemoryWorld, *entries: Entry, lane: int | None = None) -> None:
    lane = lane_of(NAME, world.lanes) if lane is None else lane
    world.append_raw(RESPONSES, lane, *entries)


@pytest.mark.parametrize("field", ODD_FIELDS)
@scenario_test
async def test_reply_ends_at_its_next_chunk_that_cannot_be_decoded(
    world: MemoryWorld, field: str
) -> None:
    client = await connect(world)
    worker = Worker(world, await publish(client, NAME))
    worker.write("hel")
    reading = world.spawn(read(client, NAME))
    append(world, odd(**{"seq": 1, "index": 3, "text": "lo"} | ODD_FIELDS[field]))
    worker.write("after it", "stop")
    *pieces, end = await asyncio.wait_for(reading, 5)
    assert text(pieces) == "hel"
    assert isinstance(end, End)
    assert end.code == "unreadable"
    assert f"responses[{lane_of(NAME, world.lanes)}]@1" in end.message
    again = await read(await connect(world, "another"), NAME)
    assert [again[-1], text(again)] == [end, "hel"]


@pytest.mark.parametrize(
    "entry",
    [
        odd(attempt=1),
        odd(run="11", seq=1, index=3),
        odd(seq=0),
        odd(id="another", seq=1, index=3),
        Entry(NAME.encode(), b"{", (("t", b"Chunk"),)),
        Entry(NAME.encode(), b"\xff", (("t", b"End"),)),
        Entry(NAME.encode(), b'{"t":"Chunk","id":"job-17"}', (("t", b"Chunk"),)),
        Entry(NAME.encode(), b"{}", (("t", b"Unheard"),)),
        Entry(NAME.encode(), None, ()),
        Entry(None, Unreadable(b"a batch"), ()),
        Entry(b"another", b"{", (("t", b"Chunk"),)),
    ],
)
@scenario_test
async def test_reply_is_whole_beside_a_record_that_is_not_of_its_run(
    world: MemoryWorld, entry: Entry
) -> None:
    client = await connect(world)
    worker = Worker(world, await publish(client, NAME))
    worker.write("hel")
    append(world, entry)
    worker.write("lo", "stop")
    assert text(await read(client, NAME)) == "hello"


@pytest.mark.parametrize(
    "lost",
    [
        Entry(NAME.encode(), b"{", (("t", b"Chunk"),)),
        Entry(NAME.encode(), Unreadable(b"a record of 9000000 bytes"), ()),
        Entry(None, Unreadable(b"the batch of offsets 1 to 1"), ()),
    ],
)
@scenario_test
async def test_reply_that_lacks_a_chunk_ends_if_a_record_could_not_be_read(
    world: MemoryWorld, lost: Entry
) -> None:
    client = await connect(world)
    worker = Worker(world, await publish(client, NAME))
    worker.write("hel")
    append(world, lost)
    worker._seq += 1
    worker.index += 1
    worker.write("o", "stop")
    *pieces, end = await read(client, NAME)
    assert isinstance(end, End)
    assert (text(pieces), end.code) == ("hel", "unreadable")


@scenario_test
async def test_truncated_chunk_of_the_run_ends_its_reply(world: MemoryWorld) -> None:
    client = await connect(world)
    worker = Worker(world, await publish(client, NAME))
    first = worker.write("hel")
    following = Chunk(
        id=NAME, attempt=0, run=first.run, seq=1, index=3, token_ids=(1, 2), text="lo"
    )
    append(world, cut(encode(following, NAME), b'"token_ids":[1,'))
    *_, end = await read(client, NAME)
    assert isinstance(end, End)
    assert end.code == "unreadable"


@scenario_test
async def test_fence_and_end_that_cannot_be_decoded_keep_their_effect(world: MemoryWorld) -> None:
    client = await connect(world)
    Worker(world, await publish(client, NAME)).write("hel")
    fence = {"t": "Fence", "id": NAME, "attempt": 1, "reason": 7}
    append(world, Entry(NAME.encode(), json.dumps(fence).encode(), (("t", b"Fence"),)))
    Worker(world, NAME, attempt=1, index=3).write("lo")
    end = {"t": "End", "id": NAME, "code": 7}
    append(world, Entry(NAME.encode(), json.dumps(end).encode(), (("t", b"End"),)))
    *pieces, last = await read(client, NAME)
    assert isinstance(last, End)
    assert (text(pieces), last.code) == ("hello", "unreadable")


@scenario_test
async def test_reader_that_begins_in_the_middle_reads_the_beginning_first(
    world: MemoryWorld,
) -> None:
    """An unreadable Chunk that is not the first of its run shows that the beginning is earlier."""
    reply = Reply(NAME)
    for offset, entry in enumerate((odd(seq=3, index=3), odd(attempt=1))):
        world.append_raw(RESPONSES, 0, entry)
        reply.apply(world.records(RESPONSES, 0)[offset])
    assert reply.is_missing_start
    assert not reply.is_over


@scenario_test
async def test_gateway_ends_a_response_with_an_error_and_counts_it(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    streamed, whole = harness.chat(stream=True), harness.chat()
    for request in await harness.published(2):
        lane = lane_of(request.id, world.lanes)
        Worker(world, request.id).write("hel")
        append(world, odd(request.id, seq=1, index=3), lane=lane)
    await asyncio.wait_for(streamed.wait_done(), 5)
    await asyncio.wait_for(whole.wait_done(), 5)
    assert streamed.text == "hel"
    assert streamed.events[-2]["error"]["code"] == "unreadable"
    assert (whole.status, whole.error["code"]) == (500, "unreadable")
    page = (await harness.send("GET", "/metrics").wait_done()).content.decode()
    assert 'kvlane_gateway_completions_total{outcome="unreadable"} 2.0' in page


@partial(scenario_test, lanes=1)
async def test_collector_writes_a_result_with_the_error_and_one_dead_letter(
    world: MemoryWorld,
) -> None:
    results = ResultsHarness(world)
    await results.start("c1")
    request = Request(id=NAME, model="demo", token_ids=b"\1\0\0\0", result=ResultOptions())
    world.append(REQUESTS, 0, request, key=NAME)
    Worker(world, NAME).write("hel")
    append(world, odd(seq=1, index=3))
    results.ask("good")
    results.answer("good", "x")
    found = {result.id: result for result in await results.wait_results(2)}
    assert found["good"].status == "completed"
    failed = found[NAME]
    assert failed.error is not None
    assert (failed.status, failed.status_code, failed.error.code) == ("failed", 500, "unreadable")
    (letter,) = world.all_records(DEAD_LETTERS)
    headers = dict(letter.headers)
    assert (headers["origin_topic"], headers["origin_offset"]) == (b"responses", b"1")
    assert (headers["origin_partition"], letter.key) == (b"0", NAME.encode())


@partial(scenario_test, lanes=1)
async def test_failover_continues_nothing_behind_an_unreadable_chunk(world: MemoryWorld) -> None:
    """All readers have ended; the router sees the same."""
    scanner = SharedScanner(await world.connect("router"))
    running = world.spawn(scanner.run())
    worker = Worker(world, NAME)
    worker.write("hel")
    append(world, odd(seq=1, index=3))
    worker.append(Fence(id=NAME, attempt=1))
    shown = await scanner.visible_before(0, NAME, 1, 0, 3)
    assert shown.is_over
    assert shown.end is not None
    assert (shown.text, shown.end.code) == ("hel", "unreadable")
    running.cancel()


@scenario_test
async def test_other_replies_of_the_lane_go_on(world: MemoryWorld) -> None:
    client = await connect(world)
    lane = lane_of(NAME, world.lanes)
    await publish(client, NAME)
    other = Worker(world, await publish(client, in_lane(lane, "other")))
    other.write("hel")
    append(world, odd())
    other.write("lo", "stop")
    assert text(await read(client, other.id)) == "hello"
