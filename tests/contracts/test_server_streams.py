"""Tests of streamed answers on raw sockets: their frames, their breaks and their connections."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Self

import pytest

from kvlane.app.engine.attached import server_connection
from kvlane.app.engine.attached.server_client import EventStream, ServerClient
from kvlane.app.engine.attached.server_errors import (
    DONE,
    ConnectionBroken,
    RequestRejected,
    ResponseTooLarge,
    ServerFailed,
    ServerSilent,
)
from tests.harness.http_harness import until

SILENCE_S = 0.8
EVENT_BYTES = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
EVENTS = [b'{"n": 1}', '{"text": "für 東京 🚄"}'.encode(), DONE]
BODY = b"".join(b"data: %b\n\n" % event for event in EVENTS)
FIRST = BODY[:16]
END = b"0\r\n\r\n"
Part = bytes | float | Callable[["Visit"], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def single_bytes(data: bytes) -> list[Part]:
    return [data[at : at + 1] for at in range(len(data))]


def by_bytes(body: bytes) -> bytes:
    return b"".join(chunk(body[at : at + 1]) for at in range(len(body)))


class Visit:
    """A connection of the client, at the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.is_left = asyncio.Event()
        """Whether the client has closed it."""


class RawServer:
    """A server whose answer to the n-th request are the n-th parts: bytes, pauses in seconds, and
    functions. After the last part of the last one it closes the connection."""

    def __init__(self, *answers: list[Part], tls: ssl.SSLContext | None = None) -> None:
        self._answers = list(answers)
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests: list[tuple[str, bytes]] = []
        self.visits: list[Visit] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        scheme = "http" if self._tls is None else "https"
        self.client = ServerClient(f"{scheme}://127.0.0.1:{self.port}", SILENCE_S, "secret")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stream(self, event_bytes: int = EVENT_BYTES) -> EventStream:
        return self.client.open_stream("/v1/completions", {"a": 1}, event_bytes, "00-1-2-01")

    async def events(self, got: list[bytes] | None = None) -> list[bytes]:
        """The events of an answer; added to `got`."""
        got = [] if got is None else got
        async with self.stream() as stream:
            async for event in each(stream):
                got.append(event)
        return got

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(Visit(reader, writer)))
        self._tasks.add(task)

    async def _serve(self, visit: Visit) -> None:
        self.visits.append(visit)
        try:
            while self._answers:
                head = (await visit.reader.readuntil(b"\r\n\r\n")).decode()
                size = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                self.requests.append((head, await visit.reader.readexactly(size)))
                for part in self._answers.pop(0):
                    if callable(part):
                        await part(visit)
                    elif isinstance(part, float):
                        await asyncio.sleep(part)
                    else:
                        visit.writer.write(part)
                        await visit.writer.drain()
                        await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            visit.is_left.set()
        finally:
            visit.writer.close()


async def each(stream: EventStream) -> AsyncIterator[bytes]:
    while (event := await stream.next_event()) is not None:
        yield event


async def closes(visit: Visit) -> None:
    visit.writer.close()


async def waits(visit: Visit) -> None:
    """Nothing more is sent, until the client closes."""
    assert await visit.reader.read() == b""
    visit.is_left.set()


WHOLE: dict[str, list[Part]] = {
    "one_packet": [CHUNKED + chunk(BODY) + END],
    "single_bytes": single_bytes(CHUNKED + chunk(BODY) + END),
    "a_chunk_for_each_byte": [CHUNKED + by_bytes(BODY) + END],
    "lines_of_windows_cut_between_their_bytes": [
        CHUNKED + by_bytes(BODY.replace(b"\n", b"\r\n")) + END
    ],
    "events_in_one_chunk_each": [CHUNKED, *(chunk(e + b"\n\n") for e in BODY.split(b"\n\n")), END],
    "interim_responses": [
        b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\ncontent-length: 3\r\n\r\n",
        CHUNKED + chunk(BODY) + END,
    ],
    "interim_response_in_the_same_packet": [
        b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + chunk(BODY) + END
    ],
    "no_length": [HEAD + b"\r\n" + BODY[:20], BODY[20:], closes],
    "no_length_and_http_1.0": [b"HTTP/1.0 200 OK\r\n\r\n" + BODY, closes],
    "content_length": [HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY), BODY],
    "content_length_and_close": [
        HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY, closes
    ],
    "trailers": [CHUNKED + chunk(BODY) + b"0\r\nx-cost: 1\r\nx-other: 7\r\n\r\n"],
    "extensions_of_chunks": [CHUNKED + b'%x;a="b"\r\n' % len(BODY) + BODY + b"\r\n" + END],
    "lines_without_cr_in_the_head": [CHUNKED.replace(b"\r\n", b"\n") + chunk(BODY) + END],
    "other_fields_and_comments": [
        CHUNKED + chunk(b"event: message\nid: 1\n" + BODY.replace(b"\n\n", b"\n\n: ping\n\n")) + END
    ],
    "data_on_several_lines": [
        CHUNKED + chunk(b'data: {"n":\ndata: 1}\n\n') + chunk(BODY[len(FIRST) :]) + END
    ],
    "no_last_line_end": [
        CHUNKED + chunk(BODY.removesuffix(b"\n\n")) + END
    ],
    "byte_order_mark": [CHUNKED + chunk(b"\xef\xbb\xbf" + BODY) + END],
    "byte_order_mark_in_pieces": [CHUNKED + by_bytes(b"\xef\xbb\xbf" + BODY) + END],
    "garbage_behind_the_end": [CHUNKED + chunk(BODY) + END + b"\x00garbage", closes],
    "a_second_answer_behind_the_end": [2 * (CHUNKED + chunk(BODY) + END)],
}  # fmt: skip


