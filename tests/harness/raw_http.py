"""HTTP on a raw socket: bytes out, and the responses that come back, read strictly by RFC 9112."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

WAIT_S = 10.0


class Response(NamedTuple):
    """One response. `headers`: the values of each, by lower-case name."""

    status: int
    headers: dict[str, list[str]]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        got: dict[str, Any] = json.loads(self.body)["error"]
        assert set(got) == {"message", "type", "param", "code"}
        return got


class Conversation(NamedTuple):
    """All that came back on one connection."""

    responses: list[Response]
    is_closed: bool
    """The server closed the connection while the client waited for more."""

    @property
    def statuses(self) -> list[int]:
        return [response.status for response in self.responses]


class Desynchronised(AssertionError):
    """The server sent bytes that are no response."""


async def converse(
    port: int, *parts: bytes | float, methods: Sequence[str] = (), count: int = 1,
    ends: str = "", more_s: float = 0.0, wait_s: float = WAIT_S,
) -> Conversation:  # fmt: skip
    """Send parts, with pauses between them in seconds, and read `count` responses.

    `methods`: those of the requests, where they are not GET or POST. `more_s`: time to wait for
    more responses, or for the end of the connection. `ends`: "half" closes the sending side behind
    the last part, "abort" resets the connection there.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
    sending = asyncio.create_task(_send(writer, parts, ends))
    responses: list[Response] = []
    is_closed = False
    try:
        while True:
            method = methods[len(responses)] if len(responses) < len(methods) else "POST"
            limit_s = wait_s if len(responses) < count else more_s
            try:
                async with asyncio.timeout(limit_s):
                    response = await _read_response(reader, method)
            except TimeoutError:
                break
            if response is None:
                is_closed = True
                break
            responses.append(response)
    finally:
        sending.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):
            await sending
        writer.transport.abort()
    return Conversation(responses, is_closed)


async def _send(writer: asyncio.StreamWriter, parts: Sequence[bytes | float], ends: str) -> None:
    with suppress(ConnectionError):
        for part in parts:
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(part)
                await writer.drain()
        if ends == "half":
            writer.write_eof()
        elif ends == "abort":
            writer.transport.abort()


async def _read_response(reader: asyncio.StreamReader, method: str) -> Response | None:
    """The next final response; None at the end of the connection, also within a response."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            version, _, rest = head.partition(b" ")
            if version != b"HTTP/1.1" or not rest[:3].isdigit():
                raise Desynchronised(head)
            if not rest.startswith(b"1"):
                break
        headers: dict[str, list[str]] = {}
        for line in head.decode("latin-1").split("\r\n")[1:-2]:
            name, colon, value = line.partition(":")
            if not colon or name != name.strip():
                raise Desynchronised(head)
            headers.setdefault(name.lower(), []).append(value.strip())
        status = int(rest[:3])
        return Response(status, headers, await _read_body(reader, method, status, headers))
    except (asyncio.IncompleteReadError, ConnectionError) as e:
        if isinstance(e, asyncio.IncompleteReadError) and not b"HTTP/1.1".startswith(e.partial[:8]):
            raise Desynchronised(e.partial) from None
        return None


async def _read_body(
    reader: asyncio.StreamReader, method: str, status: int, headers: dict[str, list[str]]
) -> bytes:
    if method == "HEAD" or status in (204, 304):
        return b""
    if "content-length" in headers:
        (length,) = headers["content-length"]
        return await reader.readexactly(int(length))
    if "transfer-encoding" not in headers:
        return await reader.read()
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        try:
            size = int(line, 16)
        except ValueError:
            raise Desynchronised(line) from None
        data = await reader.readexactly(size + 2)
        if data[size:] != b"\r\n":
            raise Desynchronised(data)
        if not size:
            return body
        body += data[:size]
