"""Tests of events that the reader of the log writes to the socket, beside events that the task
sends."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl

from kvlane.app.http.openai import response_writer
from kvlane.app.http.openai.event_encoder import ResponseOptions
from kvlane.app.http.openai.logprobs import TokenText
from kvlane.app.http.openai.merged_replies import MergedReplies
from kvlane.app.http.openai.openai_responses import Choice, ResponseHeader
from kvlane.app.http.openai.response_writer import CompletionResponse
from kvlane.app.http.server.exchange import BodyWriter, Exchange, body_writer_of
from kvlane.app.http.server.http_server import UvicornServer
from kvlane.app.metrics.gateway_metrics import GatewayMetrics
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import encode
from kvlane.streams.errors import LogClosed
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.records import Chunk, End, LogProb, PassthroughDelta, Usage
from kvlane.streams.responses.reply_stream import MAX_PENDING_PIECES, Reply

METRICS = GatewayMetrics()
ID = "job-17"


class Transport:
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.writes = 0

    def write(self, data: bytes) -> None:
        self.written += data
        self.writes += 1

    def close(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Connection:
    """One streamed response on uvicorn's own cycle, with a reply that is fed by hand."""

    def __init__(self, options: ResponseOptions, choice: Choice, *, pushes: bool = True) -> None:
        self.reply = Reply(ID)
        self._offset = 0
        self.transport = Transport()
        transport = cast("asyncio.Transport", self.transport)
        self.flow = FlowControl(transport)
        self.scope: dict[str, Any] = {"type": "http", "method": "POST", "http_version": "1.1"}
        logger = logging.getLogger("test")
        self.cycle = Exchange(
            scope=cast("Any", self.scope),
            transport=transport,
            flow=self.flow,
            logger=logger,
            access_logger=logger,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=lambda: None,
        )
        if pushes:
            BodyWriter(self.cycle).offer(self.scope)
        self.replies = MergedReplies([self.reply], detached=False)
        response = CompletionResponse(
            options, [choice], self._joined(), SystemClock(), METRICS, 600.0, 0.0
        )
        receive, send = cast("Any", self.cycle.receive), cast("Any", self.cycle.send)
        self.task = asyncio.create_task(response(self.scope, receive, send))

    @asynccontextmanager
    async def _joined(self) -> AsyncIterator[MergedReplies]:
        yield self.replies

    def feed(self, *records: Chunk | End) -> None:
        for record in records:
            entry = encode(record, ID)
            self.reply.apply(MemoryRecord("responses", 0, self._offset, 0, *entry))
            self._offset += 1

    async def rest(self, turns: int = 5) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def finish(self) -> Events:
        self.flow.resume_writing()
        async with asyncio.timeout(5):
            await self.task
        head, _, body = self.transport.written.partition(b"\r\n\r\n")
        if b"content-length" in head:  # it failed before its first event
            return Events("", [], [], None, [body.decode()], head.decode())
        return events_of(dechunked(body))


class Events(NamedTuple):
    """A response as a client sees it."""

    deltas: str
    """Text and other fields in order; adjacent texts are one."""
    ids: list[int]
    finish: list[str]
    usage: Any
    errors: list[str]
    last: str


def dechunked(rest: bytes) -> bytes:
    """The body of a response with chunked encoding. Raises ValueError for a broken one."""
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, end, rest = body + rest[:length], rest[length : length + 2], rest[length + 2 :]
        assert end == b"\r\n"
        if not length:
            assert not rest, "something follows the end"
            return body