@pytest.mark.parametrize("framing", WHOLE)
async def test_events_do_not_depend_on_the_frames_of_an_answer(framing: str) -> None:
    async with RawServer(WHOLE[framing]) as server:
        got = await server.events()
    assert [event.replace(b'"n":1', b'"n": 1') for event in got] == EVENTS


BREAKS: dict[str, tuple[list[Part], int, str]] = {
    "closed_before_the_head": ([closes], 0, "the server closed it"),
    "closed_in_the_head": ([HEAD, closes], 0, "the server closed it"),
    "closed_in_a_chunk": ([CHUNKED + chunk(BODY)[:30], closes], 1, "the server closed it"),
    "closed_between_chunks": ([CHUNKED + chunk(BODY), closes], 3, "the server closed it"),
    "shorter_than_its_length": (
        [HEAD + b"content-length: 999\r\n\r\n" + BODY, closes], 3, "the server closed it"
    ),
    "garbage": ([b"SSH-2.0-OpenSSH_9.6\r\n"], 0, "not valid HTTP"),
    "garbage_for_a_chunk": ([CHUNKED + chunk(BODY) + b"many\r\n"], 3, "not valid HTTP"),
    "large_head": ([HEAD + b"x: " + b"y" * 70_000], 0, "larger than 64 KiB"),
    "many_fields": ([HEAD, *20 * [b"x: " + b"y" * 4000 + b"\r\n"]], 0, "larger than 64 KiB"),
    "many_interim_responses": (
        [*3000 * [b"HTTP/1.1 100 Continue\r\n\r\n"]], 0, "larger than 64 KiB"
    ),
    "large_trailers": (
        [CHUNKED + chunk(BODY) + b"0\r\n", *20 * [b"x: " + b"y" * 4000 + b"\r\n"]], 3,
        "larger than 64 KiB",
    ),
    "large_extension_of_a_chunk": (
        [CHUNKED + chunk(BODY) + b"5;", *20 * [b"y" * 4000]], 3, "larger than 64 KiB"
    ),
    "compressed": (
        [HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b"], 0,
        "content-encoding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BREAKS)
async def test_events_before_a_break_are_read_and_the_break_is_an_error(fault: str) -> None:
    parts, whole, words = BREAKS[fault]
    got: list[bytes] = []
    async with RawServer(parts) as server:
        with pytest.raises(ConnectionBroken, match=f"the connection broke: .*{words}"):
            await server.events(got)
    assert got == EVENTS[:whole]


# --- connections ----------------------------------------------------------------------------------

ANSWER = CHUNKED + chunk(BODY) + END


async def test_answers_one_after_the_other_have_one_connection() -> None:
    async with RawServer([ANSWER], single_bytes(ANSWER), [ANSWER]) as server:
        for _ in range(3):
            assert await server.events() == EVENTS
        assert (len(server.requests), len(server.visits)) == (3, 1)
    head, body = server.requests[1]
    assert body == b'{"a":1}'
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    fields = {line.lower() for line in head.split("\r\n")[1:]}
    assert fields >= {
        f"host: 127.0.0.1:{server.port}", "authorization: bearer secret", "content-length: 7",
        "accept-encoding: identity", "content-type: application/json", "traceparent: 00-1-2-01",
    }  # fmt: skip


@pytest.mark.parametrize(
    "last",
    [
        [ANSWER, closes],
        [ANSWER + b"HTTP/1.1 408 Timeout\r\n\r\n"],
        [ANSWER, 0.05, b"garbage"],
        [CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + chunk(BODY) + END],
        [b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY],
    ],
)
async def test_connection_that_a_server_ends_has_no_other_request(last: list[Part]) -> None:
    async with RawServer(last, [ANSWER]) as server:
        assert await server.events() == EVENTS
        await asyncio.sleep(0.1)
        assert await server.events() == EVENTS
        assert (len(server.requests), len(server.visits)) == (2, 2)


async def test_connection_that_was_closed_since_the_last_turn_of_the_loop_has_no_request() -> None:
    async with RawServer([ANSWER], [ANSWER]) as server:
        assert await server.events() == EVENTS
        server.visits[0].writer.transport.abort()
        await asyncio.sleep(0)  # the server has closed it, and the client has not read this
        assert await server.events() == EVENTS
        assert (len(server.requests), len(server.visits)) == (2, 2)


async def test_request_is_not_sent_again_when_its_connection_breaks() -> None:
    async with RawServer([ANSWER], [closes], [ANSWER]) as server:
        assert await server.events() == EVENTS
        with pytest.raises(ConnectionBroken) as broken:
            await server.events()
        assert broken.value.retryable
        assert (len(server.requests), len(server.visits)) == (2, 1)


async def test_end_of_the_body_after_the_last_event_keeps_the_connection() -> None:
    async with RawServer([CHUNKED + chunk(BODY), 0.05, END], [ANSWER]) as server:
        async with server.stream() as stream:
            while await stream.next_event() != DONE:
                pass
        await until(lambda: bool(server.client.connections._idle))
        assert await server.events() == EVENTS
        assert len(server.visits) == 1


async def test_body_that_goes_on_after_the_last_event_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_connection, "END_S", 0.05)
    async with RawServer([CHUNKED + chunk(BODY), waits], [ANSWER]) as server:
        async with server.stream() as stream:
            while await stream.next_event() != DONE:
                pass
        async with asyncio.timeout(5):
            await server.visits[0].is_left.wait()


async def test_answer_before_the_end_of_its_request_ends_the_connection() -> None:
    visits: list[asyncio.StreamWriter] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(writer)
        await reader.readuntil(b"\r\n\r\n")  # and nothing of a body that fills all buffers
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = ServerClient(f"http://127.0.0.1:{port}", SILENCE_S)
        try:
            for body in ({"a": "x" * (1 << 25)}, {"a": 1}):
                with pytest.raises(ServerFailed):
                    async with client.open_stream("/v1/completions", body, EVENT_BYTES):
                        """Refused."""
            assert len(visits) == 2
        finally:
            await client.close()
            for writer in visits:
                writer.transport.abort()


async def test_answer_that_is_left_early_closes_its_connection() -> None:
    async with RawServer([CHUNKED + chunk(FIRST), waits], [ANSWER]) as server:
        async with server.stream() as stream:
            assert await stream.next_event() == EVENTS[0]
        async with asyncio.timeout(5):
            await server.visits[0].is_left.wait()
        assert await server.events() == EVENTS


async def test_unused_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "IDLE_S", 0.05)
    async with RawServer([ANSWER], [ANSWER]) as server:
        await server.events()
        async with asyncio.timeout(5):
            await server.visits[0].is_left.wait()


async def test_connections_without_use_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "MAX_IDLE", 1)
    async with RawServer([0.1, ANSWER], [0.1, ANSWER], [ANSWER]) as server:
        assert await asyncio.gather(server.events(), server.events()) == [EVENTS, EVENTS]
        await until(lambda: any(visit.reader.at_eof() for visit in server.visits))
        assert await server.events() == EVENTS
        assert len(server.visits) == 2


