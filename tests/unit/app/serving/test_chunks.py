"""Tests of the batches of a worker's writer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

import pytest

from kvlane.app.runtime.process import ProcessContext
from kvlane.app.serving.chunk_writer import (
    MAX_BATCH_BYTES,
    MAX_PENDING_BYTES,
    ChunkWriter,
    FinalChunk,
    StreamBroken,
)
from kvlane.app.text.answer_parts import AnswerPart, arguments_part, name_part, reasoning_part
from kvlane.streams.codecs import AnyRecord, encode
from kvlane.streams.errors import AccessDenied, AppendFailed, RecordTooLarge
from kvlane.streams.ports import Appended
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Chunk, PassthroughDelta, Usage
from kvlane.streams.responses.transcript import data_chars
from kvlane.streams.topics import lane_of

WIDE_TOKENS = [2**32 - 1] * 500
WIDE_TEXT = "\x01" * 500  # six bytes each in JSON


class Sent:
    def __init__(self) -> None:
        self.batches: list[list[Chunk]] = []
        self.calls = 0
        self.fails = False
        self.held: dict[int, asyncio.Event] = {}
        """Lanes whose batches are acknowledged when told to."""
        self.largest = MAX_BATCH_BYTES
        """The longest text that is taken as a batch."""

    def publish_many_once(
        self, topic: str, records: Mapping[int, Sequence[tuple[str, AnyRecord]]]
    ) -> Mapping[int, asyncio.Future[Appended]]:
        self.calls += 1
        return {
            lane: asyncio.ensure_future(self._append(lane, [cast("Chunk", r) for _, r in pairs]))
            for lane, pairs in records.items()
        }

    async def _append(self, lane: int, chunks: list[Chunk]) -> Appended:
        if lane in self.held:
            await self.held[lane].wait()
        await asyncio.sleep(0)
        if self.fails:
            raise AppendFailed("no answer")
        if len(chunks[0].text) > self.largest:
            raise RecordTooLarge(f"{len(chunks[0].text)} characters")
        self.batches.append(chunks)
        return Appended(lane, 0, 0)


async def test_batch_stays_below_the_limit_of_the_log() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    writers = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1)
    streams = [writers.open(f"{n:0200}", 0, str(2**64 - 1), index=0, chars=0) for n in range(300)]
    for stream in streams:
        stream.release()
    await asyncio.gather(*(s.push(WIDE_TOKENS, WIDE_TEXT) for s in streams))
    await asyncio.gather(*(s.finish(FinalChunk("stop", None)) for s in streams))
    sizes = []
    for batch in sent.batches:
        entries = [encode(chunk, chunk.id) for chunk in batch]
        sizes.append(sum(len(e.key or b"") + len(e.value or b"") + 100 for e in entries))
    assert len(sizes) > 2
    assert max(sizes) <= MAX_BATCH_BYTES
    tokens = sum(len(chunk.token_ids) for batch in sent.batches for chunk in batch)
    assert tokens == 300 * len(WIDE_TOKENS)


async def test_broken_stream_accepts_nothing_more() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    stream = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1).open(
        "a", 0, "1", index=0, chars=0
    )
    stream.release()
    sent.fails = True
    await stream.push([1], "a")
    await asyncio.sleep(0.01)
    assert stream.is_broken
    sent.fails = False
    with pytest.raises(StreamBroken):
        await stream.push([2], "b")
    with pytest.raises(StreamBroken):
        await stream.finish(FinalChunk("stop", None))
    await asyncio.sleep(0.01)
    assert sent.batches == []


async def test_chunk_that_no_record_holds_breaks_its_own_run_only() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    writers = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1)
    large, other = (writers.open(name, 0, "1", index=0, chars=0) for name in ("a", "b"))
    for stream in (large, other):
        stream.release()
    await large.push((), "a" * (sent.largest + 1))
    with pytest.raises(StreamBroken):
        await large.finish(FinalChunk("stop", None))
    await other.push([1], "b")
    await other.finish(FinalChunk("stop", None))
    assert ctx.error is None
    assert {chunk.id for batch in sent.batches for chunk in batch} == {"b"}


@pytest.mark.parametrize(
    "last",
    [
        FinalChunk("stop", Usage(details={"a": "x" * 700_000})),
        FinalChunk("error", None, invalid_reason="x" * 200_000),
        FinalChunk("stop", None, stop_reason="x" * 200_000),
    ],
)
async def test_fields_at_the_end_count_for_the_size_of_their_chunk(last: FinalChunk) -> None:
    sent, ctx = Sent(), ProcessContext("t")
    writers = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1)
    streams = [writers.open(name, 0, "1", index=0, chars=0) for name in ("a", "b", "c")]
    for stream in streams:
        stream.release()
    ends = (FinalChunk("stop", None), last, FinalChunk("stop", None))
    await asyncio.gather(*(s.finish(end) for s, end in zip(streams, ends, strict=True)))
    alone = [batch for batch in sent.batches if any(chunk.id == "b" for chunk in batch)]
    assert [len(batch) for batch in alone] == [1]


async def test_tokens_not_generated_by_the_engine_are_left_out() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    writers = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1, with_tokens=False)
    stream = writers.open("a", 0, "1", index=0, chars=0)
    stream.release()
    await stream.push([1, 2], "ab")
    await stream.finish(FinalChunk("stop", None), "c")
    chunks = [chunk for batch in sent.batches for chunk in batch]
    assert "".join(chunk.text for chunk in chunks) == "abc"
    assert [(chunk.index, chunk.token_ids) for chunk in chunks] == [(0, ())] * len(chunks)
    assert chunks[-1].chars == 3


async def test_other_fields_keep_their_positions_in_the_text() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    writers = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1, with_tokens=False)
    stream = writers.open("a", 0, "1", index=0, chars=0)
    await stream.push((), "ab", data=[PassthroughDelta(delta={"n": 1})])
    await stream.push((), "", data=[PassthroughDelta(delta={"n": 2})])
    stream.release()
    await asyncio.sleep(0.01)
    await stream.push((), "c")
    await stream.push((), "d", data=[PassthroughDelta(at=1, choice={"n": 3})])
    await stream.finish(FinalChunk("stop", None))
    chunks = [chunk for batch in sent.batches for chunk in batch]
    assert "".join(chunk.text for chunk in chunks) == "abcd"
    asides = [(a.at, a.delta or a.choice) for chunk in chunks for a in chunk.data]
    assert asides == [(0, {"n": 1}), (2, {"n": 2}), (4, {"n": 3})]


async def test_adjacent_data_of_one_kind_is_one_item_of_a_chunk() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    stream = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1).open(
        "a", 0, "1", index=0, chars=0
    )
    parts = [
        *(reasoning_part("a"), reasoning_part("b"), AnswerPart("text"), reasoning_part("c")),
        *(name_part("a", 0, "f"), arguments_part(0, "{"), arguments_part(0, "}")),
        *(arguments_part(1, "["), AnswerPart(delta={"n": 1}), AnswerPart(delta={"n": 1})),
    ]
    for part in parts:
        await stream.push([1], part.content, data=() if part.delta is None else [part])
    stream.release()
    await stream.finish(FinalChunk("stop", None))
    (chunk,) = (chunk for batch in sent.batches for chunk in batch if chunk.data)
    joined = [parts[4], arguments_part(0, "{}"), *parts[7:]]
    whole = [(0, reasoning_part("ab").delta), (4, reasoning_part("c").delta)]
    assert [(item.at, item.delta) for item in chunk.data] == [
        *whole,
        *((4, part.delta) for part in joined),
    ]
    chars = data_chars(part.delta or {} for part in parts)
    assert data_chars(item.delta for item in chunk.data) == chars


async def test_waiting_output_is_also_bounded_in_bytes() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    writers = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1, with_tokens=False)
    for text, data in (
        ("x" * MAX_PENDING_BYTES, []),
        ("", [PassthroughDelta(delta={"x": "y" * MAX_PENDING_BYTES})]),
    ):
        stream = writers.open("a", 0, "1", index=0, chars=0)
        pushing = asyncio.create_task(stream.push((), text, data=data))
        await asyncio.sleep(0.01)
        assert not pushing.done()
        stream.release()
        await pushing
    sizes = [len(encode(chunk, chunk.id).value or b"") for batch in sent.batches for chunk in batch]
    assert max(sizes) < 2 * MAX_PENDING_BYTES


async def test_all_outputs_of_one_step_are_appended_by_one_call() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    writer = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=4)
    streams = [writer.open(f"r-{n}", 0, "1", index=0, chars=0) for n in range(20)]
    for stream in streams:
        stream.release()
        await stream.push([1], "a")
    await asyncio.sleep(0.01)
    assert sent.calls == 1
    assert len(sent.batches) == len({stream.lane for stream in streams}) > 1
    assert sum(map(len, sent.batches)) == 20


async def test_waiting_lane_blocks_no_other() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    writer = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=2)
    ids = {lane_of(f"r-{n}", 2): f"r-{n}" for n in range(20)}
    slow, quick = (writer.open(ids[lane], 0, "1", index=0, chars=0) for lane in (0, 1))
    sent.held[0] = asyncio.Event()
    for stream in (slow, quick):
        stream.release()
        await stream.push([1], "a")
    for _ in range(3):
        await asyncio.sleep(0.01)
        await slow.push([2], "b")
        await quick.push([2], "b")
    await quick.finish(FinalChunk("stop", None))
    assert {chunk.id for batch in sent.batches for chunk in batch} == {ids[1]}
    sent.held[0].set()
    await slow.finish(FinalChunk("stop", None))
    of_slow = [chunk for batch in sent.batches for chunk in batch if chunk.id == ids[0]]
    assert [chunk.text for chunk in of_slow[:1]] == ["a"]
    assert "".join(chunk.text for chunk in of_slow) == "abbb"
    assert len(of_slow) <= 3


async def test_error_without_a_remedy_by_retry_ends_the_process() -> None:
    sent, ctx = Sent(), ProcessContext("t")

    async def refused(lane: int, chunks: list[Chunk]) -> Appended:
        raise AccessDenied("responses")

    sent._append = refused  # type: ignore[method-assign]
    stream = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1).open(
        "a", 0, "1", index=0, chars=0
    )
    stream.release()
    await stream.push([1], "a")
    with pytest.raises(StreamBroken):
        await stream.finish(FinalChunk("stop", None))
    assert isinstance(ctx.error, AccessDenied)


async def test_idle_lane_has_no_task() -> None:
    sent, ctx = Sent(), ProcessContext("t")
    stream = ChunkWriter(cast("RecordPublisher", sent), ctx, lanes=1).open(
        "a", 0, "1", index=0, chars=0
    )
    stream.release()
    await stream.push([1], "a")
    await stream.finish(FinalChunk("stop", None))
    await asyncio.sleep(0.01)
    assert len(ctx._tasks) == 0