def events_of(body: bytes) -> Events:
    got, ids, finish, errors, usage = "", [], [], [], None
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    for event in events:
        *heads, data = [line for line in event.split("\n") if not line.startswith(":")]
        ids += [int(head.removeprefix("id: ")) for head in heads]
        last = data.removeprefix("data: ")
        if last == "[DONE]":
            continue
        fields = json.loads(last)
        if "error" in fields:
            errors.append(re.sub(r"from=\d+", "from=N", fields["error"]["message"]))
            continue
        usage = fields.get("usage", usage)
        for choice in fields["choices"]:
            delta = choice["delta"]
            content = delta.pop("content", "")
            got += json.dumps(delta) if delta else ""
            got += content
            got += json.dumps(choice["logprobs"]) if choice["logprobs"] else ""
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    return Events(got, ids, finish, usage, errors, last)


def options_of(**changes: Any) -> ResponseOptions:
    header = ResponseHeader("chat", ID, "demo", 1700000000)
    return ResponseOptions(header=header, ids=[ID], stream=True)._replace(**changes)


def chunks(*texts: str, end: str | None = "stop", seq: int = 0) -> list[Chunk]:
    """Pieces of one token each; the last one ends the answer."""
    made, chars = [], seq
    for number, text in enumerate(texts, seq):
        chars += len(text)
        reason = end if number == seq + len(texts) - 1 else None
        made.append(
            Chunk(
                id=ID, attempt=0, run="1", seq=number, index=number, token_ids=(number,),
                text=text, chars=chars, finish_reason=reason,
                usage=Usage(prompt_tokens=3, completion_tokens=number + 1) if reason else None,
            )
        )  # fmt: skip
    return made


async def begun(**changes: Any) -> Connection:
    """A stream whose first event is sent."""
    connection = Connection(options_of(**changes), Choice(keep=False))
    await connection.rest()
    connection.feed(*chunks("a", end=None))
    await connection.rest()
    assert connection.transport.writes == 2, "head and first event"
    return connection


async def test_event_is_written_while_its_record_is_applied() -> None:
    one = await begun()
    one.feed(*chunks("b", end=None, seq=1))
    assert b'"content":"b"' in one.transport.written
    one.feed(*chunks("c", seq=2))
    assert b'"content":"c"' not in one.transport.written, "the task sends the last one"
    got = await one.finish()
    assert (got.ids, got.finish, got.last) == ([1, 2, 3], ["stop"], "[DONE]")


async def test_full_socket_gets_nothing_and_later_all_in_one_write() -> None:
    one = await begun()
    one.flow.pause_writing()
    one.feed(*chunks("b", "c", end=None, seq=1))
    await one.rest()
    one.feed(*chunks(*"d" * 2000, end=None, seq=3))
    await one.rest()
    assert one.transport.writes == 2
    assert len(one.reply._pieces) <= MAX_PENDING_PIECES
    one.flow.resume_writing()
    one.feed(*chunks("e", end=None, seq=2003))  # before the task runs
    await one.rest()
    assert one.transport.writes == 4, "what came before the wait, and what came during it"
    one.feed(*chunks("f", end=None, seq=2004))
    assert one.transport.writes == 5
    one.feed(*chunks("g", seq=2005))
    got = await one.finish()
    assert got.deltas == '{"role": "assistant"}abc' + "d" * 2000 + "efg"
    assert got.ids == sorted(set(got.ids))


async def test_response_to_a_disconnected_client_is_not_written() -> None:
    one = await begun()
    one.cycle.disconnected = True
    one.feed(*chunks("b", end=None, seq=1))
    assert one.transport.writes == 2
    one.cycle.message_event.set()
    async with asyncio.timeout(5):
        await one.task
    assert one.replies.unfinished, "its request is cancelled"
    one.feed(*chunks("c", end=None, seq=2))
    assert one.transport.writes == 2


async def test_sink_that_fails_is_a_failure_of_its_own_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = await begun()
    monkeypatch.setattr(one.transport, "write", lambda _: 1 / 0)
    one.feed(*chunks("b", end=None, seq=1))
    monkeypatch.undo()
    got = await one.finish()
    assert got.errors
    assert got.last == "[DONE]"


