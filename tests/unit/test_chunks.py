"""How a lane's writer cuts batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from app.lifetime import Lifetime
from app.serving.chunks import BATCH_BYTES, PENDING_BYTES, ChunkWriters, Last, StreamBroken
from streams.codecs import AnyRecord, encode
from streams.errors import AppendFailed
from streams.outbox import Outbox
from streams.records import Aside, Chunk

WIDE_TOKENS = [2**32 - 1] * 500
WIDE_TEXT = "\x01" * 500  # six bytes each in JSON


class Sent:
    """Takes batches; fails when told to."""

    def __init__(self) -> None:
        self.batches: list[list[Chunk]] = []
        self.fails = False

    async def send_batch(
        self, topic: str, partition: int, records: Sequence[tuple[str, AnyRecord]]
    ) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise AppendFailed("no answer")
        self.batches.append([cast("Chunk", record) for _, record in records])


async def test_a_batch_stays_below_what_the_log_takes() -> None:
    sent, life = Sent(), Lifetime("t")
    writers = ChunkWriters(cast("Outbox", sent), life, lanes=1)
    streams = [writers.open(f"{n:0200}", 0, str(2**64 - 1), index=0, chars=0) for n in range(300)]
    for stream in streams:
        stream.release()
    await asyncio.gather(*(s.push(WIDE_TOKENS, WIDE_TEXT) for s in streams))
    await asyncio.gather(*(s.finish(Last("stop", None)) for s in streams))
    sizes = []
    for batch in sent.batches:
        entries = [encode(chunk, chunk.id) for chunk in batch]
        sizes.append(sum(len(e.key or b"") + len(e.value or b"") + 100 for e in entries))
    assert len(sizes) > 2
    assert max(sizes) <= BATCH_BYTES
    tokens = sum(len(chunk.token_ids) for batch in sent.batches for chunk in batch)
    assert tokens == 300 * len(WIDE_TOKENS)


async def test_a_broken_stream_takes_nothing_more() -> None:
    sent, life = Sent(), Lifetime("t")
    stream = ChunkWriters(cast("Outbox", sent), life, lanes=1).open("a", 0, "1", index=0, chars=0)
    stream.release()
    sent.fails = True
    await stream.push([1], "a")
    await asyncio.sleep(0.01)
    assert stream.broken
    sent.fails = False
    with pytest.raises(StreamBroken):
        await stream.push([2], "b")
    with pytest.raises(StreamBroken):
        await stream.finish(Last("stop", None))
    await asyncio.sleep(0.01)
    assert sent.batches == []


async def test_tokens_that_are_not_the_engines_own_are_kept_back() -> None:
    sent, life = Sent(), Lifetime("t")
    writers = ChunkWriters(cast("Outbox", sent), life, lanes=1, with_tokens=False)
    stream = writers.open("a", 0, "1", index=0, chars=0)
    stream.release()
    await stream.push([1, 2], "ab")
    await stream.finish(Last("stop", None), "c")
    chunks = [chunk for batch in sent.batches for chunk in batch]
    assert "".join(chunk.text for chunk in chunks) == "abc"
    assert [(chunk.index, chunk.token_ids) for chunk in chunks] == [(0, ())] * len(chunks)
    assert chunks[-1].chars == 3


async def test_asides_keep_their_places_in_the_text() -> None:
    sent, life = Sent(), Lifetime("t")
    writers = ChunkWriters(cast("Outbox", sent), life, lanes=1, with_tokens=False)
    stream = writers.open("a", 0, "1", index=0, chars=0)
    await stream.push((), "ab", data=[Aside(delta={"n": 1})])
    await stream.push((), "", data=[Aside(delta={"n": 2})])
    stream.release()
    await asyncio.sleep(0.01)
    await stream.push((), "c")
    await stream.push((), "d", data=[Aside(at=1, choice={"n": 3})])
    await stream.finish(Last("stop", None))
    chunks = [chunk for batch in sent.batches for chunk in batch]
    assert "".join(chunk.text for chunk in chunks) == "abcd"
    asides = [(a.at, a.delta or a.choice) for chunk in chunks for a in chunk.data]
    assert asides == [(0, {"n": 1}), (2, {"n": 2}), (4, {"n": 3})]


async def test_what_waits_is_bounded_in_bytes_too() -> None:
    sent, life = Sent(), Lifetime("t")
    writers = ChunkWriters(cast("Outbox", sent), life, lanes=1, with_tokens=False)
    for text, data in (("x" * PENDING_BYTES, []), ("", [Aside(delta={"x": "y" * PENDING_BYTES})])):
        stream = writers.open("a", 0, "1", index=0, chars=0)
        pushing = asyncio.create_task(stream.push((), text, data=data))
        await asyncio.sleep(0.01)
        assert not pushing.done()
        stream.release()
        await pushing
    sizes = [len(encode(chunk, chunk.id).value or b"") for batch in sent.batches for chunk in batch]
    assert max(sizes) < 2 * PENDING_BYTES


async def test_an_idle_lane_has_no_task() -> None:
    sent, life = Sent(), Lifetime("t")
    stream = ChunkWriters(cast("Outbox", sent), life, lanes=1).open("a", 0, "1", index=0, chars=0)
    stream.release()
    await stream.push([1], "a")
    await stream.finish(Last("stop", None))
    await asyncio.sleep(0.01)
    assert life.tasks == 0
