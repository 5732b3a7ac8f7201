"""Tests of the reply stream."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from kvlane.streams.codecs import encode
from kvlane.streams.errors import LogClosed
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Entry
from kvlane.streams.records import Chunk, End, Fence, LogProb, Usage
from kvlane.streams.responses.reply_stream import MAX_PENDING_PIECES, Reply, merge_chunks


def chunk(
    seq: int, text: str = "x", finish_reason: str | None = None, usage: Usage | None = None
) -> Chunk:
    return Chunk(
        id="job-17",
        attempt=0,
        run="1",
        seq=seq,
        index=seq,
        token_ids=(seq,),
        text=text,
        chars=seq + 1,
        finish_reason=finish_reason,
        usage=usage,
    )


def at(offset: int, entry: Entry) -> MemoryRecord:
    return MemoryRecord("responses", 0, offset, 0, *entry)


def feed(reply: Reply, *records: Chunk | Fence | End, offset: int = 0) -> None:
    for number, record in enumerate(records):
        reply.apply(at(offset + number, encode(record, "job-17")))


async def test_pieces_come_in_order() -> None:
    reply = Reply("job-17")
    feed(reply, chunk(0), chunk(1))
    assert [await reply.next_piece(1), await reply.next_piece(1)] == [chunk(0), chunk(1)]


async def test_waiting_reader_is_woken() -> None:
    reply = Reply("job-17")
    waiting = asyncio.create_task(reply.next_piece(10))
    await asyncio.sleep(0)
    feed(reply, chunk(0))
    assert await waiting == chunk(0)


async def test_waiting_has_a_deadline() -> None:
    with pytest.raises(TimeoutError):
        await Reply("job-17").next_piece(0.01)


async def test_later_wait_may_be_the_shorter_one_or_the_longer_one() -> None:
    reply = Reply("job-17")
    for seq, timeout_s in enumerate((30, 0.02, 30)):
        waiting = asyncio.create_task(reply.next_piece(timeout_s))
        await asyncio.sleep(0)
        feed(reply, chunk(seq), offset=seq)
        assert await waiting == chunk(seq)
    waiting = asyncio.create_task(reply.next_piece(0.2))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "a timer of an earlier wait ended this one"
    with pytest.raises(TimeoutError):
        await waiting


async def test_all_queued_pieces_are_taken_together() -> None:
    reply = Reply("job-17")
    feed(reply, chunk(0), chunk(1))
    assert await reply.next_pieces(1) == [chunk(0), chunk(1)]
    waiting = asyncio.create_task(reply.next_pieces(1))
    await asyncio.sleep(0)
    feed(reply, chunk(2), offset=2)
    assert await waiting == [chunk(2)]


async def test_sink_gets_the_pieces_up_to_the_first_that_it_refuses() -> None:
    reply = Reply("job-17")
    taken: list[Chunk | End] = []

    def sink(piece: Chunk | End) -> bool:
        taken.append(piece)
        return len(taken) != 2

    waiting = asyncio.create_task(reply.next_pieces(10, sink))
    await asyncio.sleep(0)
    feed(reply, chunk(0), chunk(1), chunk(2))
    assert taken == [chunk(0), chunk(1)]
    assert await waiting == [chunk(1), chunk(2)]
    feed(reply, chunk(3), offset=3)
    assert await reply.next_pieces(1, sink) == [chunk(3)]
    assert len(taken) == 2, "nobody waited"


async def test_sink_is_not_called_after_its_task_is_cancelled() -> None:
    reply = Reply("job-17")
    waiting = asyncio.create_task(reply.next_pieces(10, lambda _: True))
    await asyncio.sleep(0)
    waiting.cancel()
    feed(reply, chunk(0))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await reply.next_pieces(1) == [chunk(0)]


async def test_wait_ends_in_time_whatever_the_sink_took() -> None:
    reply = Reply("job-17")
    waiting = asyncio.create_task(reply.next_pieces(0.05, lambda _: True))
    await asyncio.sleep(0)
    feed(reply, chunk(0))
    with pytest.raises(TimeoutError):
        await waiting


async def test_error_of_a_sink_fails_its_reply() -> None:
    reply = Reply("job-17")
    waiting = asyncio.create_task(reply.next_pieces(10, lambda _: bool(1 / 0)))
    await asyncio.sleep(0)
    feed(reply, chunk(0))
    with pytest.raises(ZeroDivisionError):
        await waiting
    assert reply.is_over


async def test_abandoned_reply_leaves_no_timer() -> None:
    reply = Reply("job-17")
    waiting = asyncio.create_task(reply.next_piece(600))
    await asyncio.sleep(0)
    reply.cancel_timer()
    assert reply._timer is not None, "a read waits"
    feed(reply, chunk(0))
    await waiting
    reply.cancel_timer()
    assert reply._timer is None


def test_record_below_the_start_is_not_part_of_the_reply() -> None:
    reply = Reply("job-17", start=5)
    feed(reply, chunk(0, "old", "stop"), offset=4)
    assert not reply.is_over


def test_record_that_is_fed_again_counts_once() -> None:
    reply = Reply("job-17")
    for _ in range(2):
        reply.apply(at(0, Entry(b"job-17", b"{", (("t", b"Chunk"),))))
    assert reply.malformed == 1


async def test_visible_text_is_delivered_before_the_error() -> None:
    reply = Reply("job-17")
    feed(reply, chunk(0))
    reply.fail(LogClosed("gone"))
    assert await reply.next_piece(1) == chunk(0)
    with pytest.raises(LogClosed):
        await reply.next_piece(1)


async def test_reply_takes_no_records_after_an_error() -> None:
    reply = Reply("job-17")
    reply.fail(LogClosed("gone"))
    feed(reply, chunk(0))
    with pytest.raises(LogClosed):
        await reply.next_piece(1)


async def test_whole_reply_does_not_fail() -> None:
    reply = Reply("job-17")
    feed(reply, chunk(0, finish_reason="stop"))
    reply.fail(LogClosed("gone"))
    assert await reply.next_piece(1) == chunk(0, finish_reason="stop")


def test_reply_without_its_beginning_is_headless() -> None:
    reply = Reply("job-17")
    feed(reply, chunk(3))
    assert reply.is_missing_start


def test_hole_after_visible_text_is_not_headless() -> None:
    reply = Reply("job-17")
    feed(reply, chunk(0), chunk(3))
    assert not reply.is_missing_start


def test_reply_whose_fence_was_not_read_is_headless() -> None:
    reply = Reply("job-17")
    feed(reply, replace(chunk(0), attempt=1, index=2))
    assert reply.is_missing_start
    reply.restart(0)
    assert not reply.is_missing_start


def test_late_chunk_of_an_abandoned_run_does_not_mark_the_start_as_missing() -> None:
    reply = Reply("job-17")
    feed(reply, Fence(id="job-17", attempt=1), chunk(0))
    assert not reply.is_missing_start


async def test_headless_reply_can_begin_again() -> None:
    reply = Reply("job-17", start=7)
    feed(reply, chunk(3), offset=7)
    reply.restart(4)
    feed(reply, chunk(0), chunk(1), offset=4)
    assert not reply.is_missing_start
    assert [await reply.next_piece(1), await reply.next_piece(1)] == [chunk(0), chunk(1)]


@pytest.mark.parametrize(
    "pieces",
    [MAX_PENDING_PIECES - 1, MAX_PENDING_PIECES, MAX_PENDING_PIECES + 1, 5 * MAX_PENDING_PIECES],
)
async def test_number_of_waiting_pieces_is_bounded(pieces: int) -> None:
    reply = Reply("job-17")
    feed(reply, *(chunk(seq, f"{seq} ") for seq in range(pieces)))
    feed(reply, End(id="job-17", code="deadline"), offset=pieces)
    taken = []
    while not isinstance(piece := await reply.next_piece(1), End):
        taken.append(piece)
    assert len(taken) <= MAX_PENDING_PIECES
    assert "".join(piece.text for piece in taken) == "".join(f"{seq} " for seq in range(pieces))


def test_joined_chunks_begin_with_the_first_and_are_otherwise_the_last() -> None:
    usage = Usage(prompt_tokens=3)
    parts = [chunk(4, "a"), chunk(5, "b", usage=usage), chunk(6, "c", "stop")]
    parts[1] = replace(parts[1], log_probs=((LogProb(5, -0.5),),))
    parts[2] = replace(parts[2], log_probs=((LogProb(6, -0.25),),), stop_reason=6)
    assert merge_chunks(parts) == Chunk(
        id="job-17",
        attempt=0,
        run="1",
        seq=6,
        index=4,
        token_ids=(4, 5, 6),
        text="abc",
        chars=7,
        finish_reason="stop",
        usage=usage,
        stop_reason=6,
        log_probs=((), (LogProb(5, -0.5),), (LogProb(6, -0.25),)),
    )