async def test_answer_over_tls_has_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the command openssl is missing")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-days", "1", "-subj", "/CN=server", "-addext",
            "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate,
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    async with RawServer([ANSWER], tls=tls) as server:
        with pytest.raises(ConnectionBroken, match=r"cannot be reached: .*certificate"):
            await server.events()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with RawServer([ANSWER], single_bytes(ANSWER), tls=tls) as server:
        assert await server.events() == EVENTS
        assert await server.events() == EVENTS
        assert len(server.visits) == 1


# --- limits ---------------------------------------------------------------------------------------


async def test_server_is_read_no_faster_than_its_reader() -> None:
    event, sent = b'data: "%b"\n\n' % (b"x" * 10_000), 0

    async def floods(visit: Visit) -> None:
        nonlocal sent
        visit.writer.transport.set_write_buffer_limits(0)
        for number in range(3000):
            visit.writer.write(chunk(b"data: %d\n\n" % number + event))
            await visit.writer.drain()
            sent += 1

    async with RawServer([CHUNKED, floods, END]) as server, server.stream() as stream:
        assert await stream.next_event() == b"0"
        await asyncio.sleep(SILENCE_S + 0.2)  # the time of the reader is not that of the server
        assert sent < 2000
        numbers = [event async for event in each(stream) if len(event) < 10]
    assert numbers == [b"%d" % number for number in range(1, 3000)]