async def test_comment_comes_after_a_silence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_writer, "KEEP_ALIVE_S", 0.2)
    one = await begun()
    for seq in range(1, 9):
        one.feed(*chunks("b", end=None, seq=seq))
        await asyncio.sleep(0.05)
    assert b"keep-alive" not in one.transport.written
    await asyncio.sleep(0.3)
    assert b": keep-alive" in one.transport.written
    one.feed(*chunks("c", seq=9))
    assert len((await one.finish()).ids) == 10


async def test_interval_joins_tokens_after_the_first_event() -> None:
    one = await begun(interval=3)
    one.feed(*chunks("b", "c", "d", "e", end=None, seq=1))
    assert one.transport.writes == 3
    one.feed(*chunks("f", seq=5))
    got = await one.finish()
    assert got.ids == [1, 4, 5, 6]
    assert got.deltas.endswith("abcdef")


async def test_text_of_an_interval_comes_before_a_failure() -> None:
    one = await begun(interval=9)
    one.feed(*chunks("b", "c", end=None, seq=1))
    one.reply.fail(LogClosed("gone"))
    got = await one.finish()
    assert (got.ids, got.deltas[-3:]) == ([1, 3], "abc")
    assert b"from=3" in one.transport.written, "a client that goes on there misses nothing"


def test_server_without_a_writer_offers_none() -> None:
    assert body_writer_of({"type": "http", "extensions": {}}) is None
    assert body_writer_of({"type": "http"}) is None


# --- both paths -----------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
piece = st.fixed_dictionaries(
    {
        "text": text,
        "tokens": st.integers(1, 3),
        "aside": st.sampled_from([None, None, None, {"tool_calls": [{"index": 0}]}]),
    }
)
step = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["rest", "pause", "resume", "again"]), st.just(0)),
)


def pieces_of(given_pieces: list[dict[str, Any]], *, spells: bool, counts: bool) -> list[Chunk]:
    made, index, chars = [], 0, 0
    for seq, each in enumerate(given_pieces):
        ids = tuple(range(each["tokens"] if counts else 0))
        at, chars = chars, chars + len(each["text"])
        output = () if each["aside"] is None else (PassthroughDelta(at=at, delta=each["aside"]),)
        likely = tuple((LogProb(i, -1.0),) for i in ids) if spells and not output else None
        made.append(
            Chunk(
                id=ID, attempt=0, run="1", seq=seq, index=index, token_ids=ids, text=each["text"],
                chars=chars, data=output, log_probs=likely, model="" if seq else "demo",
            )
        )  # fmt: skip
        index += len(ids)
    return made


async def got_by(
    records: list[Chunk | End], steps: list[tuple[str, int]], options: ResponseOptions,
    *, spells: bool, pushes: bool, fails: bool,
) -> tuple[Events, bytes]:  # fmt: skip
    spelling = TokenText(lambda _: b"x", as_ids=False) if spells else None
    one = Connection(options, Choice(3, keep=False, spelling=spelling), pushes=pushes)
    await one.rest()
    left = list(records)
    for name, count in (("feed", 1), ("rest", 0), *steps):
        match name:
            case "feed":
                one.feed(*left[:count])
                del left[:count]
            case "again" if one._offset:  # what is fed twice counts once
                one._offset -= 1
                one.feed(records[one._offset])
            case "rest":
                await one.rest()
            case "pause":
                one.flow.pause_writing()
            case "resume":
                one.flow.resume_writing()
    one.feed(*left)
    if fails:
        one.reply.fail(LogClosed("gone"))
    got = await one.finish()
    return got, one.transport.written


