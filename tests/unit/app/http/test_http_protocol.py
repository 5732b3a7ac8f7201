"""Tests of the HTTP protocol without sockets: requests that arrive in pieces of any size."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from kvlane.app.http.server.connection_table import ConnectionTable
from kvlane.app.http.server.http_protocol import BoundedProtocol

HOST = b"host: localhost\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
INNER = b"GET /inner HTTP/1.1\r\nhost: localhost\r\n\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"
REQUESTS = (
    b"GET /get HTTP/1.1\r\nx-a: \r\nx-b: value\r\n" + HOST + b"\r\n",
    b"POST /length HTTP/1.1\r\n" + HOST + b"content-length: %d\r\n\r\n" % len(INNER) + INNER,
    b"POST /chunks HTTP/1.1\r\n" + HOST + CHUNKED + b"x-c: d\r\n\r\n"
    b'5;a="b c"\r\n\r\nab\n\r\n%x\r\n' % len(INNER) + INNER + b"\r\n0\r\nx-trailer: 1\r\n\r\n",
    b"POST /upgrade HTTP/1.1\r\n" + HOST + UPGRADE + b"content-length: 3\r\n\r\nabc",
    b"GET /upgrade HTTP/1.1\r\n" + HOST + UPGRADE + b"\r\n",
    b"\r\n\r\nHEAD /head HTTP/1.1\r\n" + HOST + b"\r\n",
)


class RecordingTransport(asyncio.Transport):
    """The bytes that a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """A response with all that was read of a request."""
    request = Request(scope, receive)
    body = await request.body()
    text = f"{request.method} {request.url.path} {sorted(request.headers.items())} {body!r}\n"
    await PlainTextResponse(text)(scope, receive, send)


async def responses_to(*pieces: bytes) -> bytes:
    """The bytes that answer a connection's input in these pieces; between some, the application
    runs."""
    config: Any = uvicorn.Config(echo, log_config=None)
    config.load()
    connection = BoundedProtocol(
        ConnectionTable(8, lambda: 0.0), config=config, server_state=ServerState(), app_state={}
    )
    transport = RecordingTransport()
    connection.connection_made(transport)
    for number, piece in enumerate(pieces):
        connection.data_received(piece)
        for _ in range(number % 4 * 4):
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    return transport.written


async def test_pieces_of_any_size_give_the_same_requests() -> None:
    whole = b"".join(REQUESTS)
    expected = [await responses_to(request) for request in REQUESTS]
    assert all(response.startswith(b"HTTP/1.1 200") for response in expected)
    draw = random.Random(1)
    for count in (2, 3, 3, 5, 10, 40) * 40:
        cuts = sorted(draw.sample(range(1, len(whole)), count - 1))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert await responses_to(*pieces) == b"".join(expected), pieces


async def test_head_that_begins_in_the_read_of_the_body_before_keeps_its_line_ends() -> None:
    first, second = REQUESTS[1], REQUESTS[0]
    expected = await responses_to(first) + await responses_to(second)
    for at in range(1, len(second)):
        assert await responses_to(first + second[:at], second[at:]) == expected, second[at:]