async def test_lines_without_an_event_do_not_extend_the_time_of_a_server() -> None:
    pings: list[Part] = [part for _ in range(200) for part in (chunk(b": ping\n\n"), 0.01)]
    async with RawServer([CHUNKED + chunk(FIRST), *pings]) as server:
        began = asyncio.get_running_loop().time()
        with pytest.raises(ServerSilent, match=r"sent nothing for 0\.8 s"):
            await server.events()
        assert asyncio.get_running_loop().time() - began < 1.8


async def test_each_event_extends_the_time_of_a_server() -> None:
    parts: list[Part] = [part for _ in range(6) for part in (chunk(FIRST), 0.15)]
    async with RawServer([CHUNKED, *parts, END]) as server:
        assert len(await server.events()) == 6


async def test_time_of_a_reader_may_be_shorter_than_that_of_the_server() -> None:
    async with RawServer([CHUNKED + chunk(FIRST), waits]) as server, server.stream() as stream:
        assert await stream.next_event() == EVENTS[0]
        with pytest.raises(TimeoutError):
            await stream.next_event(asyncio.get_running_loop().time() + 0.05)
        with pytest.raises(ServerSilent):
            await stream.next_event()


@pytest.mark.parametrize("line_end", [b"", b"\n"])
async def test_event_beyond_its_limit_is_an_error_behind_those_before_it(line_end: bytes) -> None:
    large = FIRST + b"data: " + b"x" * 3000 + line_end
    async with (
        RawServer([CHUNKED + chunk(large), waits]) as server,
        server.stream(event_bytes=1000) as stream,
    ):
        assert await stream.next_event() == EVENTS[0]
        with pytest.raises(ResponseTooLarge, match="an event of more than 1000 bytes"):
            await stream.next_event()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"HTTP/1.1 400 -\r\ncontent-length: 3\r\n\r\nbad", RequestRejected, "^bad$"),
        (b"HTTP/1.1 500 -\r\n\r\nbad", ServerFailed, "answered 500: bad"),
        (b"HTTP/1.1 204 -\r\n\r\n", ServerFailed, "answered 204"),
        (b"HTTP/1.1 307 -\r\nlocation: /a\r\ncontent-length: 0\r\n\r\n", ServerFailed, "307"),
        (b"HTTP/1.1 101 -\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nx", ServerFailed, "101"),
        (b"HTTP/1.1 500 -\r\ncontent-length: 99999\r\n\r\n" + b"x" * 70_000, ServerFailed,
         "answered 500: an answer of more than 64 KiB"),
    ],
)  # fmt: skip
async def test_other_status_is_an_error_with_its_body(
    answer: bytes, kind: type[ServerFailed], words: str
) -> None:
    async with RawServer([answer, closes]) as server:
        with pytest.raises(kind, match=words):
            await server.events()


@pytest.mark.parametrize("way", ["events", "whole"])
@pytest.mark.parametrize("sent", [[], [CHUNKED], [CHUNKED + chunk(b'data: {"a')]])
async def test_abort_from_another_task_ends_any_wait(sent: list[Part], way: str) -> None:
    async with RawServer([*sent, waits]) as server:
        server.client.read_timeout_s = 1000.0
        stream = server.stream()

        async def reads() -> None:
            async with stream:
                await (stream.next_event() if way == "events" else stream.read_all(1000))

        reading = asyncio.create_task(reads())
        await asyncio.sleep(0.05)
        stream.close()
        with pytest.raises(ConnectionBroken, match="aborted"):
            await asyncio.wait_for(reading, 5)
        async with asyncio.timeout(5):
            await server.visits[0].is_left.wait()
        stream = server.stream()
        stream.close()
        with pytest.raises(ConnectionBroken, match="aborted"):  # before it was opened
            await stream.__aenter__()


async def test_abort_ends_the_wait_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with RawServer([ANSWER]) as server:

        async def never() -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(server.client.connections, "acquire", never)
        stream = server.stream()
        opening = asyncio.create_task(stream.__aenter__())
        await asyncio.sleep(0.05)
        stream.close()
        with pytest.raises(ConnectionBroken, match="aborted"):
            await asyncio.wait_for(opening, 5)
        with pytest.raises(ServerSilent, match="no connection in time"):
            await server.events()


async def test_end_of_a_client_ends_its_streams() -> None:
    async with RawServer([CHUNKED, waits]) as server:
        reading = asyncio.create_task(server.events())
        await asyncio.sleep(0.05)
        await server.client.close()
        with pytest.raises(ConnectionBroken):
            await asyncio.wait_for(reading, 5)
        with pytest.raises(ConnectionBroken, match="cannot be reached"):
            await server.events()