@settings(deadline=None)
@given(
    st.lists(piece, max_size=12),
    st.lists(step, max_size=20),
    st.sampled_from(["stop", "end", "error", "refused", "closed"]),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
async def test_both_paths_send_a_client_the_same(
    given_pieces: list[dict[str, Any]],
    steps: list[tuple[str, int]],
    end: str,
    interval: int,
    usage: bool,
    spells: bool,
    counts: bool,
) -> None:
    records: list[Chunk | End] = [*pieces_of(given_pieces, spells=spells, counts=counts)]
    n = len(records)
    if end == "stop":
        tokens = sum(len(r.token_ids) for r in records if isinstance(r, Chunk))
        chars = sum(len(r.text) for r in records if isinstance(r, Chunk))
        records += [
            Chunk(
                id=ID, attempt=0, run="1", seq=n, index=tokens, chars=chars, finish_reason="stop",
                usage=Usage(prompt_tokens=3, completion_tokens=tokens),
            )
        ]  # fmt: skip
    elif end != "closed":
        code = {"end": "stop", "error": "attempts", "refused": "no_workers"}[end]
        records += [End(id=ID, code=code)]
    options = options_of(include_usage=usage, interval=interval)
    fails = end == "closed"
    slow = [("rest", 0), ("feed", 1)] * (n + 2)
    one, _ = await got_by(records, steps, options, spells=spells, pushes=True, fails=fails)
    other, _ = await got_by(records, steps, options, spells=spells, pushes=False, fails=fails)
    assert one._replace(ids=[]) == other._replace(ids=[])
    assert one.ids == sorted(one.ids)
    assert one.ids[-1:] == other.ids[-1:]
    # Piece by piece on a quick socket there is nothing to join: the bytes are the same.
    kinds = [
        await got_by(records, slow, options, spells=spells, pushes=way, fails=fails)
        for way in (True, False)
    ]
    assert kinds[0] == kinds[1]


# --- the real server ------------------------------------------------------------------------------


class Served:
    """Streams of the real server, one reply for all requests; what is written past ASGI counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reply = Reply(ID)
        self.pushed = 0
        self._offset = 0
        write = BodyWriter.write

        def count(writer: BodyWriter, body: bytes) -> None:
            self.pushed += 1
            write(writer, body)

        monkeypatch.setattr(BodyWriter, "write", count)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        @asynccontextmanager
        async def joined() -> AsyncIterator[MergedReplies]:
            yield MergedReplies([self.reply], detached=False)

        choice = Choice(keep=False)
        response = CompletionResponse(
            options_of(), [choice], joined(), SystemClock(), METRICS, 600.0, 0.0
        )
        await response(scope, receive, send)

    def feed(self, *records: Chunk | End) -> None:
        for record in records:
            self.reply.apply(MemoryRecord("responses", 0, self._offset, 0, *encode(record, ID)))
            self._offset += 1


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Served, int]]:
    streams, ctx = Served(monkeypatch), ProcessContext("test")
    server = UvicornServer(streams, "127.0.0.1", 0, ctx)
    await server.start()
    yield streams, int(server.url.rpartition(":")[2])
    await server.stop()
    await ctx.cancel_tasks()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_client_that_reads_late_gets_every_token(
    served: tuple[Served, int], version: bytes
) -> None:
    streams, port = served
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
    writer.write(b"GET / HTTP/%b\r\nhost: localhost\r\nconnection: close\r\n\r\n" % version)
    streams.feed(*chunks("a", end=None))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    for seq in range(1, 4001):  # 8 MB, more than the buffers of two sockets
        streams.feed(*chunks("word" * 500, end=None, seq=seq))
        if seq % 50 == 0:
            await asyncio.sleep(0)
    assert 0 < streams.pushed < 4000, "the socket was full"
    assert len(streams.reply._pieces) <= MAX_PENDING_PIECES
    streams.feed(*chunks("z", seq=4001))
    async with asyncio.timeout(20):
        rest = await reader.read(-1)
    got = events_of(rest if version == b"1.0" else dechunked(rest))
    writer.close()
    assert got.deltas == '{"role": "assistant"}a' + "word" * 500 * 4000 + "z"
    assert got.ids == sorted(set(got.ids))
    assert (got.ids[-1], got.finish, got.last) == (4002, ["stop"], "[DONE]")
